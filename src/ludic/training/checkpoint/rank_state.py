"""What a rank gets back of a checkpoint's state, whatever the number of ranks that saved it.

What all ranks share is easy. Of what each has for itself, random generators can be made anew; a position in the data
cannot: read by another number of ranks, some samples would come twice and others never.
"""

import logging
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ludic.training.checkpoint.atomic import CheckpointError, read_manifest
from ludic.training.checkpoint.shard_files import is_sharded, read_rank_state
from ludic.training.checkpoint.state_files import read_state
from ludic.training.learner.rng import restore_rng, rng_state

logger = logging.getLogger(__name__)

RNG = "rng"


def state_for(folder: Path, *, rank: int = 0, world_size: int = 1, per_rank: Sequence[str] = (RNG,)) -> dict[str, Any]:
    """The state in `folder` as this rank goes on from it; `per_rank` names what each rank has for itself now."""
    shared = read_state(folder)
    num_saved, of_first, own = 1, {}, {}
    if is_sharded(folder):
        num_saved = (read_manifest(folder) or {})["world_size"]
        of_first, own = read_rank_state(folder, 0), read_rank_state(folder, rank)
    _check_positions(folder, shared, of_first, num_saved, world_size, per_rank)
    if num_saved == world_size:
        return {**shared, **own}
    if rank == 0:
        logger.warning(
            "%s was saved by %d ranks and there are %d now; what is random will differ.", folder, num_saved, world_size
        )
    before = of_first.get(RNG, shared.get(RNG))
    if before is not None and not own and rank:
        own = {RNG: _new_rng(before, rank)}
    return {**shared, **own}


def _check_positions(
    folder: Path,
    shared: Mapping[str, Any],
    of_first: Mapping[str, Any],
    num_saved: int,
    world_size: int,
    per_rank: Sequence[str],
) -> None:
    divided = [
        name
        for name in of_first
        if name != RNG and (num_saved != world_size or (world_size > 1 and name not in per_rank))
    ]
    if divided:
        raise CheckpointError(
            f"{folder} was saved by {num_saved} ranks, each with its own {', '.join(divided)}, which cannot be divided anew. "
            f"Resume with {num_saved} ranks that read their own data (now: {world_size}), or start a new run from the weights."
        )
    undivided = [name for name in per_rank if name != RNG and name in shared and world_size > 1]
    if undivided:
        raise CheckpointError(
            f"{folder} has one {', '.join(undivided)} for all ranks, but each of the {world_size} ranks here wants its own. Let "
            "rank 0 read the data for all, as when it was saved, or start a new run from the weights."
        )


def _new_rng(of_first: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """For a rank that did not exist when the checkpoint was made: not what another rank draws, and always the same."""
    seed = zlib.crc32(of_first["torch"].numpy().tobytes(), rank)
    before = rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    new = rng_state()
    restore_rng(before)
    return new
