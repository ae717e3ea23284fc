"""State–Action–Weight samples: all that a trainer ever sees.

One item is a token sequence, a mask that says which tokens the policy chose, and the weight that credit
assignment gave them. Arrays are numpy; nothing here knows of tensors, episodes or environments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from ludic.types.arrays import LogprobArray, TokenArray, float_array, token_array
from ludic.types.tokens import CandidateSets, VersionRun

RolloutStepKey: TypeAlias = tuple[str, int]
"""(rollout id, step index)."""


@dataclass(frozen=True, slots=True, eq=False)
class ActorTokenLogps:
    """Log-probability of every action token under the policy that sampled it."""

    token_logps: LogprobArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_logps", float_array(self.token_logps, "token_logps"))

    def __len__(self) -> int:
        return len(self.token_logps)


_PER_TOKEN = ("token_weights", "token_rewards", "token_values", "token_returns", "teacher_logps", "token_turns")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleAttachments:
    """Optional arrays that ride along with a sample."""

    actor_logps: ActorTokenLogps | None = None
    token_weights: LogprobArray | None = None
    """One weight per action token, where turns of one item were credited differently; it wins over `SAWItem.weight`."""
    token_rewards: LogprobArray | None = None
    """What each action token earned: a turn's reward at its last action token, zero elsewhere. For critics."""
    token_values: LogprobArray | None = None
    """What a critic expected before each action token, before the update."""
    token_returns: LogprobArray | None = None
    """What it should have expected."""
    teacher_logps: LogprobArray | None = None
    """Log-probability of each action token under a teacher, at the temperature that it was sampled with."""
    token_turns: LogprobArray | None = None
    """Which turn of its rollout each action token belongs to, counted from 0. For critics that judge turns."""
    temperature: float | None = None
    """What the action tokens were sampled with; the trainer's log-probs use the same. None means 1."""
    candidates: CandidateSets | None = None
    """What each action token was drawn from, where the sampler ruled tokens out; the trainer's log-probs are over the same."""
    untrainable_sampling: str | None = None
    """Settings of the sampler that a trainer cannot repeat from what is here ("top_p=0.9"): no ratio can be taken."""
    version_runs: tuple[VersionRun, ...] = ()
    """Which policy version sampled which action tokens, in order; empty when nobody said."""

    def __post_init__(self) -> None:
        for name in _PER_TOKEN:
            values = getattr(self, name)
            if values is not None:
                array = float_array(values, name)
                if not np.isfinite(array).all():
                    raise ValueError(f"{name} holds values that are not finite.")
                object.__setattr__(self, name, array)
        object.__setattr__(self, "version_runs", tuple(VersionRun(*run) for run in self.version_runs))

    def first(self, count: int) -> "SampleAttachments":
        """What is said of the first `count` action tokens."""
        runs, left = [], count
        for version, length in self.version_runs:
            if left > 0:
                runs.append(VersionRun(version, min(length, left)))
            left -= length
        per_token = {name: None if (a := getattr(self, name)) is None else a[:count] for name in _PER_TOKEN}
        logps = None if self.actor_logps is None else ActorTokenLogps(self.actor_logps.token_logps[:count])
        candidates = None if self.candidates is None else self.candidates.first(count)
        return replace(self, actor_logps=logps, version_runs=tuple(runs), candidates=candidates, **per_token)


def _mask_array(mask: Sequence[int] | npt.NDArray[Any], name: str, length: int) -> npt.NDArray[np.bool_]:
    array = np.asarray(mask)
    if array.shape != (length,):
        raise ValueError(f"SAWItem has {length} input ids but {name} of shape {array.shape}.")
    as_bool = array.astype(np.bool_)
    if array.dtype != np.bool_ and (as_bool != array).any():
        raise ValueError(f"{name} holds only 0 and 1; it has {np.unique(array)[:5].tolist()}.")
    return as_bool


@dataclass(frozen=True, slots=True, eq=False)
class SAWItem:
    """One training sample."""

    input_ids: TokenArray
    """State and action tokens, in the order the server saw and sampled them."""
    attention_mask: npt.NDArray[np.bool_] | None
    """True where a token counts; None means everywhere, which is what rollouts produce."""
    action_mask: npt.NDArray[np.bool_]
    """True on the tokens that the policy chose."""
    weight: float
    meta: Mapping[str, Any] = field(default_factory=dict)
    attachments: SampleAttachments = field(default_factory=SampleAttachments)

    def __post_init__(self) -> None:
        put = object.__setattr__
        ids = token_array(self.input_ids, "input_ids")
        put(self, "input_ids", ids)
        attention = np.ones(len(ids), dtype=np.bool_) if self.attention_mask is None else self.attention_mask
        put(self, "attention_mask", _mask_array(attention, "attention_mask", len(ids)))
        put(self, "action_mask", _mask_array(self.action_mask, "action_mask", len(ids)))
        if not np.isfinite(self.weight):
            raise ValueError(f"SAWItem.weight={self.weight}; a weight must be finite.")
        _check_lengths(self)

    @property
    def token_weights(self) -> LogprobArray:
        """One weight per action token."""
        own = self.attachments.token_weights
        return own if own is not None else np.full(self.num_action_tokens, self.weight, dtype=np.float32)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled any of its tokens; None when nobody said."""
        return min((run.version for run in self.attachments.version_runs), default=None)

    @property
    def actor_logps(self) -> LogprobArray | None:
        attached = self.attachments.actor_logps
        return None if attached is None else attached.token_logps

    @property
    def num_action_tokens(self) -> int:
        return int(self.action_mask.sum())


def _check_lengths(item: SAWItem) -> None:
    """What is said token by token is said of every action token."""
    attached = item.attachments
    arrays = {name: getattr(attached, name) for name in _PER_TOKEN}
    lengths = {name: None if array is None else len(array) for name, array in arrays.items()}
    lengths["actor_logps"] = None if attached.actor_logps is None else len(attached.actor_logps)
    lengths["candidates"] = None if attached.candidates is None else len(attached.candidates)
    lengths["version_runs"] = sum(run.length for run in attached.version_runs) if attached.version_runs else None
    wrong = {name: length for name, length in lengths.items() if length not in (None, item.num_action_tokens)}
    if wrong:
        raise ValueError(f"SAWItem has {item.num_action_tokens} action tokens, but {wrong} of its attachments.")
    if attached.candidates is not None:
        outside = attached.candidates.first_outside(item.input_ids[item.action_mask])
        if outside is not None:
            raise ValueError(f"Action token {outside} is not among the candidates that it is said to be drawn from.")


@runtime_checkable
class HasActorLogps(Protocol):
    @property
    def actor_logps(self) -> LogprobArray: ...


def has_actor_logps(item: SAWItem) -> TypeGuard[HasActorLogps]:
    return item.actor_logps is not None


@dataclass(kw_only=True, slots=True)
class SAWBatch:
    """The items of one optimizer step."""

    items: list[SAWItem]
    meta: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items)


# ----------------------------------------------------------------------------------------------------
# Which objective a sample is trained for, where one batch mixes several: a name in its meta.
# ----------------------------------------------------------------------------------------------------
# A name in `meta` travels with the sample, over a queue and into a checkpoint. A request may name it, too: what is played
# for that request is then of that objective.

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
