"""An older import path of algorithms and of their preprocess hooks; they live in `algorithms/` and `filters.py`."""

from ludic.training import algorithms
from ludic.training.algorithms import *  # noqa: F403 - the same names, whatever is added there
from ludic.training.filters import (
    PreprocessFn,
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)

__all__ = [
    *algorithms.__all__,
    "PreprocessFn", "compose_preprocess", "validate_actor_logps", "drop_zero_weight_samples", "filter_zero_variance_groups",
]  # fmt: skip
