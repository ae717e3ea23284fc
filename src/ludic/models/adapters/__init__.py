"""Many LoRA adapters over one frozen base model, several of them in one forward pass.

The Tinker server's training runs and the embedded inference engine import it. Start with adapter.py (the weights of one
adapter), then bank.py (a pass over tokens of several adapters) and head.py (log-probabilities).
"""

from ludic.models.adapters.adapter import AdapterSpec, LoraAdapter
from ludic.models.adapters.bank import AdapterBank

__all__ = ["AdapterBank", "AdapterSpec", "LoraAdapter"]
