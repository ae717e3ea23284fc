"""Several optimizer steps on one batch: which samples each step trains on, and the state of a batch that is not finished.

A batch is divided by whole groups, so that siblings meet in one step. Samples were drawn with the weights from before the first
step and cannot be drawn again after it, so a checkpoint between two steps holds the batch itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.training.config import TrainerConfig
from ludic.training.learner.packing import episode_of
from ludic.types import (
    ActorTokenLogps,
    ImageSpan,
    MessageSpan,
    SampleAttachments,
    SampleOrigin,
    SAWItem,
    StopReason,
    derive_seed,
)
from ludic.types.columns import PER_TOKEN
from ludic.types.messages import image_of_url
from ludic.types.tokens import CandidateSets


@dataclass(slots=True)
class BatchInProgress:
    """A batch that is trained on, from its first optimizer step to its last."""

    items: list[SAWItem]
    """All samples, on the first process; other processes have none."""
    stats: dict[str, float]
    """Metrics of the batch before it was trained on."""
    first_step: int
    """Optimizer steps done before it."""
    num_passes: int
    num_parts: int
    seed: int
    num_done: int = 0
    """Optimizer steps done on it."""
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and count of each metric of these steps."""

    @classmethod
    def begin(
        cls, items: list[SAWItem], stats: dict[str, float], step: int, cfg: TrainerConfig, num_groups: int
    ) -> "BatchInProgress":
        num_parts = max(min(cfg.mini_batches, num_groups), 1)
        return cls(
            items,
            {name: float(value) for name, value in stats.items()},
            step,
            cfg.updates_per_batch,
            num_parts,
            cfg.seed,
        )

    @property
    def num_steps(self) -> int:
        return self.num_passes * self.num_parts

    @property
    def is_finished(self) -> bool:
        return self.num_done >= self.num_steps

    def part(self) -> list[SAWItem]:
        """The samples of the next step, in the batch's order."""
        if self.num_parts == 1 or not self.items:
            return self.items
        number, part = divmod(self.num_done, self.num_parts)
        groups = groups_of(self.items)
        order = np.random.default_rng(derive_seed(self.seed, self.first_step, number)).permutation(len(groups))
        chosen = np.array_split(order, self.num_parts)[part]
        return [self.items[index] for index in sorted(index for group in chosen for index in groups[group])]

    def note(self, found: Mapping[str, float]) -> dict[str, float]:
        """Add the metrics of a step. Returns its number in the batch, and with the last step the mean over all."""
        if self.num_steps == 1:
            return {}
        for name, value in found.items():
            if name.startswith("perf/") or name == "num_micro_batches":
                continue
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = total + value, count + 1
        means = {f"batch_mean/{name}": total / count for name, (total, count) in self.sums.items()}
        return {"update_of_batch": float(self.num_done), **(means if self.is_finished else {})}

    def state_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "items"}
        return {**plain, "items": items_state(self.items)}

    @classmethod
    def load(cls, state: Mapping[str, Any], *, is_first: bool) -> "BatchInProgress":
        return cls(**{**state, "items": items_of_state(state["items"]) if is_first else []})


def groups_of(items: Sequence[SAWItem]) -> list[list[int]]:
    """Places of the samples of each group; what names none is kept together by comparison or episode."""
    found: dict[tuple[str, Any], list[int]] = {}
    for place, item in enumerate(items):
        episode = episode_of(item)
        alone = ("sample", place) if episode is None else ("episode", episode)
        if item.origin.comparison is not None:
            alone = ("comparison", item.origin.comparison)
        group = item.origin.group_id
        found.setdefault(alone if group is None else ("group", group), []).append(place)
    return list(found.values())


# --- samples in a checkpoint: plain values and few tensors, without the env's `meta`, which no update reads ---

_ARRAYS = ("input_ids", "attention_mask", "action_mask")
_PLAIN = ("temperature", "untrainable_sampling")


def items_state(items: Sequence[SAWItem]) -> dict[str, Any]:
    attached = [item.attachments for item in items]
    candidates = [one.candidates for one in attached]
    return {
        **{name: _joined([getattr(item, name) for item in items]) for name in _ARRAYS},
        "weight": [float(item.weight) for item in items],
        "origin": [{f.name: _plain(getattr(item.origin, f.name)) for f in fields(SampleOrigin)} for item in items],
        "actor_logps": _joined([None if a.actor_logps is None else a.actor_logps.token_logps for a in attached]),
        **{name: _joined([getattr(a, name) for a in attached]) for name in PER_TOKEN},
        "candidate_ids": _joined([None if one is None else one.ids for one in candidates]),
        "candidate_ends": _joined([None if one is None else one.ends for one in candidates]),
        **{name: [_plain(getattr(a, name)) for a in attached] for name in _PLAIN},
        "version_runs": [[list(map(_plain, run)) for run in a.version_runs] for a in attached],
        "experts": [None if a.experts is None else torch.from_numpy(a.experts.copy()) for a in attached],
        "images": [[[span.image.url, span.start, span.length] for span in a.images] for a in attached],
        "message_spans": [[list(span) for span in a.message_spans] for a in attached],
        "observed_roles": [None if a.observed_roles is None else list(a.observed_roles) for a in attached],
    }


def _plain(value: Any) -> Any:
    """The value that a checkpoint takes: an enum's value, and numbers that are not numpy's."""
    value = value.value if isinstance(value, Enum) else value
    return value.item() if isinstance(value, np.generic) else value


def items_of_state(state: Mapping[str, Any]) -> list[SAWItem]:
    names = (*_ARRAYS, "actor_logps", *PER_TOKEN, "candidate_ids", "candidate_ends")
    columns: dict[str, list[Any]] = {name: _split(state[name]) for name in names}
    columns |= {name: list(state[name]) for name in (*_PLAIN, "weight", "origin", "version_runs")}
    later = ("experts", "images", "message_spans", "observed_roles")  # older checkpoints lack them
    columns |= {name: list(state.get(name) or [None] * len(columns["weight"])) for name in later}
    found = []
    for place in range(len(columns["weight"])):
        own = {name: column[place] for name, column in columns.items()}
        logps, ids = own["actor_logps"], own["candidate_ids"]
        stop = own["origin"]["stop"]
        attachments = SampleAttachments(
            actor_logps=None if logps is None else ActorTokenLogps(logps),
            candidates=None if ids is None else CandidateSets(ids, own["candidate_ends"]),
            version_runs=tuple(own["version_runs"]),
            experts=None if own["experts"] is None else own["experts"].numpy(),
            images=tuple(ImageSpan(image_of_url(url), *place) for url, *place in own["images"] or ()),
            message_spans=tuple(MessageSpan(*span) for span in own["message_spans"] or ()),
            observed_roles=None if own["observed_roles"] is None else tuple(own["observed_roles"]),
            **{name: own[name] for name in (*PER_TOKEN, *_PLAIN)},
        )
        origin = SampleOrigin(**{**own["origin"], "stop": None if stop is None else StopReason(stop)})
        ids, attention, mask = (own[name] for name in _ARRAYS)
        found.append(SAWItem(ids, attention, mask, own["weight"], attachments=attachments, origin=origin))
    return found


def _joined(arrays: Sequence[np.ndarray | None]) -> dict[str, Any]:
    """Arrays one after the other, with their lengths; −1 stands for none."""
    lengths = [-1 if array is None else len(array) for array in arrays]
    there = [array for array in arrays if array is not None]
    return {"lengths": lengths, "values": torch.from_numpy(np.concatenate(there)) if there else None}


def _split(column: Mapping[str, Any]) -> list[np.ndarray | None]:
    values: Tensor | None = column["values"]
    flat = np.empty(0) if values is None else values.numpy()
    found, start = [], 0
    for length in column["lengths"]:
        found.append(None if length < 0 else flat[start : start + length])
        start += max(length, 0)
    return found
