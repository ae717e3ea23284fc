"""Many LoRA adapters over one frozen base model, several of them in one forward pass.

Training runs of several tenants and the embedded inference engine import it. Start with adapter.py (the weights of one
adapter, and the products of a pass). Training: bank.py (a pass over tokens of several adapters). Sampling: forward.py.
"""

from ludic.models.adapters.adapter import AdapterSpec, LoraAdapter
from ludic.models.adapters.bank import AdapterBank

__all__ = ["AdapterBank", "AdapterSpec", "LoraAdapter"]
