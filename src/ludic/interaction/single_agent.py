"""`SingleAgentProtocol`: one agent, one environment, turn by turn."""

from ludic.agents import Agent
from ludic.interaction.base import AnyEnv, ExternalToolHandler, InteractionProtocol, TraceCollector
from ludic.interaction.env_outputs import check_outcomes, check_run, opening_for, outcome_for
from ludic.interaction.session import AgentSession, ExternalTools, external_tools
from ludic.types import ConfigError, InferenceSpec, Rollout, StopReason


class SingleAgentProtocol(InteractionProtocol):
    """Agent and env take turns until either ends the episode, or for `max_steps` turns.

    A reply that cannot be parsed does not reach the env: the agent gets feedback and another turn, or, with
    `stop_on_parse_error`, the episode ends. `max_tokens` bounds the tokens sampled in the whole episode: the reply that reaches
    the limit is cut off and is the last.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        stop_on_parse_error: bool = False,
        external_tool_handler: ExternalToolHandler | None = None,
        external_tool_timeout_s: float | None = 300.0,
        max_external_rounds: int = 8,
        max_tokens: int | None = None,
    ) -> None:
        self.agent = agent
        self.max_tokens = max_tokens
        self.stop_on_parse_error = stop_on_parse_error
        self.external_tool_handler = external_tool_handler
        self.external_tool_timeout_s = external_tool_timeout_s
        self.max_external_rounds = max_external_rounds

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
        self.agent.require_free()  # before touching the state of a running episode
        collector = TraceCollector.for_episode(env, env_seed=env_seed, sampling_seed=sampling_seed)
        self._collector = collector
        session = AgentSession(
            agent_id=self._only_agent_id(env),
            agent=self.agent,
            collector=collector,
            sampling_seed=sampling_seed,
            inference=inference,
            timeout_s=timeout_s,
            external_tools=self._external_tools(),
            max_external_rounds=self.max_external_rounds,
            max_tokens=self.max_tokens,
        )
        opening = await self._call_env(env, "reset", env.async_reset(seed=env_seed))
        session.start(opening_for(env, session.agent_id, opening), env)
        try:
            num_turns = 0
            while session.stop is None:
                if session.agent_id not in env.active_agents:
                    session.finish(StopReason.NOBODY_ACTIVE)
                    break
                if num_turns == max_steps:
                    session.finish(StopReason.MAX_STEPS)
                    break
                num_turns += 1
                turn = await session.take_turn()
                if turn.out_of_room is not None:
                    session.finish(turn.out_of_room)
                elif turn.action is not None:
                    moved = await self._call_env(env, "step", env.async_step({session.agent_id: turn.action}))
                    outcomes = check_outcomes(env, moved, (session.agent_id,))
                    session.observe(outcome_for(env, session.agent_id, outcomes), turn)
                else:
                    session.reject(turn)
                    if self.stop_on_parse_error:
                        session.finish(StopReason.PARSE_ERROR)
        finally:
            session.close()
        return collector.extract_rollouts_with_per_agent_status()

    @staticmethod
    def _only_agent_id(env: AnyEnv) -> str:
        if len(env.agent_ids) != 1:
            raise ConfigError(
                f"SingleAgentProtocol runs envs with one agent; {type(env).__name__} has {list(env.agent_ids)}. "
                "Use MultiAgentProtocol(agents={id: agent, …})."
            )
        agent_id: str = env.agent_ids[0]
        return agent_id

    def _external_tools(self) -> ExternalTools | None:
        return external_tools(self.external_tool_handler, self.external_tool_timeout_s)


SingleAgentSyncProtocol = SingleAgentProtocol
