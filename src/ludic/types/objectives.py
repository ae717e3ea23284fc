"""Which objective a sample is trained for, where one batch mixes several: a name in its meta.

A name in `meta` travels with the sample, over a queue and into a checkpoint. A request may name it, too: what is played
for that request is then of that objective.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ludic.types.samples import SAWItem

OBJECTIVE = "objective"
"""The key."""


def objective_of(meta: Mapping[str, Any]) -> str | None:
    """What a sample's or a rollout's meta says, or that of the request behind it; None when nobody said."""
    own: str | None = meta.get(OBJECTIVE)
    if own is not None:
        return own
    asked: str | None = (meta.get("request_meta") or {}).get(OBJECTIVE)
    return asked


def with_objective(item: SAWItem, name: str) -> SAWItem:
    """The sample, trained for this objective."""
    return replace(item, meta={**item.meta, OBJECTIVE: name})
