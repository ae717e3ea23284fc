"""`AgentSession`: one agent's part of an episode.

A session takes turns (model calls, tool loops), collects the env's observations, and writes the agent's rollout. Single- and
multi-agent protocols differ only in the order of calls; all bookkeeping is here.

A transition belongs to the turn that caused it and stays open until the agent's next turn or its end. So in a game where others
move in between, the rewards they cause are credited to the agent's last action, and a player whose opponent makes the last move
still gets its terminal reward.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ludic.agents import Agent, AgentActStep
from ludic.interaction.base import (
    AnyEnv,
    ExternalToolHandler,
    ToolAnswers,
    TraceCollector,
    merge_step_info,
    split_parser_reward,
)
from ludic.types import (
    AgentStep,
    ConfigError,
    EnvContractError,
    EnvironmentStep,
    InferenceSpec,
    Info,
    Observation,
    OutOfRoom,
    Rollout,
    Step,
    StepOutcome,
    StopReason,
    TokenBudgetSpent,
    ToolCall,
    derive_seed,
)
from ludic.types.messages import joined

ExternalTools = Callable[[list[ToolCall], AgentStep], Awaitable[ToolAnswers]]
"""Runs external tool calls; the second argument is the step that made them."""

_NO_REPLY_READ = "Invalid action."


@dataclass(slots=True)
class TurnResult:
    """One turn of one agent: its model calls, and the action they led to."""

    id: str
    step_ids: list[str] = field(default_factory=list)
    source: AgentStep | None = None
    """The last model call."""
    action: str | None = None
    """The action for the env; None if the reply could not be parsed."""
    parser_reward: float = 0.0
    feedback: str | None = None
    """Feedback for the agent if the reply could not be parsed."""
    out_of_room: StopReason | None = None
    """There was no room for (another) model call; the turn has no action."""


@dataclass(slots=True)
class _Transition:
    """Outcomes of the env since the agent's last turn."""

    turn: TurnResult | None
    prev_obs: Observation | None
    reward: float
    info: Info
    last_obs: Observation
    ts_ns: int


@dataclass(kw_only=True, slots=True, eq=False)
class AgentSession:
    """Runs one agent through one episode."""

    agent_id: str
    agent: Agent
    collector: TraceCollector
    sampling_seed: int | None
    inference: InferenceSpec | None
    timeout_s: float | None
    external_tools: ExternalTools | None
    max_external_rounds: int
    max_tokens: int | None = None
    stop: StopReason | None = None
    """Why the agent's part ended; None while it runs."""
    retired: StopReason | None = None
    """Why the agent takes no more turns while the episode continues."""
    _rollout: Rollout = field(init=False)
    _steps: list[Step] = field(init=False)
    _num_acts: int = 0
    _num_turns: int = 0
    _open: _Transition | None = None
    _unseen: list[Observation] = field(default_factory=list)
    _unseen_info: Info = field(default_factory=dict)
    _has_seen_anything: bool = False
    _last_obs: Observation | None = None

    def __post_init__(self) -> None:
        self._rollout = self.collector.rollout(self.agent_id)
        self._rollout.meta.update(agent_name=self.agent.name, model=self.agent.model)
        self._steps = self._rollout.steps

    @property
    def finished(self) -> bool:
        return self.stop is not None

    # --- start ---

    def start(self, opening: tuple[Observation, Info] | None, env: AnyEnv) -> None:
        """Start after `env.reset`; `opening` is its observation for this agent. The context's system prompt takes precedence
        over the env's."""
        self.agent.begin_episode()  # first: an agent that is in another episode is refused and keeps its tools
        try:
            self.agent.take_tools(env.episode_tools(self.agent_id))
        except BaseException:
            self.close()
            raise
        self.agent.allow_tokens(self.max_tokens)
        own = self.agent.ctx.default_system_prompt
        self.agent.reset(env.system_prompt_for(self.agent_id) if own is None else own)
        if opening is not None:
            self._tell(*opening)

    # --- the agent acts ---

    async def take_turn(self) -> TurnResult:
        """Show the agent what is new, let it act, and log every model call of the turn."""
        self._close_transition()
        self._show_unseen()
        turn = TurnResult(self._next_turn_id())
        for round_index in range(self.max_external_rounds + 1):
            seed = None if self.sampling_seed is None else derive_seed(self.sampling_seed, self._num_acts)
            self._num_acts += 1
            try:
                result = await self.agent.act(self.inference, seed, self.timeout_s)
            except OutOfRoom as error:
                if not self._steps:
                    raise  # the first prompt does not fit: a mistake in the set-up
                is_spent = isinstance(error, TokenBudgetSpent)
                turn.out_of_room = StopReason.TOKEN_BUDGET if is_spent else StopReason.CONTEXT_FULL
                return turn
            for act_step in result.steps:
                turn.source = self._log_agent_step(turn, act_step)
            final = result.steps[-1]
            if final.action_target != "external":
                self._read_action(turn, final)
                return turn
            await self._serve_external(turn, final, is_over=round_index == self.max_external_rounds)
        turn.feedback = f"Too many external tool calls in one turn ({self.max_external_rounds}). Act without them."
        return turn

    def _log_agent_step(self, turn: TurnResult, act: AgentActStep) -> AgentStep:
        parsed, step_ids, number = act.parse_result, turn.step_ids, len(self._steps)
        reward, _ = split_parser_reward(parsed)
        info = dict(act.info)
        if act.action_target == "env":
            failed = parsed is None or parsed.action is None
            info["parse_error"] = failed
            if failed:
                info["parse_feedback_obs"] = (parsed.obs if parsed else None) or _NO_REPLY_READ
        step = AgentStep(
            index=number,
            prompt_messages=act.prompt_messages,
            action=act.action,
            trace=act.trace,
            action_target=act.action_target,
            loop_index=len(step_ids),
            reward=reward,
            info=info,
            reward_components={"parser": reward} if reward else {},
            id=f"{self._rollout.id}.{number}",
            turn_id=turn.id,
            parent_id=step_ids[-1] if step_ids else None,
            tool_calls=act.tool_calls,
            tool_results=act.tool_results,
        )
        self._steps.append(step)
        step_ids.append(step.id)
        return step

    def _read_action(self, turn: TurnResult, final: AgentActStep) -> None:
        parsed = final.parse_result
        if final.action_target == "internal":
            turn.out_of_room = self._why_no_room()
        elif parsed is None or parsed.action is None:
            turn.feedback = (parsed.obs if parsed else None) or _NO_REPLY_READ
        else:
            turn.action = parsed.action
            turn.parser_reward = parsed.reward

    def _why_no_room(self) -> StopReason:
        """Why the agent stopped its tool loop: no tokens left, or no space in the prompt."""
        sampled = sum(len(step.trace.completion_token_ids) for step in self._rollout.agent_steps)
        is_spent = self.max_tokens is not None and sampled >= self.max_tokens
        return StopReason.TOKEN_BUDGET if is_spent else StopReason.CONTEXT_FULL

    async def _serve_external(self, turn: TurnResult, final: AgentActStep, *, is_over: bool) -> None:
        assert turn.source is not None, "an external call is made by a logged step"
        own = {result["tool_call_id"]: result for result in final.tool_results or ()}
        calls = [call for call in final.tool_calls or () if call["id"] not in own]
        if self.external_tools is None:
            names = sorted({call["function"]["name"] for call in calls})
            raise RuntimeError(
                f"Agent {self.agent_id!r} called external tools {names}, but the protocol has no "
                "external_tool_handler. Pass one, or make them internal tools."
            )
        if is_over:
            answers = _same_answer(calls, "Error: no external tool calls are left in this turn.")
        else:
            answers = await self.external_tools(calls, turn.source)
        by_id = own | self._by_id(calls, answers)
        for call in final.tool_calls or ():  # templates without ids match results by their order
            self.agent.add_tool_result(call["id"], call["function"]["name"], str(by_id[call["id"]]["content"]))

    @staticmethod
    def _by_id(calls: list[ToolCall], answers: ToolAnswers) -> dict[str, Mapping[str, Any]]:
        asked = [call["id"] for call in calls]
        answered = [answer.get("tool_call_id") if "content" in answer else answer for answer in answers or ()]
        if sorted(asked) != sorted(map(str, answered)):
            raise ConfigError(
                f"The external_tool_handler was given the calls {asked} and answered {answered}; it must return one "
                "{tool_call_id, tool_name, content} per call."
            )
        return {answer["tool_call_id"]: answer for answer in answers}

    # --- outcomes of the env ---

    def reject(self, turn: TurnResult) -> None:
        """Give feedback on a reply that could not be parsed; the env does not see it."""
        self._tell(turn.feedback or _NO_REPLY_READ, {"parse_error": True, "parse_feedback_obs": turn.feedback})

    def observe(self, outcome: StepOutcome, turn: TurnResult | None = None) -> None:
        """Record the outcome of an env step; `turn` is this agent's turn, if it acted."""
        now, transition = time.time_ns(), self._open
        if turn is not None or transition is None:
            self._open = _Transition(turn, self._last_obs, outcome.reward, outcome.info, outcome.obs, now)
        else:
            # The info of the agent's own move is completed by new facts from later moves (the result).
            own = {key: value for key, value in transition.info.items() if value is not None}
            transition.reward += outcome.reward
            transition.info = {**outcome.info, **own}
            transition.last_obs = outcome.obs
            transition.ts_ns = now
        if outcome.terminated:
            self.finish(StopReason.TERMINATED)
        elif outcome.truncated:
            self.finish(StopReason.ENV_TRUNCATED)
        else:
            self._tell(outcome.obs, outcome.info)

    def stop_acting(self, stop: StopReason) -> None:
        """Stop the agent's turns while the episode continues; later outcomes still count."""
        self.retired = stop

    def finish(self, stop: StopReason) -> None:
        """End the agent's part; the last step records the stop reason."""
        if self.finished:
            return
        stop = self.retired or stop
        self.stop = stop
        self.collector.set_stop(self.agent_id, stop)
        if self._open is not None:
            self._close_transition()
        elif self._steps:
            self._mark_last_step(stop)

    def close(self) -> None:
        """Free the agent for the next episode."""
        self.agent.end_episode()

    def _tell(self, obs: Observation, info: Info) -> None:
        self._unseen.append(obs)
        self._unseen_info = {**self._unseen_info, **info} if self._unseen_info else info

    def _show_unseen(self) -> None:
        """Show the observations since the last turn as one message."""
        if not self._unseen:
            if not self._has_seen_anything:
                raise EnvContractError(
                    f"Agent {self.agent_id!r} must act, but has no observation: it is missing from the result of reset and from "
                    "every outcome since. Give it an observation before it must act."
                )
            return
        obs, info = _joined(self._unseen), self._unseen_info
        self._unseen, self._unseen_info = [], {}
        self._last_obs = obs
        if self._has_seen_anything:
            self.agent.on_after_step(obs, info)
        else:
            self.agent.on_env_reset(obs, info)
            self._has_seen_anything = True

    # --- recording steps ---

    def _close_transition(self) -> None:
        transition, self._open = self._open, None
        if transition is None:
            return
        if transition.turn is None and not self.finished and transition.reward == 0:
            return  # others moved before this agent's first turn, without a reward for it
        stop = self.stop
        turn = transition.turn or TurnResult(self._next_turn_id())
        source = turn.source
        client_info: Info = {}
        if source is not None and "finish_reason" in source.info:
            client_info["finish_reason"] = source.info["finish_reason"]
        info = merge_step_info(client_info, transition.info)
        components, number = {"env": transition.reward}, len(self._steps)
        if turn.parser_reward:
            components["parser"] = turn.parser_reward
        step = EnvironmentStep(
            index=number,
            prev_obs=transition.prev_obs,
            action="",
            parsed_action=turn.action,
            next_obs=None if stop else _joined(self._unseen),
            source_agent_step_id=None,
            agent_step_ids=turn.step_ids,
            reward=transition.reward + turn.parser_reward,
            info=info,
            reward_components=components,
            id=f"{self._rollout.id}.{number}",
            ts_ns=transition.ts_ns,
            turn_id=turn.id,
        )
        if source is not None:
            step.action, step.trace = source.action, source.trace
            step.source_agent_step_id = step.parent_id = source.id
        if stop is not None:
            info["final_obs"] = transition.last_obs
            step.terminated, step.truncated = stop is StopReason.TERMINATED, stop.is_truncation
            if step.truncated:
                info["truncation_reason"] = stop.value
        self._steps.append(step)

    def _next_turn_id(self) -> str:
        self._num_turns += 1
        return f"{self._rollout.id}/{self._num_turns}"

    def _mark_last_step(self, stop: StopReason) -> None:
        """Mark the end on a reply that did not reach the env, or on an env step already recorded."""
        last = self._steps[-1]
        if stop.is_truncation:
            info = {**last.info, "truncation_reason": stop.value}
            if isinstance(last, EnvironmentStep):
                last = replace(last, next_obs=None)
            self._steps[-1] = replace(last, truncated=True, info=info)
        elif stop is StopReason.PARSE_ERROR:
            self._steps[-1] = replace(last, terminated=True)


def _joined(observations: list[Observation]) -> Observation:
    """One message; what an agent was told with nothing in it (its own move, answered by another's) leaves no blank lines."""
    return observations[0] if len(observations) == 1 else joined(observations)


def _same_answer(calls: list[ToolCall], content: str) -> ToolAnswers:
    return [{"tool_call_id": c["id"], "tool_name": c["function"]["name"], "content": content} for c in calls]


def external_tools(handler: ExternalToolHandler | None, timeout_s: float | None) -> ExternalTools | None:
    """A sync or async handler as a session calls it; the handler's errors become messages to the model."""
    if handler is None:
        return None

    async def answer(calls: list[ToolCall], step: AgentStep) -> ToolAnswers:
        try:
            answers = handler(calls)
            return await asyncio.wait_for(answers, timeout_s) if inspect.isawaitable(answers) else answers
        except Exception as error:  # noqa: BLE001 - the model reads tool failures
            is_late = isinstance(error, TimeoutError) and timeout_s
            what = f"did not finish within {timeout_s:g} s" if is_late else repr(error)
            return _same_answer(calls, f"Error: the tool failed: {what}. Go on without it.")

    return answer
