"""The interface of interaction protocols, the collector of their rollouts, and how a failed episode becomes data."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from ludic.envs import LudicEnv
from ludic.envs.threads import time_limit
from ludic.parsers import ParseResult
from ludic.types import (
    ConfigError,
    Failure,
    InferenceSpec,
    Info,
    PolicyGone,
    Rollout,
    Step,
    StopReason,
    ToolCall,
    new_id,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnyEnv: TypeAlias = LudicEnv[Any, Any, Any]

ToolAnswers: TypeAlias = Sequence[Mapping[str, Any]]
"""One `{tool_call_id, tool_name, content}` per answered call."""
ExternalToolHandler: TypeAlias = Callable[[list[ToolCall]], ToolAnswers | Awaitable[ToolAnswers]]
"""Runs the tools that an agent leaves to its protocol."""

RESERVED_INFO_KEYS = frozenset(
    {"parse_error", "parse_feedback_obs", "incomplete_completion", "tool_parse_error", "truncation_reason",
     "finish_reason", "final_obs", "new_segment", "scores"}
)  # fmt: skip
"""Facts that Ludic states about a step; an env cannot overwrite them."""


class TraceCollector:
    """Collects steps; returns one rollout per agent.

    Every agent of the episode gets a rollout, even without steps: credit assignment compares the rollouts of one agent id over
    the episodes of a group, so each episode needs all of them.
    """

    def __init__(self, **global_meta: Any) -> None:
        self._global_meta = global_meta
        self._rollouts: dict[str, Rollout] = {}

    @classmethod
    def for_episode(cls, env: object, *, env_seed: int | None, sampling_seed: int | None) -> "TraceCollector":
        """A collector whose rollouts record the episode, the env and the seeds."""
        return cls(episode_id=new_id(), env_name=type(env).__name__, env_seed=env_seed, sampling_seed=sampling_seed)

    def rollout(self, agent_id: str) -> Rollout:
        """The rollout of this agent; its id is fixed from the start."""
        found = self._rollouts.get(agent_id)
        if found is None:
            found = Rollout(id=new_id(), meta={**self._global_meta, "agent_id": agent_id})
            self._rollouts[agent_id] = found
        return found

    def add(self, agent_id: str, step: Step) -> None:
        self.rollout(agent_id).steps.append(step)

    def set_stop(self, agent_id: str, stop: StopReason) -> None:
        rollout = self.rollout(agent_id)
        rollout.stop = stop
        rollout.meta["episode_truncated"] = stop.is_truncation
        rollout.meta["truncation_reason"] = stop.value if stop.is_truncation else None

    def extract_rollouts(self, episode_truncated: bool = False, truncation_reason: str | None = None) -> list[Rollout]:
        """All rollouts, with one truncation status for the whole episode."""
        for rollout in self._rollouts.values():
            rollout.meta["episode_truncated"] = episode_truncated
            rollout.meta["truncation_reason"] = truncation_reason
        return self.extract_rollouts_with_per_agent_status()

    def extract_rollouts_with_per_agent_status(self) -> list[Rollout]:
        """All rollouts, each with its agent's status (see `set_stop`)."""
        return list(self._rollouts.values())


class InteractionProtocol(ABC):
    """Runs the loop between agents and an environment, which do not know each other."""

    env_timeout_s: float | None = None
    """Time limit of each reset and step of an env; None: no limit. The rollout engine sets it."""
    max_steps: int | None = None
    """Turns at most, where envs with different limits are played by one rollout engine; None: the engine's limit."""
    _collector: TraceCollector | None = None

    @property
    def unfinished(self) -> list[Rollout]:
        """The rollouts so far of the running (or just failed) episode."""
        return [] if self._collector is None else self._collector.extract_rollouts_with_per_agent_status()

    @abstractmethod
    async def run(
        self,
        *,
        env: AnyEnv,
        max_steps: int,
        env_seed: int | None = None,
        sampling_seed: int | None = None,
        inference: InferenceSpec | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """Run one episode; returns one rollout per agent perspective.

        `timeout_s` bounds each model call; a timeout is raised. Every model call gets a different sampling seed, derived from
        `sampling_seed`. The caller closes the env.
        """

    async def _call_env(self, env: AnyEnv, what: str, answer: Awaitable[T]) -> T:
        """Await the env's `what` (reset or step) within `env_timeout_s`."""
        if self.env_timeout_s is None:
            return await answer
        async with time_limit(self.env_timeout_s, f"{type(env).__name__}.{what}", "env_timeout_s"):
            return await answer


def merge_step_info(
    client_info: Mapping[str, Any],
    env_info: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    reserved_keys: frozenset[str] = RESERVED_INFO_KEYS,
) -> Info:
    """Merge infos, later ones win; the env's reserved keys are dropped."""
    if env_info and not reserved_keys.isdisjoint(env_info):
        for key in reserved_keys & env_info.keys():
            logger.warning("The env's info[%r] is dropped: the key is reserved for Ludic.", key)
        env_info = {key: value for key, value in env_info.items() if key not in reserved_keys}
    return {**client_info, **(env_info or {}), **(extra or {})}


def split_parser_reward(parse_result: ParseResult | None) -> tuple[float, float]:
    """(agent step's share, env step's share) of the parser's reward.

    The env step gets the reward of a reply that reaches the env, the agent step the penalty of one that does not: it counts once.
    """
    if parse_result is None:
        return 0.0, 0.0
    return (parse_result.reward, 0.0) if parse_result.action is None else (0.0, parse_result.reward)


@contextmanager
def recorded(protocol: InteractionProtocol, meta: Mapping[str, Any]) -> Iterator[list[Rollout]]:
    """The list to which the body adds the rollouts of an episode of `protocol`. If the body raises, the list gets the rollouts
    collected so far, marked as failed. This is the one place where a broken episode becomes data.

    The caller logs the failure. ConfigError is re-raised, because every other episode would fail the same way, and so is
    PolicyGone (no policy server is left). SystemExit is a failure: code of an episode must not end the program.
    """
    rollouts: list[Rollout] = []
    try:
        yield rollouts
    except BaseException as error:
        if not _is_failure(error):
            raise
        if isinstance(error, asyncio.CancelledError):
            what = "Something inside the episode was cancelled, and the episode with it."
            error = RuntimeError(what).with_traceback(error.__traceback__)
        rollouts[:] = protocol.unfinished
        for rollout in rollouts:
            if rollout.stop is None:
                rollout.stop, rollout.failure = StopReason.FAILED, Failure.from_exception(error)
        if not any(rollout.failure for rollout in rollouts):
            rollouts.insert(0, Rollout.failed(error))
    for rollout in rollouts:
        rollout.meta = {**meta, **rollout.meta}


async def score_or_record(rollouts: Sequence[Rollout], score: Callable[[], Awaitable[None]]) -> None:
    """Await `score`, which adds rewards to finished rollouts; if it raises, mark them as failed by a scorer. ConfigError is
    re-raised, but PolicyGone is a failure: a judge's server may be gone while the policy's is not."""
    try:
        await score()
    except BaseException as error:
        if not _is_failure(error) and not isinstance(error, PolicyGone):
            raise
        failure = replace(Failure.from_exception(error), by_scorer=True)
        for rollout in rollouts:
            if rollout.failure is None:
                rollout.stop, rollout.failure = StopReason.FAILED, failure


def _is_failure(error: BaseException) -> bool:
    """True if the episode failed; False if the set-up is wrong or the program is being stopped."""
    if isinstance(error, ConfigError | PolicyGone | KeyboardInterrupt | GeneratorExit):
        return False  # Ctrl-C; a KeyboardInterrupt raised by an env arrives as a RuntimeError (envs.threads)
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()  # raised by a client or an env, not by us
    return True
