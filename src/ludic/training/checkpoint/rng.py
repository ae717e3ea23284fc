"""Random generators: python, numpy, torch on the CPU and on every GPU."""

import logging
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ludic.types import ConfigError

logger = logging.getLogger(__name__)


def rng_state() -> dict[str, Any]:
    """Everything that the next random number of this process depends on."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    keys_K = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": (name, keys_K, int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators to what `rng_state` returned."""
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"].cpu())
        saved, available = [each.cpu() for each in state["cuda"]], torch.cuda.device_count()
        for device, each in zip(range(available), saved, strict=False):  # those that both have
            torch.cuda.set_rng_state(each, device)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"The random state cannot be restored ({type(error).__name__}: {error}). Give what `rng_state` returned, which "
            "checkpoints of a Trainer have."
        ) from error
    if len(saved) != available:
        message = "The random state was saved with %d GPUs and there are %d here; samples drawn on a GPU will differ."
        logger.warning(message, len(saved), available)


def rng_of_new_rank(of_first: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """For a rank that did not exist when the checkpoint was made: other numbers than another rank's, and always the same."""
    seed = zlib.crc32(of_first["torch"].numpy().tobytes(), rank)
    before = rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    new = rng_state()
    restore_rng(before)
    return new
