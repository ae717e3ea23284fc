"""The two kinds of step in a rollout, the turns that they form, and how episodes end.

AgentStep: one model call. EnvironmentStep: one transition of the environment. Both carry `turn_id`, which
groups the calls of one turn with the transition they led to (`Turn`).

Records are not to be changed. They are not frozen because every model call makes half a dozen of them, and a frozen dataclass
takes four times as long to construct.
"""

import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from ludic.types.messages import JSON, Content, Message, ToolCall
from ludic.types.tokens import TokenTrace

Observation: TypeAlias = Content
"""Text; or texts and pictures, made by `content_of("Which cell is marked?", Image.of(pixels))`."""
Info: TypeAlias = dict[str, Any]
"""Plain JSON values; never token arrays (they live in the trace)."""


MAX_OBS_CHARS = 1_000_000
"""Limit of an observation: a quarter of a million tokens. Tokenizing more would stall all episodes."""
MAX_INFO_CHARS = 1_000_000
"""Limit of a step's info, written as JSON."""
MAX_REWARD = 1e15
"""Limit of a step's absolute reward: sums of squares of such rewards still fit a float32."""

_id_numbers = itertools.count()
_id_prefix = os.urandom(12).hex()


def _renew_id_prefix() -> None:
    global _id_prefix
    _id_prefix = os.urandom(12).hex()


os.register_at_fork(after_in_child=_renew_id_prefix)


def new_id() -> str:
    """32 hex digits: 96 random bits of this process and a number. Seeding `random` or forking never repeats one."""
    return f"{_id_prefix}{next(_id_numbers):08x}"


class StopReason(StrEnum):
    """Why an agent's part in an episode ended; set once, by the protocol."""

    TERMINATED = "terminated"
    """The env reached a terminal state."""
    ENV_TRUNCATED = "env"
    """The env cut the episode short (its own time limit)."""
    MAX_STEPS = "max_steps"
    """The protocol ran out of turns."""
    CONTEXT_FULL = "context_full"
    """The next prompt would not have fitted the client's limit."""
    TOKEN_BUDGET = "token_budget"
    """The agent sampled as many tokens as the protocol allows it in one episode."""
    PARSE_ERROR = "parse_error"
    """The reply could not be parsed and the protocol stops on that."""
    NOBODY_ACTIVE = "nobody_active"
    """The env had no active agent left, but did not end the episode."""
    FAILED = "failed"
    """Something raised; see Rollout.failure."""

    @property
    def is_truncation(self) -> bool:
        return self in _TRUNCATIONS


_TRUNCATIONS = frozenset(
    {StopReason.ENV_TRUNCATED, StopReason.MAX_STEPS, StopReason.CONTEXT_FULL, StopReason.TOKEN_BUDGET}
)


ActionTarget: TypeAlias = Literal["internal", "external", "env"]
"""The receiver of a reply: the agent's own tools, the protocol's tools, or the environment."""


@dataclass(slots=True)
class StepOutcome:
    """The outcome of one transition of the environment for one agent."""

    obs: Observation
    reward: float
    truncated: bool = False
    """A time limit or cut-off ended the episode."""
    terminated: bool = False
    """The task itself ended the episode."""
    info: Info = field(default_factory=dict)
    trace: TokenTrace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A portable checkpoint of an environment: restoring it continues the same episode, random state included."""

    env_kind: str
    version: int
    episode_id: str
    obs: dict[str, Observation]
    """Last observation per agent."""
    world: dict[str, JSON]
    """The env's state, as plain JSON."""
    created_ns: int = field(default_factory=time.time_ns)

    def to_json(self) -> dict[str, JSON]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Snapshot":
        return cls(**data)


@dataclass(kw_only=True, slots=True)
class AgentStep:
    """One model call, tool loops included."""

    index: int
    """Position in the rollout, counted over both kinds of step."""
    prompt_messages: Sequence[Message]
    """The conversation as the model was shown it."""
    action: str
    """Raw text of the reply."""
    trace: TokenTrace
    action_target: ActionTarget = "env"
    loop_index: int = 0
    """Number of the call within its turn."""
    reward: float = 0.0
    """Format penalty of a failed parse; a successful parse moves its reward to the environment step."""
    truncated: bool = False
    terminated: bool = False
    info: Info = field(default_factory=dict)
    reward_components: dict[str, float] = field(default_factory=dict)
    kind: Literal["agent"] = "agent"
    id: str = field(default_factory=new_id)
    ts_ns: int = field(default_factory=time.time_ns)
    turn_id: str | None = None
    parent_id: str | None = None
    """Id of the step before this one in the same turn."""
    tool_calls: Sequence[ToolCall] | None = None
    tool_results: Sequence[dict[str, Any]] | None = None


@dataclass(kw_only=True, slots=True)
class EnvironmentStep:
    """One transition of the environment, as one agent saw it."""

    index: int
    prev_obs: Observation | None
    action: str
    """Raw text of the reply that led here; empty when the agent did not act."""
    parsed_action: JSON
    next_obs: Observation | None
    """None on the last transition."""
    source_agent_step_id: str | None
    """The model call whose text became the action; None when the agent had not acted (another player's move)."""
    agent_step_ids: Sequence[str]
    """All model calls of the turn, in order."""
    reward: float
    truncated: bool = False
    terminated: bool = False
    trace: TokenTrace | None = None
    """Trace of the source agent step (the same object)."""
    info: Info = field(default_factory=dict)
    reward_components: dict[str, float] = field(default_factory=dict)
    kind: Literal["env"] = "env"
    id: str = field(default_factory=new_id)
    ts_ns: int = field(default_factory=time.time_ns)
    turn_id: str | None = None
    parent_id: str | None = None


Step: TypeAlias = AgentStep | EnvironmentStep


def is_parse_failure(step: Step) -> bool:
    """True for a reply to the env that could not be parsed."""
    return isinstance(step, AgentStep) and step.action_target == "env" and bool(step.info.get("parse_error"))


def components_of(step: Step) -> dict[str, float]:
    """The named parts of a step's reward. A reward without names is the env's, or the parser's if the env did not see the reply."""
    if step.reward_components or not step.reward:
        return step.reward_components
    return {"env" if step.kind == "env" else "parser": step.reward}


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each name."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


SCORES = "scores"
"""Key of a step's info: name → value before the weight, of the components that `ludic.rewards` added or weighted."""


def scores_of(step: Step) -> dict[str, float]:
    """The components of a step before their weights."""
    return {**components_of(step), **step.info.get(SCORES, {})}


OWN_COMPONENTS = ("env", "parser", "reward", "call")
"""Components that a rollout has without scorers: of the env, the parser, a gateway session and its single calls."""


def own_scores(step: Step) -> dict[str, float]:
    """The components of a step that no scorer added, before their weights. A gateway session may also have the user's names."""
    scored = step.info.get(SCORES, {})
    return {name: value for name, value in scores_of(step).items() if name in OWN_COMPONENTS or name not in scored}


def was_rejected_as_cut_off(step: Step) -> bool:
    """True for a reply that could not be read because it ran out of tokens."""
    return is_parse_failure(step) and step.trace is not None and step.trace.finish_reason == "length"


@dataclass(slots=True)
class Turn:
    """Everything from asking an agent to act until it acts again: its model calls and the transition they led to."""

    number: int
    """Position among the rollout's turns, counted from 0."""
    steps: list[Step]
    """In order, at least one; the last of them closes the turn."""

    @property
    def last(self) -> Step:
        return self.steps[-1]

    @property
    def reward(self) -> float:
        """Everything earned in the turn, penalties of single model calls included."""
        return sum(step.reward for step in self.steps)

    @property
    def total_reward(self) -> float:
        """Contribution of the turn to `Rollout.total_reward`."""
        return sum(step.reward for step in self.steps if step.kind == "env" or is_parse_failure(step))
