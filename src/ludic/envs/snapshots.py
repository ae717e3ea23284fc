"""What envs with snapshots share: opening one of the right kind, and dice as plain JSON."""

import random
from typing import Any

from ludic.types import JSON, ConfigError, Snapshot


def world_of(snapshot: Snapshot, *, kind: str, version: int) -> dict[str, Any]:
    """The stored world, if it was taken of this kind of env and in this version."""
    if (snapshot.env_kind, snapshot.version) != (kind, version):
        raise ConfigError(f"Cannot restore {snapshot.env_kind} v{snapshot.version} into {kind} v{version}.")
    return dict(snapshot.world)


def dice_to_json(rng: random.Random) -> JSON:
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def dice_from_json(stored: Any) -> random.Random:
    version, words, gauss = stored
    rng = random.Random()
    rng.setstate((version, tuple(words), gauss))
    return rng
