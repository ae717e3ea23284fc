"""State–Action–Weight samples: all that a trainer ever sees.

One item is a token sequence, a mask of the tokens that the policy chose, the weight that credit assignment gave them, and its
origin (`SampleOrigin`). Arrays are numpy; this file knows neither tensors nor environments.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from ludic.types.columns import COLUMNS, ActorTokenLogps
from ludic.types.errors import ConfigError
from ludic.types.messages import ImageSpan, MessageSpan
from ludic.types.rollout import THREAD, GroupKey, Rollout, with_threads
from ludic.types.steps import StopReason
from ludic.types.tokens import (
    CandidateSets,
    ExpertArray,
    FloatArray,
    LogprobArray,
    TokenArray,
    TurnNumbers,
    VersionRun,
    token_array,
)

RolloutStepKey: TypeAlias = tuple[str, int]
"""(rollout id, step index)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleAttachments:
    """Optional data of a sample. `ludic.types.columns` says what is done with each field."""

    actor_logps: ActorTokenLogps | None = None
    token_weights: FloatArray | None = None
    """One weight per action token, if the turns of one item have different credit; overrides `SAWItem.weight`."""
    token_rewards: FloatArray | None = None
    """Reward of each action token: a turn's reward at its last action token, zero elsewhere. For critics."""
    token_values: FloatArray | None = None
    """A critic's value before each action token, before the update."""
    token_returns: FloatArray | None = None
    """The critic's regression target for each value."""
    teacher_logps: LogprobArray | None = None
    """Log-probability of each action token under a teacher, at the sampling temperature."""
    token_turns: TurnNumbers | None = None
    """The turn of the rollout that each action token belongs to, counted from 0. For critics of turns."""
    temperature: float | None = None
    """Sampling temperature of the action tokens; the trainer's log-probs use the same. None means 1."""
    candidates: CandidateSets | None = None
    """The candidates of each action token, if the sampler ruled tokens out; the trainer's log-probs are over the same."""
    untrainable_sampling: str | None = None
    """Sampling settings that a trainer cannot reproduce ("top_p=0.9"): no ratio can be taken."""
    version_runs: tuple[VersionRun, ...] = ()
    """The policy versions that sampled the action tokens, in order; empty if not known."""
    proximal_logps: LogprobArray | None = None
    """Log-probability of each action token under the weights from before the batch's first update; the trainer computes it."""
    images: tuple[ImageSpan, ...] = ()
    """The pictures among its state tokens, in order."""
    experts: ExpertArray | None = None
    """Experts of a mixture for every token of `SAWItem.input_ids`, not of action tokens alone; −1 where not known."""
    message_spans: tuple[MessageSpan, ...] = ()
    """The message that each token of the sample came from; empty if not known."""
    observed_roles: tuple[str, ...] | None = None
    """Roles whose messages count as observations; None: everything after the first action. An algorithm's preprocessing sets it."""

    def __post_init__(self) -> None:
        for column in COLUMNS:
            if (value := getattr(self, column.name)) is not None:
                object.__setattr__(self, column.name, column.checked(value))

    def only(self, kept: npt.NDArray[np.bool_], kept_actions: npt.NDArray[np.bool_]) -> "SampleAttachments":
        """The attachments of some tokens of the sample, and of some of its action tokens."""
        changed: dict[str, Any] = {}
        for column in COLUMNS:
            if (value := getattr(self, column.name)) is not None:
                changed[column.name] = column.only(value, kept_actions if column.is_of_actions else kept)
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrigin:
    """The origin of a sample, and the end of its part of the rollout. None: not known (a sample of a data set, for instance).

    Stitching fills it in, batch sources add to it, the pipeline sends it along. Facts from an env or a user's request are in
    `SAWItem.meta` instead.
    """

    rollout_id: str | None = None
    """Samples with the same id are parts of one rollout; a sample without an id is a whole rollout."""
    episode: str | None = None
    """Samples with the same one are parts of one episode: those of its players, sub-agents and threads."""
    group_id: str | None = None
    """Group of the request; see `group`. None also for a replayed sample, whose group is incomplete."""
    agent_id: str | None = None
    """The agent's id in the env (its player)."""
    delegate: str | None = None
    """The kind of sub-agent; None for an agent of the env."""
    policy: str | None = None
    """The model name in the requests."""
    env_name: str | None = None
    """The env that was played."""
    domain: str | None = None
    """Name given by the request (`RolloutRequest.meta["domain"]`); chooses among teachers."""
    objective: str | None = None
    """The objective, if one batch mixes several; set by the request or a source of a mixture."""
    comparison: str | None = None
    """Samples with the same one are compared by their loss (a preference), and stay in one micro-batch."""
    env_seed: int | None = None
    """The env's seed in its episode."""
    sampling_seed: int | None = None
    """The seed that its episode's model calls derive theirs from."""
    segment: int = 0
    """Order among the samples of its rollout; stitching counts from 0."""
    step_index: int | None = None
    """Index of the last step of its last turn."""
    step_kind: Literal["agent", "env"] | None = None
    """Kind of that step: "env" where the turn reached the env, "agent" where it ended with a model call."""
    num_turns: int | None = None
    """Number of turns that its action tokens belong to."""
    reward: float | None = None
    """Reward of the turns that end in this sample."""
    total_reward: float | None = None
    """Reward of the whole rollout."""
    reward_components: dict[str, float] | None = None
    """Contribution of each named component to `total_reward`."""
    scores: dict[str, float] | None = None
    """The same before their weights; None where every weight is 1."""
    truncated: bool = False
    """Its last step was cut off by a limit of the env or the protocol."""
    terminated: bool = False
    """Its last step ended the episode."""
    stop: StopReason | None = None
    """Why the rollout ended."""
    finish_reason: str | None = None
    """Finish reason of its last completion; "length" where it ran out of tokens."""
    num_parse_errors: int | None = None
    """Replies that could not be parsed."""
    num_cut_off: int = 0
    """Unparsed replies that ran out of tokens."""
    is_replayed: bool = False
    """An earlier batch contained it."""
    seq_len_truncated: bool = False
    """The trainer cut it to `max_seq_len`."""

    def __post_init__(self) -> None:
        for name in ("reward", "total_reward"):
            value = getattr(self, name)
            if value is not None and type(value) is not float:
                object.__setattr__(self, name, float(value))  # a queue does not take numpy's floats
        for name in ("reward_components", "scores"):
            if (named := getattr(self, name)) is not None:
                object.__setattr__(self, name, {key: float(value) for key, value in named.items()})

    @classmethod
    def of_rollout(cls, rollout: Rollout, **facts: Any) -> "SampleOrigin":
        """The origin of a rollout's sample; `facts` are those of this sample."""
        components, scores = rollout.reward_components, rollout.scores
        return cls(
            rollout_id=rollout.id,
            episode=rollout.episode_run or rollout.id,
            group_id=_text(rollout.group_id),
            agent_id=_text(rollout.agent_id),
            delegate=rollout.delegate,
            policy=rollout.policy,
            env_name=rollout.env_name,
            domain=rollout.domain,
            objective=rollout.objective,
            env_seed=rollout.env_seed,
            sampling_seed=rollout.sampling_seed,
            total_reward=rollout.total_reward,
            reward_components=components or None,
            scores=None if scores == components else scores,
            stop=rollout.stop,
            **facts,
        )

    @property
    def group(self) -> GroupKey | None:
        """The group that its rollout is compared with; None if there is none. A thread is in that of its episode."""
        if self.group_id is None:
            return None
        return GroupKey(self.group_id, self.agent_id, None if self.delegate == THREAD else self.delegate)

    @property
    def episode_truncated(self) -> bool:
        """A limit ended the rollout."""
        return self.stop is not None and self.stop.is_truncation

    @property
    def parse_error(self) -> bool | None:
        """True if a reply could not be parsed; None if not known."""
        return None if self.num_parse_errors is None else self.num_parse_errors > 0


def _text(name: Any) -> str | None:
    """A user's name for a group or agent, which may be a number."""
    return None if name is None else str(name)


_ORIGIN_FACTS = (*(field.name for field in fields(SampleOrigin)), "episode_truncated", "parse_error")


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
    """Facts from the user's env and request, for filters and metrics; Ludic's own facts are in `origin`."""
    attachments: SampleAttachments = field(default_factory=SampleAttachments)
    origin: SampleOrigin = SampleOrigin()

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
    def token_weights(self) -> FloatArray:
        """One weight per action token."""
        own = self.attachments.token_weights
        return own if own is not None else np.full(self.num_action_tokens, self.weight, dtype=np.float32)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled one of its tokens; None if not known."""
        return min((run.version for run in self.attachments.version_runs), default=None)

    @property
    def actor_logps(self) -> LogprobArray | None:
        attached = self.attachments.actor_logps
        return None if attached is None else attached.token_logps

    @property
    def num_action_tokens(self) -> int:
        return int(np.count_nonzero(self.action_mask))

    @property
    def observation_mask(self) -> npt.NDArray[np.bool_]:
        """State tokens behind its first action token: answers of the env and of tools, with the template's tokens around them."""
        state = ~self.action_mask if self.attention_mask is None else self.attention_mask & ~self.action_mask
        observed = np.logical_or.accumulate(self.action_mask) & state
        roles = self.attachments.observed_roles
        return observed if roles is None else observed & self.text_mask(roles)

    def text_mask(self, roles: Iterable[str]) -> npt.NDArray[np.bool_]:
        """True on the text of the messages of these roles, without the template's tokens around it."""
        wanted = frozenset(roles)
        return self.span_mask(lambda span: span.role in wanted)

    def span_mask(self, choose: Callable[[MessageSpan], bool]) -> npt.NDArray[np.bool_]:
        """True on the text of the messages that are chosen; ConfigError if the sample does not say which messages it holds."""
        if not self.attachments.message_spans:
            raise ConfigError(
                f"A sample of rollout {self.origin.rollout_id} does not say which message its tokens came from. Record it while "
                "playing, by InferenceSpec(message_spans=True); `ludic train --train-on …` does."
            )
        mask = np.zeros(len(self.input_ids), dtype=np.bool_)
        for span in filter(choose, self.attachments.message_spans):
            mask[span.text_start : span.text_end] = True
        return mask

    def only(self, kept: npt.NDArray[np.bool_]) -> "SAWItem":
        """The sample with some of its tokens."""
        assert self.attention_mask is not None, "the constructor fills it in"
        return replace(
            self,
            input_ids=self.input_ids[kept],
            attention_mask=self.attention_mask[kept],
            action_mask=self.action_mask[kept],
            attachments=self.attachments.only(kept, kept[self.action_mask]),
        )

    def record(self) -> dict[str, Any]:
        """Meta and origin as one mapping, for reducers. Known facts of the origin win over keys of meta."""
        num_actions = self.num_action_tokens
        lengths = {"completion_length": num_actions, "prompt_length": len(self.input_ids) - num_actions}
        known = {name: fact for name in _ORIGIN_FACTS if (fact := getattr(self.origin, name)) is not None}
        return {**self.meta, **known, **lengths}

    def with_origin(self, **facts: Any) -> "SAWItem":
        """The same sample with these facts of its origin changed."""
        return replace(self, origin=replace(self.origin, **facts))


def _check_lengths(item: SAWItem) -> None:
    """Raise unless every attachment has one entry per token that it is of."""
    attached, num_actions, num_tokens = item.attachments, item.num_action_tokens, len(item.input_ids)
    wrong = {}
    for column in COLUMNS:
        value = getattr(attached, column.name)
        length = None if value is None else column.num_tokens(value)
        if length not in (None, num_actions if column.is_of_actions else num_tokens):
            wrong[column.name] = length
    if wrong:
        raise ValueError(
            f"SAWItem has {num_tokens} tokens with {num_actions} action tokens, but attachments of the lengths {wrong}."
        )
    if attached.candidates is not None:
        outside = attached.candidates.first_outside(item.input_ids[item.action_mask])
        if outside is not None:
            raise ValueError(f"Action token {outside} is not among its candidates.")


def samples_by_session(items: Sequence[SAWItem]) -> list[list[SAWItem]]:
    """The samples of each rollout, with those of its session's threads; a sample that names no rollout is alone."""
    parts: list[tuple[Hashable, Hashable, bool]] = []
    for index, item in enumerate(items):
        origin = item.origin
        own: Hashable = index if origin.rollout_id is None else origin.rollout_id
        has_threads = origin.episode is not None and origin.delegate in (None, THREAD)
        part = (origin.episode, origin.policy, origin.agent_id) if has_threads else own
        parts.append((own, part, origin.delegate == THREAD))
    sessions: dict[Hashable, list[SAWItem]] = {}
    for key, item in zip(with_threads(parts), items, strict=True):
        sessions.setdefault(key, []).append(item)
    return list(sessions.values())


@runtime_checkable
class HasActorLogps(Protocol):
    @property
    def actor_logps(self) -> LogprobArray: ...


def has_actor_logps(item: SAWItem) -> TypeGuard[HasActorLogps]:
    return item.actor_logps is not None


@dataclass(kw_only=True, slots=True)
class SAWBatch:
    """The items that are trained on together."""

    items: list[SAWItem]
    meta: dict[str, Any] = field(default_factory=dict)
    """Counts and means of its rollouts, explained by `ludic parts metric`; `rollout_metrics` repeats them as floats."""

    def __len__(self) -> int:
        return len(self.items)
