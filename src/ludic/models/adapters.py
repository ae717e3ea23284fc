"""Several LoRA policies over one base model, whose weights are in memory once.

peft can hold several adapters in one model, but then which of them is switched on is a state of that model: a policy that is
trained and another that is sampled would have to take turns. Here every policy is a model of its own, with modules of its own
over the base's very tensors, so none can see what is switched on in another.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ludic.models.head import plain_model
from ludic.models.view import shared_view
from ludic.types import ConfigError, MissingExtra, derive_seed


def adapters_on(base: Any, names: Sequence[str], config: Any, *, seed: int = 0) -> dict[str, Any]:
    """A peft model for every name, each with a new adapter of `config` (peft's LoraConfig). `base` is frozen by it.

    The first values of an adapter depend on `seed` and its place among the names, and on no other random number.
    """
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", "several adapters on one base model") from error
    if plain_model(base) is not base:
        raise ConfigError(
            f"adapters_on was given a {type(base).__name__}, which has an adapter already. Give the model under it "
            "(get_base_model()), or merge the adapter first (merge_and_unload())."
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"adapters_on was given the names {list(names)}; each policy needs a name of its own.")
    base.requires_grad_(False)
    made = {}
    for number, name in enumerate(names):
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, number))
            made[name] = get_peft_model(shared_view(base), copy.deepcopy(config))
    return made
