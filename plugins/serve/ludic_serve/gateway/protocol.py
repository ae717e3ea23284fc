"""`GatewayProtocol`: an outside agent plays an episode. The env gives the task; the agent, any code with any client, makes its
model calls at the gateway; its answer is the one action.

All episodes of an agent with one policy share one server per event loop (hosting.py).
"""

import importlib.util
import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ludic.envs import SingleAgentEnv
from ludic.inference import ChatTemplate
from ludic.interaction import InteractionProtocol
from ludic.interaction.base import AnyEnv
from ludic.interaction.env_outputs import check_outcomes, check_run, opening_for, outcome_for
from ludic.parsers import Parser
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.given import Parts
from ludic.run.protocols.agents import AgentKind
from ludic.tools import as_tool
from ludic.types import (
    ChatClient,
    ConfigError,
    EnvContractError,
    Failure,
    InferenceSpec,
    Info,
    LudicError,
    MissingExtra,
    Observation,
    PolicyGone,
    ResetNeeded,
    Rollout,
    StepOutcome,
    StopReason,
    new_id,
)
from ludic.types.steps import MAX_REWARD
from ludic_serve.gateway.agents import AgentCall, AgentCommand, AgentFunction, OutsideAgent, answer_text, in_thread
from ludic_serve.gateway.session import Policy, Session, SessionLimits
from ludic_serve.gateway.threads import session_rollouts
from ludic_serve.gateway.wire.canonical import token_in

Rewards: TypeAlias = float | Mapping[str, float]
"""A number, numbers by name (components, which add up), or numbers by the id of a model call."""
RewardFunction: TypeAlias = Callable[[Any, str, Session], Rewards | Awaitable[Rewards]]
"""(task, answer, session) -> reward; one that is not async runs in a thread."""


class TaskEnv(SingleAgentEnv):
    """One task, one answer; the reward comes from the function of `ludic.gateway.train`. The agent gets the task as it is."""

    blocking = False

    def __init__(self, sample: Mapping[str, Any] | str) -> None:
        super().__init__()
        self.sample = sample
        self._is_open = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._is_open = True
        return answer_text(self.sample), {}

    def env_step(self, action: str) -> StepOutcome:
        if not self._is_open:
            raise ResetNeeded("This task is not open; call reset to ask it (again).")
        self._is_open = False
        return StepOutcome("", 0.0, terminated=True, info={})


class GatewayProtocol(InteractionProtocol):
    """Runs an outside agent. Its errors fail the episode; so does an agent that calls no model. With `failed_reward`, the agent's
    own error after an answered call ends its episode with that reward.

    `agent` is a function or an `OutsideAgent`; see agents.py. The parser reads the action from its answer; an answer that it cannot
    read is the action as it is. `reward` replaces the env's. `policies` are further models by the names that the agent uses; every
    name that is not there means the trained model.
    """

    def __init__(
        self,
        agent: OutsideAgent | Callable[..., Any],
        *,
        client: ChatClient,
        model: str,
        chat_template: ChatTemplate,
        reward: RewardFunction | None = None,
        policies: Mapping[str, Policy] | None = None,
        limits: SessionLimits | None = None,
        failed_reward: float | None = None,
        system_prompt: str | None = None,
        parser: Parser | None = None,
        lenient: bool = False,
    ) -> None:
        self.agent = agent if isinstance(agent, OutsideAgent) else AgentFunction(agent)
        self.model = model
        self._trained = Policy(client=client, chat_template=chat_template, model=model)
        self._policies = dict(policies or {})
        if model in self._policies:
            raise ConfigError(
                f"policies has {model!r}, which is the name of the trained model; give the other one another name."
            )
        self._reward = reward
        self._limits = limits
        self._failed_reward = failed_reward
        self._system_prompt = system_prompt
        self._parser = parser
        self._lenient = lenient
        self._session: Session | None = None
        self._meta: dict[str, Any] = {}

    @property
    def unfinished(self) -> list[Rollout]:
        """The rollouts so far of the running (or just failed) episode."""
        if self._session is None or not self._session.nodes:
            return []
        return session_rollouts(self._session, reward=None, meta=self._meta)

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
        check_run(env, max_steps)
        self._session = None
        agent_id = _only_agent_id(env)
        self._meta = {
            "episode_id": new_id(),
            "env_name": type(env).__name__,
            "env_seed": env_seed,
            "sampling_seed": sampling_seed,
            "agent_id": agent_id,
            "agent_name": self.agent.name,
        }
        opening = opening_for(env, agent_id, await self._call_env(env, "reset", env.async_reset(seed=env_seed)))
        if opening is None:
            raise EnvContractError(f"{type(env).__name__}.reset gave {agent_id!r} no observation, so there is no task.")
        task: Any = opening[0]
        if isinstance(env, TaskEnv):
            if self._reward is None:
                raise ConfigError("TaskEnv grades nothing: give reward=, as ludic.gateway.train takes it.")
            task = env.sample
        served = await self.agent.gateways.host(self._trained, self._policies)
        self._session = session = served.gateway.open_session(
            inference=inference,
            sampling_seed=sampling_seed,
            limits=self._limits,
            timeout_s=timeout_s,
            lenient=self._lenient,
            tools=[as_tool(tool) for tool in env.episode_tools(agent_id)],
        )
        call = replace(self._call(task, opening[1], env, session), socket=served.socket)
        call = replace(call, close=partial(served.gateway.close_session, session))
        try:
            answer = await self.agent.answer(call)
        except Exception as error:
            if session.error is not None and not isinstance(error, ConfigError | PolicyGone):
                raise session.error from error  # what the agent met as a status 500 ends the run, not the episode
            model_answers = not session.model_failed and not session.is_answering  # else its own client timed out
            is_its_own = not isinstance(error, LudicError) and model_answers
            if self._failed_reward is None or not is_its_own or not self.unfinished:
                raise
            session.counts["raised"] += 1
            return session_rollouts(
                session,
                reward=self._failed_reward if self._reward is not None else {"env": self._failed_reward},
                meta=self._meta,
                env_info={"agent_error": Failure.from_exception(error).summary},
            )
        finally:
            call.close()  # a thread that goes on is refused at its next call
        if session.error is not None:
            raise session.error
        if not self.unfinished:
            raise RuntimeError(self._no_calls(session))
        return await self._score(env, agent_id, task, answer, session)

    def _no_calls(self, session: Session) -> str:
        if session.nodes:
            counts = ", ".join(f"{count} {what}" for what, count in session.counts.items())
            return f"No call of the agent {self.agent.name} got an answer of the trained model ({counts})."
        return (
            f"The agent {self.agent.name} made no model call. Its client has to use the base_url and the api_key of the episode: "
            "those that a function is called with, or $OPENAI_BASE_URL and $OPENAI_API_KEY ($ANTHROPIC_BASE_URL and "
            "$ANTHROPIC_AUTH_TOKEN for Anthropic's client) of a command."
        )

    def _call(self, task: Any, info: Info, env: AnyEnv, session: Session) -> AgentCall:
        return AgentCall(
            task=task,
            base_url=session.base_url,
            api_key=session.api_key,
            model=self.model,
            session_id=session.id,
            system_prompt=env.suggested_sysprompt if self._system_prompt is None else self._system_prompt,
            env_info=info,
            tools=tuple(tool.schema for tool in session.tools.values()),
            sample=vars(env).get("sample"),
        )

    async def _score(self, env: AnyEnv, agent_id: str, task: Any, answer: str, session: Session) -> list[Rollout]:
        parsed = None if self._parser is None else self._parser(answer).action
        action = answer if parsed is None else parsed
        moved = await self._call_env(env, "step", env.async_step({agent_id: action}))
        outcome = outcome_for(env, agent_id, check_outcomes(env, moved, (agent_id,)))
        if not outcome.terminated and not outcome.truncated:
            raise ConfigError(
                f"{type(env).__name__} goes on after the agent's answer. An agent behind the gateway gives one answer to an env; "
                "take an env with one turn, or an Agent of ludic.agents for this one."
            )
        reward: Rewards = {"env": outcome.reward}
        call_rewards: dict[str, float] = {}
        if self._reward is not None:
            given = await self._call_env(env, "reward", _result(self._reward, task, answer, session))
            reward, call_rewards = read_rewards(given)
        return session_rollouts(
            session,
            reward=reward,
            call_rewards=call_rewards,
            meta=self._meta,
            env_info={**outcome.info, "final_obs": outcome.obs},
            stop=StopReason.TERMINATED if outcome.terminated else StopReason.ENV_TRUNCATED,
        )


def _only_agent_id(env: AnyEnv) -> str:
    if len(env.agent_ids) != 1:
        raise ConfigError(
            f"An agent behind the gateway plays envs with one agent; {type(env).__name__} has {list(env.agent_ids)}."
        )
    return str(env.agent_ids[0])


# --- rewards ---


async def _result(reward: RewardFunction, task: Any, answer: str, session: Session) -> Any:
    work = partial(reward, task, answer, session)
    given = work() if inspect.iscoroutinefunction(reward) else await in_thread(work, "The reward function")
    return await given if inspect.isawaitable(given) else given


def read_rewards(given: Any) -> tuple[Rewards, dict[str, float]]:
    """The episode's reward, and rewards of model calls by their ids, from what a reward function returned."""
    if not isinstance(given, Mapping):
        return _number(given, ""), {}
    found = {str(name): _number(value, f" for {name!r}") for name, value in given.items()}
    of_calls = {name: value for name, value in found.items() if token_in(name) is not None}
    named = {name: value for name, value in found.items() if name not in of_calls}
    return named or 0.0, of_calls


def _number(given: Any, where: str) -> float:
    number = given.item() if isinstance(given, np.generic) else given
    if not isinstance(number, numbers.Real) or not abs(float(number)) <= MAX_REWARD:  # false for NaN
        raise TypeError(
            f"The reward function returned {given!r:.200}{where}; a reward is a finite number, at most {MAX_REWARD:g} in size, "
            "or a dict of numbers by name or by the id of a model call."
        )
    return float(number)


# --- for a run ---


class GatewayAgents(AgentKind[OutsideAgent]):
    """Agents that make their model calls over HTTP, at a gateway in this process."""

    def make(self, settings: AgentSettings, function: Callable[..., Any] | None) -> OutsideAgent:
        if importlib.util.find_spec("aiohttp") is None:
            raise MissingExtra("serve", "An agent that is a function or a command")
        if settings.agent_command is None:
            assert function is not None, "the settings name a function or a command"
            return AgentFunction(function, settings.agent_set)
        return AgentCommand(
            settings.agent_command,
            sandbox=settings.agent_sandbox,
            binds=settings.agent_bind,
            memory_mb=settings.agent_memory,
        )

    def protocol(
        self,
        agent: OutsideAgent,
        settings: AgentSettings,
        parts: Parts,
        parser: Parser,
        template: ChatTemplate,
        model: str,
        closing: ExitStack,
    ) -> Callable[[ChatClient], InteractionProtocol]:
        closing.callback(agent.gateways.close)
        return lambda client: GatewayProtocol(
            agent,
            client=client,
            model=model,
            chat_template=template,
            reward=parts.reward,
            policies=parts.policies,
            limits=SessionLimits(max_calls=settings.agent_max_calls, max_tokens=settings.agent_max_tokens),
            failed_reward=settings.failed_reward,
            system_prompt=settings.system_prompt,
            parser=parser,
            lenient=settings.lenient,
        )


GATEWAY = GatewayAgents()
"""The entry `gateway` of the group `ludic.agent_kinds`."""
