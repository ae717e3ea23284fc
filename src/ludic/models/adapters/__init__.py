"""Many LoRA adapters over one frozen base model, several of them in one forward pass.

Training runs of several tenants and the embedded inference engine import it. Start with adapter.py (the weights of one
adapter, and the products of a pass). Training: bank.py (a pass over tokens of several adapters). Sampling: forward.py.
"""

from typing import TYPE_CHECKING

from ludic.models.adapters.adapter import AdapterSpec, LoraAdapter
from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic.models.adapters.bank import AdapterBank

__all__ = ["AdapterBank", "AdapterSpec", "LoraAdapter"]

__getattr__ = lazy(__name__, {"bank": "AdapterBank"})
