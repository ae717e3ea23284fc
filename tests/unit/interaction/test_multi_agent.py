import asyncio

import pytest

from ludic.agents import ReActAgent
from ludic.envs import LudicEnv, check_env
from ludic.inference import ScriptedClient
from ludic.interaction import (
    MultiAgentProtocol,
    MultiAgentSyncProtocol,
    recorded,
)
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.types import ConfigError, EnvContractError, StepOutcome, StopReason
from tests.fakes import RecordingClient, make_agent
from tests.unit.agents.test_tool_agents import ask, call


class Relay(LudicEnv):
    """Turn-based: a, b, a, b, …; the last mover wins +1, the other loses −1. All agents see every move."""

    def __init__(self, num_moves: int, roles=("a", "b")) -> None:
        self.num_moves = num_moves
        self.roles = list(roles)
        self.moves = None

    @property
    def agent_ids(self):
        return self.roles

    @property
    def active_agents(self):
        if self.moves is None or len(self.moves) >= self.num_moves:
            return []
        return [self.roles[len(self.moves) % len(self.roles)]]

    def reset(self, *, seed=None):
        self.moves = []
        return {role: (f"you are {role}", {}) for role in self.roles}

    def step(self, actions):
        self._require_running()
        (mover,) = self.active_agents
        self.moves.append(actions.get(mover, "?"))
        over = not self.active_agents
        return {
            role: StepOutcome(
                f"{mover} played {self.moves[-1]}",
                (1.0 if role == mover else -1.0) if over else 0.0,
                truncated=False,
                terminated=over,
            )
            for role in self.roles
        }


def agents(**replies):
    return {role: make_agent(texts) for role, texts in replies.items()}


async def run(protocol, env, **kwargs):
    rollouts = await protocol.run(env=env, **{"max_steps": 20, **kwargs})
    return {rollout.meta["agent_id"]: rollout for rollout in rollouts}


async def test_player_that_did_not_move_last_gets_its_terminal_reward():
    by_role = await run(MultiAgentProtocol(agents(a=["<a>1</a>", "<a>3</a>"], b=["<a>2</a>"])), Relay(3))
    loser, winner = by_role["b"], by_role["a"]
    assert loser.env_steps[-1].terminated and loser.env_steps[-1].reward == pytest.approx(-1.0 + 0.1)
    assert loser.stop is winner.stop is StopReason.TERMINATED
    assert winner.env_steps[-1].reward == pytest.approx(1.1)
    assert loser.meta["episode_truncated"] is False


async def test_a_transition_includes_the_moves_of_other_agents():
    """What an agent sees next is everything that was said until its next turn, in one message."""
    by_role = await run(MultiAgentProtocol(agents(a=["<a>1</a>", "<a>3</a>"], b=["<a>2</a>"])), Relay(3))
    first = by_role["a"].env_steps[0]
    assert first.next_obs == "a played 1\n\nb played 2" and first.prev_obs == "you are a"
    assert by_role["b"].agent_steps[0].prompt_messages[-1]["content"] == "you are b\n\na played 1"
    assert len(by_role["a"].env_steps) == 2 and len(by_role["b"].env_steps) == 1


async def test_player_that_never_moved_has_its_result_recorded():
    by_role = await run(MultiAgentProtocol(agents(a=["<a>1</a>"], b=[])), Relay(1))
    (step,) = by_role["b"].steps
    assert step.kind == "env" and step.reward == -1.0 and step.source_agent_step_id is None and step.trace is None
    assert by_role["b"].total_reward == -1.0


async def test_env_moves_for_unmanaged_agent_ids():
    class WithBot(Relay):
        """Role b is played by the env: it steps with {} when b is to move."""

    by_role = await run(MultiAgentProtocol(agents(a=["<a>1</a>", "<a>3</a>"])), WithBot(4))
    assert list(by_role) == ["a"]
    assert by_role["a"].env_steps[-1].reward == pytest.approx(-1.0 + 0.1)  # b moved last


async def test_a_player_out_of_context_still_records_the_final_outcome():
    from ludic import registry

    env = registry.envs.make("tic_tac_toe_duel")
    players = {"X": make_agent(["<a>A1</a>", "<a>A2</a>"], max_prompt_tokens=800), "O": make_agent(["<a>B1</a>"] * 3)}
    by_role = await run(MultiAgentProtocol(players), env)
    assert by_role["X"].stop is StopReason.CONTEXT_FULL
    assert by_role["X"].env_steps[-1].reward == -1.0 and by_role["X"].steps[-1].truncated


async def test_info_of_an_agents_own_move_is_kept_after_other_moves():
    from ludic import registry

    env = registry.envs.make("tic_tac_toe_duel")
    players = {
        "X": make_agent([f"<a>{m}</a>" for m in ("A1", "A2", "A3")]),
        "O": make_agent([f"<a>{m}</a>" for m in ("B1", "B2")]),
    }
    by_role = await run(MultiAgentProtocol(players), env)
    assert [s.info["agent_move"] for s in by_role["X"].env_steps] == ["A1", "A2", "A3"]
    assert [s.info["agent_move"] for s in by_role["O"].env_steps] == ["B1", "B2"]
    assert by_role["O"].env_steps[-1].info["result"] == "loss"


class Simultaneous(LudicEnv):
    """Both act at once, for two rounds; a missing action is noted."""

    def __init__(self) -> None:
        self.rounds = None

    agent_ids = ["a", "b"]

    @property
    def active_agents(self):
        return [] if self.rounds is None or len(self.rounds) >= 2 else ["a", "b"]

    def reset(self, *, seed=None):
        self.rounds = []
        return {role: ("go", {}) for role in self.agent_ids}

    def step(self, actions):
        self.rounds.append(dict(actions))
        over = len(self.rounds) >= 2
        return {
            r: StepOutcome(f"round {len(self.rounds)}", 0.5, truncated=False, terminated=over) for r in self.agent_ids
        }


async def test_simultaneous_agents_act_concurrently():
    barrier = asyncio.Barrier(2)

    class Meets(ScriptedClient):
        async def complete_tokens(self, request):
            await asyncio.wait_for(barrier.wait(), 2)
            return await super().complete_tokens(request)

    env = Simultaneous()
    players = {role: make_agent(Meets([f"<a>{role}</a>"] * 2)) for role in ("a", "b")}
    by_role = await run(MultiAgentProtocol(players), env)
    assert env.rounds == [{"a": "a", "b": "b"}] * 2
    assert all(rollout.total_reward == pytest.approx(1.2) for rollout in by_role.values())


async def test_an_unparsed_reply_is_left_out_of_a_simultaneous_step():
    env = Simultaneous()
    by_role = await run(MultiAgentProtocol(agents(a=["<a>x</a>"] * 2, b=["hm", "<a>y</a>"])), env)
    assert env.rounds == [{"a": "x"}, {"a": "x", "b": "y"}]
    b = by_role["b"]
    assert [s.kind for s in b.steps] == ["agent", "env", "agent", "env"]
    assert b.steps[0].turn_id == b.steps[1].turn_id and b.steps[1].parsed_action is None
    assert b.steps[2].prompt_messages[-1]["content"].endswith("\n\nround 1")
    assert b.total_reward == pytest.approx(-1.0 + 0.5 + 0.6)


async def test_agents_finish_independently():
    class OneLeaves(Simultaneous):
        @property
        def active_agents(self):
            return [] if self.rounds is None or len(self.rounds) >= 3 else (["a", "b"] if not self.rounds else ["b"])

        def step(self, actions):
            self.rounds.append(dict(actions))
            done = {"a": True, "b": len(self.rounds) >= 3}
            return {r: StepOutcome("x", 1.0, truncated=False, terminated=done[r]) for r in self.agent_ids}

    by_role = await run(MultiAgentProtocol(agents(a=["<a>x</a>"], b=["<a>y</a>"] * 3)), OneLeaves())
    assert len(by_role["a"].env_steps) == 1 and by_role["a"].total_reward == pytest.approx(1.1)
    assert len(by_role["b"].env_steps) == 3


async def test_external_tools_in_a_multi_agent_episode():
    def handler(calls):
        return [{"tool_call_id": c["id"], "tool_name": "ask", "content": "because"} for c in calls]

    asker = make_agent([call("ask", question="why"), "<a>1</a>"], cls=ReActAgent, external_tools=[ask])
    protocol = MultiAgentProtocol({"a": asker, "b": make_agent(["<a>2</a>"])}, external_tool_handler=handler)
    by_role = await run(protocol, Relay(2))
    external, action = by_role["a"].agent_steps
    assert external.action_target == "external" and external.turn_id == action.turn_id
    assert action.prompt_messages[-1]["content"] == "because"


async def test_failure_of_one_agent_cancels_the_others_and_is_raised():
    cancelled = asyncio.Event()

    class Waits(ScriptedClient):
        async def complete_tokens(self, request):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    class Fails(ScriptedClient):
        async def complete_tokens(self, request):
            await asyncio.sleep(0)
            raise ConnectionError("gone")

    players = {"a": make_agent(Waits([])), "b": make_agent(Fails([]))}
    with pytest.raises(ConnectionError, match="gone"):
        await run(MultiAgentProtocol(players), Simultaneous())
    assert cancelled.is_set()


async def test_seeds_differ_between_agents_and_do_not_depend_on_other_managed_agents():
    def recorded(*roles):
        clients = {role: RecordingClient(ScriptedClient(["<a>1</a>"] * 9)) for role in roles}
        return clients, MultiAgentProtocol({role: make_agent(client) for role, client in clients.items()})

    both, protocol = recorded("a", "b")
    await run(protocol, Relay(4), sampling_seed=3)
    alone, protocol = recorded("b")
    await run(protocol, Relay(4), sampling_seed=3)
    seeds = [[request.seed for request in both[role].requests] for role in ("a", "b")]
    assert len({*seeds[0], *seeds[1]}) == 4
    assert [request.seed for request in alone["b"].requests] == seeds[1]


class TellsTheMover(Relay):
    """As the seeds' contract allows: reset and step speak to who acts, and to the next one."""

    def reset(self, *, seed=None):
        return {role: told for role, told in super().reset(seed=seed).items() if role in self.active_agents}

    def step(self, actions):
        mover = self.active_agents
        outcomes = super().step(actions)
        return {role: told for role, told in outcomes.items() if role in mover or role in self.active_agents}


class MoverOnly(Relay):
    def step(self, actions):
        mover = self.active_agents
        return {role: told for role, told in super().step(actions).items() if role in mover}


async def test_env_may_return_an_outcome_for_the_acting_agent_only():
    by_role = await run(MultiAgentProtocol(agents(a=["<a>1</a>", "<a>3</a>"], b=["<a>2</a>"])), MoverOnly(3))
    assert by_role["b"].agent_steps[0].prompt_messages[-1]["content"] == "you are b"
    assert by_role["a"].agent_steps[1].prompt_messages[-1]["content"] == "a played 1"
    assert by_role["a"].stop is StopReason.TERMINATED and by_role["a"].total_reward == pytest.approx(1.2)
    assert by_role["b"].stop is StopReason.NOBODY_ACTIVE and by_role["b"].total_reward == pytest.approx(0.1)
    await check_env(lambda: MoverOnly(3))


async def test_an_agent_missing_from_reset_starts_with_its_first_outcome():
    by_role = await run(MultiAgentProtocol(agents(a=["<a>1</a>"], b=["<a>2</a>"])), TellsTheMover(2))
    assert by_role["b"].agent_steps[0].prompt_messages[-1]["content"] == "a played 1"
    await check_env(lambda: TellsTheMover(3))

    class Silent(TellsTheMover):
        def step(self, actions):
            return {role: told for role, told in super().step(actions).items() if role in actions}

    with pytest.raises(EnvContractError, match="'b' must act, but has no observation"):
        await run(MultiAgentProtocol(agents(a=["<a>1</a>"], b=["<a>2</a>"])), Silent(2))


def test_unknown_agent_ids_and_shared_agents_are_refused():
    agent = make_agent([])
    with pytest.raises(ConfigError, match="share one Agent"):
        MultiAgentProtocol({"a": agent, "b": agent})
    with pytest.raises(ConfigError, match="at least one agent"):
        MultiAgentProtocol({})
    with pytest.raises(ConfigError, match=r"\['z'\].*\['a', 'b'\]"):
        asyncio.run(run(MultiAgentProtocol({"z": agent}), Relay(1)))
    assert MultiAgentSyncProtocol is MultiAgentProtocol


ENDINGS = {
    "the game ends": {"replies": {"a": ["<a>1</a>"], "b": []}, "env": lambda: Relay(1)},
    "the game ends later": {"replies": {"a": ["<a>1</a>"], "b": ["<a>2</a>"]}, "env": lambda: Relay(2)},
    "one reply after the other cannot be read": {"replies": {"a": ["hm"] * 3, "b": []}, "env": lambda: Relay(2)},
    "turns run out after a move": {"replies": {"a": ["<a>1</a>"], "b": ["hm"] * 2}, "env": lambda: Relay(9)},
    "the game is over before it begins": {"replies": {"a": [], "b": []}, "env": lambda: Relay(0)},
    "the context is full": {"replies": {"a": ["x" * 300], "b": ["<a>2</a>"]}, "env": lambda: Relay(3), "room": 250},
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_every_agent_has_a_rollout_for_every_kind_of_ending(ending):
    """Groups are compared role by role: with a role missing from one sibling, GRPO refuses the whole group."""
    case = ENDINGS[ending]
    players = {role: make_agent(texts, max_prompt_tokens=case.get("room")) for role, texts in case["replies"].items()}
    rollouts = await MultiAgentProtocol(players).run(env=case["env"](), max_steps=3)
    assert [rollout.meta["agent_id"] for rollout in rollouts] == ["a", "b"]
    assert all(rollout.stop is not None for rollout in rollouts)


async def test_every_agent_has_a_rollout_of_a_failed_episode():
    class Breaks(Relay):
        def step(self, actions):
            raise OSError("board lost")

    protocol = MultiAgentProtocol(agents(a=["<a>1</a>"], b=[]))
    with recorded(protocol, {}) as rollouts:
        rollouts += await protocol.run(env=Breaks(3), max_steps=3)
    assert [(r.meta["agent_id"], r.failure.message) for r in rollouts] == [("a", "board lost"), ("b", "board lost")]


async def test_grpo_credits_a_group_with_games_in_which_a_player_never_moved():
    rollouts = []
    for replies in (["hm"] * 3, ["<a>1</a>", "hm"]):
        protocol = MultiAgentProtocol(agents(a=replies, b=["hm"] * 3))
        rollouts += await protocol.run(env=Relay(9), max_steps=3)
    for rollout in rollouts:
        rollout.meta["request_meta"] = {"group_id": "g"}
    weights = GroupNormalizedReturn(group_size=2).compute(rollouts)
    assert {id for id, _ in weights} == {rollout.id for rollout in rollouts if rollout.steps}
