"""The contract of an interaction protocol, and the small rules that all of them share."""

import logging
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from ludic.envs import LudicEnv
from ludic.interaction.collector import TraceCollector
from ludic.parsers import ParseResult
from ludic.types import ConfigError, EnvContractError, InferenceSpec, Info, Rollout, StepOutcome, ToolCall

logger = logging.getLogger(__name__)

AnyEnv: TypeAlias = LudicEnv[Any, Any, Any]

ToolAnswers: TypeAlias = Sequence[Mapping[str, Any]]
"""One `{tool_call_id, tool_name, content}` per answered call."""
ExternalToolHandler: TypeAlias = Callable[[list[ToolCall]], ToolAnswers | Awaitable[ToolAnswers]]
"""Runs the tools that an agent leaves to its protocol."""

RESERVED_INFO_KEYS = frozenset(
    {"parse_error", "parse_feedback_obs", "incomplete_completion", "tool_parse_error", "truncation_reason",
     "finish_reason", "final_obs", "new_segment"}
)  # fmt: skip
"""Facts that Ludic states about a step; an env cannot overwrite them."""


class InteractionProtocol(ABC):
    """How agents and an environment meet. It owns the loop; env and agents stay ignorant of each other."""

    _collector: TraceCollector | None = None

    @property
    def unfinished(self) -> list[Rollout]:
        """What the episode that is going on (or has just failed) has collected so far."""
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
        """One episode; one rollout per agent perspective.

        `timeout_s` bounds each model call, and a timeout leaves the protocol as an exception. Every model call gets
        a sampling seed of its own, derived from `sampling_seed`. The env is closed by whoever made it.
        """


def merge_step_info(
    client_info: Mapping[str, Any],
    env_info: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    reserved_keys: frozenset[str] = RESERVED_INFO_KEYS,
) -> Info:
    """Later sources win, except that an env cannot speak in Ludic's name."""
    merged = dict(client_info)
    if env_info:
        if not reserved_keys.isdisjoint(env_info):
            for key in reserved_keys & env_info.keys():
                logger.warning("The env's info[%r] is dropped: the key is reserved for Ludic.", key)
            env_info = {key: value for key, value in env_info.items() if key not in reserved_keys}
        merged.update(env_info)
    if extra:
        merged.update(extra)
    return merged


def split_parser_reward(parse_result: ParseResult | None) -> tuple[float, float]:
    """(agent step's share, env step's share) of the parser's reward.

    A reply that reaches the env is rewarded there, one that does not keeps its penalty on the agent step: it is
    counted once either way.
    """
    if parse_result is None:
        return 0.0, 0.0
    return (parse_result.reward, 0.0) if parse_result.action is None else (0.0, parse_result.reward)


def told_outcomes(
    env: AnyEnv, outcomes: Mapping[str, StepOutcome], actions: Collection[str]
) -> Mapping[str, StepOutcome]:
    """What `env.step` returned, with an outcome for everyone who acted; an env may leave the others out."""
    if not isinstance(outcomes, Mapping) or not outcomes.keys() >= set(actions):
        got = sorted(outcomes) if isinstance(outcomes, Mapping) else type(outcomes).__name__
        raise EnvContractError(
            f"{type(env).__name__}.step must return an outcome for every agent that acted, {sorted(actions)}; it returned {got}."
        )
    return outcomes


def outcome_for(env: AnyEnv, agent_id: str, outcomes: Mapping[str, StepOutcome]) -> StepOutcome:
    """This agent's part of what `env.step` returned, checked."""
    outcome = outcomes[agent_id]
    if not isinstance(outcome, StepOutcome):
        raise EnvContractError(
            f"{type(env).__name__}.step returned {type(outcome).__name__} for {agent_id!r}; "
            "it must be a StepOutcome(obs, reward, truncated, terminated, info)."
        )
    if not isinstance(outcome.obs, str) or not isinstance(outcome.info, dict) or not _is_finite(outcome.reward):
        raise EnvContractError(
            f"{type(env).__name__}.step told {agent_id!r} {outcome!r:.200}; obs must be text, reward a finite number, "
            "info a dict."
        )
    return outcome


def _is_finite(reward: object) -> bool:
    is_number = type(reward) is float or isinstance(reward, numbers.Real)  # the abstract check is slow
    return is_number and math.isfinite(reward)  # type: ignore[arg-type]


def check_run(env: AnyEnv, max_steps: int) -> None:
    """The mistakes that are made when a protocol is run."""
    if not isinstance(env, LudicEnv):
        raise ConfigError(f"env must be an environment object, got {env!r}. Make one: env=MyEnv().")
    if max_steps < 1:
        raise ConfigError(f"max_steps={max_steps}; an episode needs at least one.")


def opening_for(env: AnyEnv, agent_id: str, opening: Mapping[str, tuple[str, Info]]) -> tuple[str, Info] | None:
    """This agent's part of what `env.reset` returned, checked; None where the env says nothing to it yet."""
    if not isinstance(opening, Mapping) or (agent_id not in opening and agent_id in env.active_agents):
        got = sorted(opening) if isinstance(opening, Mapping) else type(opening).__name__
        raise EnvContractError(
            f"{type(env).__name__}.reset must return (obs, info) for every agent that must act; {agent_id!r} is missing from {got}."
        )
    if agent_id not in opening:
        return None
    first = opening[agent_id]
    if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], str)):
        raise EnvContractError(
            f"{type(env).__name__}.reset gave {agent_id!r} {first!r:.80}; it must be (observation text, info dict)."
        )
    return first
