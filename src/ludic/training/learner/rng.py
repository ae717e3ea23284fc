"""The process's random generators as data: python, numpy, torch on CPU and on every GPU.

The state is made of tensors and plain values only, so `torch.load(weights_only=True)` can read it back. Generators that
an object owns (a batch source's shuffle) are saved by that object.
"""

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ludic.types import ConfigError

logger = logging.getLogger(__name__)


def rng_state() -> dict[str, Any]:
    """Everything that the next random number of this process depends on."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Continue where `rng_state` was taken."""
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"].cpu())
        _restore_cuda([each.cpu() for each in state["cuda"]])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"The random state cannot be restored ({type(error).__name__}: {error}). Give what `rng_state` returned; checkpoints "
            "of a Trainer have it."
        ) from error


def _restore_cuda(saved: list[torch.Tensor]) -> None:
    available = torch.cuda.device_count()
    if len(saved) != available:
        logger.warning(
            "The random state was saved with %d GPUs and there are %d here; samples drawn on a GPU will differ.",
            len(saved),
            available,
        )
    for device, each in zip(range(available), saved, strict=False):  # as many as both have
        torch.cuda.set_rng_state(each, device)
