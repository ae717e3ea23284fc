"""A rollout: one agent's view of one episode, the facts in its meta, and its lossless JSON form.

`Rollout.meta` is a dict because it is stored as one; code reads Ludic's own facts in it through the properties of `Rollout`.
In JSON a model call that extends the one before it stores only the new messages and tokens, so a file's size is linear in the
conversation, and each picture once per rollout, in the table `images`: messages and observations name it by its hash.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from ludic.types.errors import EnvContractError, Failure, LudicError
from ludic.types.messages import Message, MessageView, Pictures, images_in, name_pictures, restore_pictures
from ludic.types.steps import (
    AgentStep,
    EnvironmentStep,
    Step,
    StopReason,
    Turn,
    added,
    components_of,
    is_parse_failure,
    new_id,
    own_scores,
    scores_of,
)
from ludic.types.tokens import TokenLog, TokenTrace
from ludic.util.files import parse_json

FORMAT = 1

THREAD = "thread"
"""`meta["delegate"]` of a rollout that is a thread of its episode's main rollout."""


class GroupKey(NamedTuple):
    """The group of rollouts that are compared with each other: those of one agent id in the episodes of one group.

    Credit rules, group filters and dynamic sampling all use this definition. Agents of one episode are different players, so
    they are never compared, although they share a group id.
    """

    group_id: str
    """Created by the request strategy, shared by the requests of one starting point."""
    agent_id: str | None
    delegate: str | None
    """Set for a sub-agent, whose agent id may be that of its parent."""


def with_threads(parts: Iterable[tuple[Hashable, Hashable, bool]]) -> list[Hashable]:
    """The session that each rollout or sample is judged with, by the id of its main rollout. Each is given as (its own id, its
    agent's part in an episode, whether it is a thread); threads without a main rollout are one together."""
    listed = list(parts)
    mains: dict[Hashable, Hashable] = {}
    for own, part, is_thread in listed:
        if not is_thread:
            mains.setdefault(part, own)
    return [mains.get(part, part) if is_thread else own for own, part, is_thread in listed]


def request_meta_in(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """The meta of a rollout's request, from the rollout's meta; empty if it has none."""
    given = meta.get("request_meta")
    return given if isinstance(given, Mapping) else {}


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One agent's perspective on one episode."""

    id: str = field(default_factory=new_id)
    steps: list[Step] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    """Facts from the rollout engine and the protocol (see the properties), and from the user's request."""
    stop: StopReason | None = None
    failure: Failure | None = None
    """Set when the episode raised; such a rollout is counted, never trained on."""

    @classmethod
    def failed(cls, error: BaseException, *, meta: dict[str, Any] | None = None) -> "Rollout":
        return cls(meta=dict(meta or {}), stop=StopReason.FAILED, failure=Failure.from_exception(error))

    def turns(self) -> list[Turn]:
        """Steps with one turn id together, in the order in which the turns begin; a step without a turn id is a turn itself."""
        turns: dict[str, Turn] = {}
        for step in self.steps:
            key = step.turn_id or step.id
            if (turn := turns.get(key)) is None:
                turns[key] = Turn(len(turns), [step])
            else:
                turn.steps.append(step)
        return list(turns.values())

    # --- facts in meta ---

    @property
    def request_meta(self) -> Mapping[str, Any]:
        """The meta of its request, which belongs to the user."""
        return request_meta_in(self.meta)

    @property
    def agent_id(self) -> str | None:
        """Its agent's id in the env (the player)."""
        return self.meta.get("agent_id")

    @property
    def delegate(self) -> str | None:
        """The kind of sub-agent; None for an agent of the env."""
        return self.meta.get("delegate")

    @property
    def is_sub_task(self) -> bool:
        """True if another agent's tool call started it."""
        return "parent_step_id" in self.meta

    @property
    def is_thread(self) -> bool:
        """True if it is part of another rollout's episode: a fork, a sub-agent or a compaction in an agent's session. It has
        no env, and its episode's reward is in the main rollout."""
        return self.is_sub_task and self.delegate == THREAD

    @property
    def call_counts(self) -> Mapping[str, int]:
        """Counts of the ways in which model calls of a gateway session continued each other; empty for others."""
        given = self.meta.get("gateway")
        return given if isinstance(given, Mapping) else {}

    @property
    def policy(self) -> str | None:
        """The model name in its agent's requests."""
        return self.meta.get("model")

    @property
    def env_name(self) -> str | None:
        return self.meta.get("env_name")

    @property
    def engine_facts(self) -> Mapping[str, Any]:
        """Facts from the rollout engine about the episode: its run, limits, seeds, kinds."""
        given = self.meta.get("engine")
        return given if isinstance(given, Mapping) else {}

    @property
    def episode_run(self) -> str | None:
        """Equal for all rollouts of one run of an episode; None if no engine ran it."""
        return self.engine_facts.get("episode_run")

    @property
    def env_seed(self) -> int | None:
        """The env's seed from the rollout engine, else from the protocol."""
        return self.engine_facts.get("env_seed", self.meta.get("env_seed"))

    @property
    def sampling_seed(self) -> int | None:
        return self.engine_facts.get("sampling_seed", self.meta.get("sampling_seed"))

    @property
    def group_id(self) -> str | None:
        return self.request_meta.get("group_id")

    @property
    def group(self) -> GroupKey | None:
        """The group that it is compared with; None if its request belongs to none. A thread is in that of its episode."""
        group_id = self.group_id
        return (
            None if group_id is None else GroupKey(group_id, self.agent_id, None if self.is_thread else self.delegate)
        )

    @property
    def objective(self) -> str | None:
        """The objective, if one batch mixes several; a request may set it."""
        own: str | None = self.meta.get("objective")
        return own if own is not None else self.request_meta.get("objective")

    @property
    def domain(self) -> str | None:
        """Name given by the request: chooses among teachers, separates metrics."""
        named = self.request_meta.get("domain")
        return None if named is None else str(named)

    # --- steps and rewards ---

    @property
    def agent_steps(self) -> list[AgentStep]:
        return [step for step in self.steps if isinstance(step, AgentStep)]

    @property
    def env_steps(self) -> list[EnvironmentStep]:
        return [step for step in self.steps if isinstance(step, EnvironmentStep)]

    @property
    def sampling_steps(self) -> list[Step]:
        """Steps with sampled tokens: model calls, and env steps with a trace whose model call is not in the rollout (made by a
        protocol that writes env steps only)."""
        calls = self.agent_steps
        turns, ids = {call.turn_id for call in calls} - {None}, {call.id for call in calls}

        def is_of_a_call(step: EnvironmentStep) -> bool:
            return step.turn_id in turns or not ids.isdisjoint({step.source_agent_step_id, *step.agent_step_ids})

        with_tokens = [s for s in self.steps if s.trace is not None and len(s.trace.completion_token_ids)]
        return [step for step in with_tokens if isinstance(step, AgentStep) or not is_of_a_call(step)]

    @property
    def total_reward(self) -> float:
        """Environment rewards plus the penalties of replies that never reached the environment."""
        return sum(step.reward for step in self.steps if step.kind == "env" or is_parse_failure(step))

    @property
    def own_reward(self) -> float:
        """`total_reward` without scorers and weights (`ludic.rewards`): what says whether a task was solved."""
        return sum(self._summed(own_scores).values())

    @property
    def reward_components(self) -> dict[str, float]:
        """Contribution of each named component to `total_reward`."""
        return self._summed(components_of)

    @property
    def scores(self) -> dict[str, float]:
        """The same before the weights of `ludic.rewards.Rewards`."""
        return self._summed(scores_of)

    def _summed(self, parts_of: Callable[[Step], Mapping[str, float]]) -> dict[str, float]:
        return added(parts_of(step) for step in self.steps if step.kind == "env" or is_parse_failure(step))

    def total_reward_all(self) -> float:
        return sum(step.reward for step in self.steps)

    def total_reward_for(self, kinds: str | Iterable[str]) -> float:
        wanted = {kinds} if isinstance(kinds, str) else set(kinds)
        return sum(step.reward for step in self.steps if step.kind in wanted)

    @property
    def length(self) -> int:
        return len(self.steps)

    @property
    def start_ns(self) -> int | None:
        return self.steps[0].ts_ns if self.steps else None

    @property
    def end_ns(self) -> int | None:
        return self.steps[-1].ts_ns if self.steps else None

    @property
    def duration_ns(self) -> int:
        return self.steps[-1].ts_ns - self.steps[0].ts_ns if self.steps else 0

    @property
    def duration_s(self) -> float:
        return self.duration_ns / 1e9

    def to_dict(self) -> dict[str, Any]:
        pictures: Pictures = {}
        data = {
            "format": FORMAT,
            "id": self.id,
            "meta": self.meta,
            "stop": None if self.stop is None else self.stop.value,
            "failure": None if self.failure is None else plain_fields(self.failure),
            "total_reward": self.total_reward,
            "length": self.length,
            "duration_ns": self.duration_ns,
            "steps": _encode_steps(self.steps, pictures),
        }
        return data | ({"images": pictures} if pictures else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Rollout":
        if data.get("format") != FORMAT:
            raise ValueError(f"This rollout has format {data.get('format')!r}; this Ludic reads format {FORMAT}.")
        return cls(
            id=data["id"],
            steps=_decode_steps(data["steps"], data.get("images") or {}),
            meta=data["meta"],
            stop=None if data["stop"] is None else StopReason(data["stop"]),
            failure=None if data["failure"] is None else Failure(**data["failure"]),
        )

    def to_json(self) -> str:
        """One line of ASCII, which every reader splits the same way.

        Values in `info` and `meta` must be JSON; numpy scalars are converted.
        """
        return json.dumps(self.to_dict(), default=json_number, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> "Rollout":
        return cls.from_dict(parse_json(line))


def by_session(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts that are judged as one: each with the threads of its session behind it, in the order of the first of each."""
    parts = []
    for rollout in rollouts:
        has_threads = rollout.episode_run is not None and (rollout.is_thread or not rollout.is_sub_task)
        part = (rollout.episode_run, rollout.policy, rollout.agent_id) if has_threads else rollout.id
        parts.append((rollout.id, part, rollout.is_thread))
    sessions: dict[Hashable, list[Rollout]] = {}
    for key, rollout in zip(with_threads(parts), rollouts, strict=True):
        sessions.setdefault(key, []).append(rollout)
    return [sorted(session, key=lambda rollout: rollout.is_thread) for session in sessions.values()]


DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, LudicError)
"""Errors that `Rollout.from_json` may raise for a line that is not a stored rollout."""


# --- JSON -----------------------------------------------------------------------------------------------------


def plain_fields(obj: Any) -> dict[str, Any]:
    """The fields of a dataclass, without the deep copy of `dataclasses.asdict`."""
    return {f.name: getattr(obj, f.name) for f in fields(obj)}


def json_number(value: Any) -> Any:
    """For json.dumps: converts numpy's numbers, and raises for other types."""
    if isinstance(value, np.generic):
        return value.item()
    raise EnvContractError(
        f"{value!r:.200} ({type(value).__name__}) is not JSON; step info and rollout meta hold plain values only. "
        "Convert it where it is put there."
    )


_OBSERVATIONS = ("prev_obs", "next_obs")
"""Fields of an env step that may hold pictures; the last observation is in its info."""


def _encode_steps(steps: Sequence[Step], pictures: Pictures) -> list[dict[str, Any]]:
    encoded = []
    before: AgentStep | None = None
    by_id: dict[str, AgentStep] = {}
    for step in steps:
        row = plain_fields(step)
        if isinstance(step, AgentStep):
            row["prompt_messages"] = _encode_messages(step, before, pictures)
            row["trace"] = _encode_trace(step.trace, before)
            before = step
            by_id[step.id] = step
        else:
            _change_observations(row, name_pictures, pictures)
            source = by_id.get(step.source_agent_step_id or "")
            same = source is not None and (step.trace is source.trace or step.trace == source.trace)
            row["trace"] = "source" if same else (step.trace.to_dict() if step.trace is not None else None)
        encoded.append(row)
    return encoded


def _change_observations(row: dict[str, Any], change: Callable[[Any, Pictures], Any], pictures: Pictures) -> None:
    for name in _OBSERVATIONS:
        row[name] = change(row[name], pictures)
    if "final_obs" in row["info"]:
        row["info"] = {**row["info"], "final_obs": change(row["info"]["final_obs"], pictures)}


def _changed(messages: Sequence[Message], change: Callable[[Any, Pictures], Any], pictures: Pictures) -> list[Message]:
    return [
        {**message, "content": change(message["content"], pictures)}
        if type(message.get("content")) is list
        else message
        for message in messages
    ]


def _encode_messages(step: AgentStep, before: AgentStep | None, pictures: Pictures) -> Any:
    messages = list(step.prompt_messages)
    if before is not None:
        known = list(before.prompt_messages)
        if messages[: len(known)] == known:
            return {"after": before.index, "new": _changed(messages[len(known) :], name_pictures, pictures)}
    return _changed(messages, name_pictures, pictures)


def _encode_trace(trace: TokenTrace, before: AgentStep | None) -> dict[str, Any]:
    row = trace.to_dict()
    if before is None:
        return row
    known = before.trace
    start, end = len(known.prompt_token_ids), len(known.prompt_token_ids) + len(known.completion_token_ids)
    ids = trace.prompt_token_ids
    if np.array_equal(ids[:start], known.prompt_token_ids) and np.array_equal(
        ids[start:end], known.completion_token_ids
    ):
        row["prompt_token_ids"] = {"after": before.index, "new": ids[end:].tolist()}
    return row


def _decode_steps(rows: Sequence[dict[str, Any]], pictures: Pictures) -> list[Step]:
    steps: list[Step] = []
    shared = _SharedPrompts(pictures)
    by_id: dict[str, AgentStep] = {}
    for row in rows:
        if "kind" not in row or "trace" not in row:
            raise ValueError(f"A stored step needs 'kind' and 'trace'; this one has {sorted(row)}.")
        if row["kind"] == "agent":
            agent_step = shared.decode(row)
            by_id[agent_step.id] = agent_step
            steps.append(agent_step)
        else:
            trace = row["trace"]
            if trace == "source":
                trace = by_id[row["source_agent_step_id"]].trace
            elif trace is not None:
                trace = TokenTrace.from_dict(trace)
            row = {**row, "trace": trace}
            if pictures:
                _change_observations(row, restore_pictures, pictures)
            steps.append(EnvironmentStep(**row))
    return steps


class _SharedPrompts:
    """Rebuilds prompts from the part that each call added, sharing memory as the live rollout does."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        self._tokens = TokenLog()
        self._messages: list[Any] = []
        self._last_index = -1

    def decode(self, row: dict[str, Any]) -> AgentStep:
        messages = self._next_messages(row["prompt_messages"])
        trace = self._next_trace(row["trace"], messages)
        self._last_index = row["index"]
        return AgentStep(**{**row, "prompt_messages": messages, "trace": trace})

    def _next_messages(self, stored: Any) -> MessageView:
        is_longer = isinstance(stored, dict)
        given = stored["new"] if is_longer else stored
        if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
            raise ValueError(f"prompt_messages is {given!r:.50}; a stored call has a list of messages.")
        new = _changed(given, restore_pictures, self._pictures)
        if is_longer:
            self._check(stored)
            self._messages.extend(new)
        else:
            self._messages = new
        return MessageView(self._messages)

    def _next_trace(self, stored: dict[str, Any], messages: MessageView) -> TokenTrace:
        prompt = stored["prompt_token_ids"]
        if isinstance(prompt, dict):
            self._check(prompt)
            self._tokens.append(prompt["new"])
        else:
            self._tokens = TokenLog(prompt)
        images = images_in(messages) if stored.get("images") else ()
        trace = TokenTrace.from_dict({**stored, "prompt_token_ids": self._tokens.view()}, images)
        self._tokens.append(trace.completion_token_ids)
        return trace

    def _check(self, delta: dict[str, Any]) -> None:
        if delta["after"] != self._last_index:
            raise ValueError(
                f"A stored step extends step {delta['after']}, but the call before it is {self._last_index}."
            )
