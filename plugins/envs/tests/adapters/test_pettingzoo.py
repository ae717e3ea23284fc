"""The PettingZoo adapter: real games, and two small ones for rewards between turns and for early exits."""

import sys
import types

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import AECEnv, ParallelEnv

from ludic.envs.check import check_env
from ludic.types import ConfigError, ResetNeeded, UnknownName
from ludic_envs.adapters.pettingzoo import PettingZooEnv

BOARD = "classic.tictactoe_v3"


class Duel(ParallelEnv):
    """Three agents at once; who plays 0 is out, and all are cut off in the third round."""

    metadata = {"name": "duel_v0"}
    possible_agents = ["ann", "bob", "eve"]

    def observation_space(self, agent):
        return Discrete(100)

    def action_space(self, agent):
        return Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents, self.round = list(self.possible_agents), 0
        self.luck = np.random.default_rng(seed).integers(50)
        return dict.fromkeys(self.agents, self.luck), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), "every agent that is in must act"
        self.round += 1
        out = {agent: action == 0 for agent, action in actions.items()}
        cut = dict.fromkeys(actions, self.round == 3)
        rewards = {agent: float(action) for agent, action in actions.items()}
        self.agents = [agent for agent in actions if not out[agent] and not cut[agent]]
        seen = dict.fromkeys(actions, self.luck + self.round)
        return seen, rewards, out, cut, {agent: {"action_mask": np.array([1, 1, 1])} for agent in actions}


class Toll(AECEnv):
    """Two agents in turn: who plays 1 takes a point from the other, between the other's turns. Four moves."""

    metadata = {"name": "toll_v0"}
    possible_agents = ["left", "right"]

    def observation_space(self, agent):
        return Box(0, 9, (1,), int)

    def action_space(self, agent):
        return Discrete(2)

    def observe(self, agent):
        return np.array([self.moves])

    def reset(self, seed=None, options=None):
        self.agents, self.moves = list(self.possible_agents), 0
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = "left"

    def step(self, action):
        mover = self.agent_selection
        if self.terminations[mover] or self.truncations[mover]:
            return self._was_dead_step(action)
        other = "right" if mover == "left" else "left"
        self.moves += 1
        self.rewards = {mover: action, other: -action}
        self.terminations = dict.fromkeys(self.agents, self.moves == 4)
        self._accumulate_rewards()
        self.agent_selection = other


@pytest.fixture(autouse=True, scope="module")
def games():
    """Two modules as PettingZoo wants them, somewhere else."""
    sys.modules["duel_v0"] = types.SimpleNamespace(parallel_env=Duel, __spec__=None)
    sys.modules["toll_v0"] = types.SimpleNamespace(env=Toll, __spec__=None)
    yield
    del sys.modules["duel_v0"], sys.modules["toll_v0"]


def started(game, *, seed=0, **settings):
    env = PettingZooEnv(game, **settings)
    env.reset(seed=seed)
    return env


def play(env, *moves):
    """Moves of the agents to act, one by one."""
    return [env.step({env.active_agents[0]: move}) for move in moves][-1]


def stones(observation):
    """The newest two of Go's seventeen planes: mine and theirs."""
    return str(observation[:, :, :2].astype(int).tolist())


@pytest.mark.parametrize(
    ("game", "settings"),
    [
        (BOARD, {}),
        ("classic/tictactoe-v3", {}),
        ("classic/rps-v2", {"game_args": {"max_cycles": 4}}),
        ("classic.connect_four_v3", {}),
        ("classic.rps_v2", {"game_args": {"num_actions": 3, "max_cycles": 4}}),
        ("classic.rps_v2", {"game_args": {"max_cycles": 4}, "order": "turns"}),
        ("classic.go_v5", {"game_args": {"board_size": 3}, "render": stones}),
        ("duel_v0", {}),
        ("toll_v0", {"action_names": ["give", "take"]}),
    ],
)
async def test_the_env_keeps_the_contract(game, settings):
    await check_env(lambda: PettingZooEnv(game, **settings), max_steps=60)


def test_a_board_is_drawn_from_the_side_of_who_looks_at_it():
    env = started(BOARD)
    told = play(env, "4")
    assert told["player_2"].obs == ". . .\n. o .\n. . .\nLegal moves: 0, 1, 2, 3, 5, 6, 7, 8"
    assert told["player_1"].obs == "Waiting for player_2."
    assert play(env, "0")["player_1"].obs.startswith("o . .\n. x .")


def test_the_winning_move_pays_both_players_in_the_same_step():
    env = started(BOARD)
    told = play(env, "0", "3", "1", "4", "2")
    assert {role: o.reward for role, o in told.items()} == {"player_1": 1.0, "player_2": -1.0}
    assert all(o.terminated and not o.truncated for o in told.values())
    assert told["player_2"].obs == "o o o\nx x .\n. . .\nThe game is over."
    with pytest.raises(ResetNeeded):
        env.step({"player_1": "5"})


@pytest.mark.parametrize("actions", [{}, {"player_2": "9"}, {"player_2": "4"}, {"player_1": "0"}])
def test_a_move_that_is_not_legal_is_asked_for_again(actions):
    env = started(BOARD, invalid_reward=-0.5)
    play(env, "4")
    told = env.step(actions)
    paid = (
        -0.5 if "player_2" in actions else 0.0
    )  # who said nothing has made no mistake, and is asked again all the same
    assert {role: o.reward for role, o in told.items()} == {"player_1": 0.0, "player_2": paid}
    assert told["player_2"].info["illegal_move"] and not told["player_1"].info["illegal_move"]
    assert told["player_2"].obs.startswith("That is not a legal move.\n. . .\n. o .")
    assert (env.active_agents, env.legal_actions("player_2")) == (["player_2"], list("01235678"))


def test_rewards_that_come_between_turns_are_credited_when_they_come():
    env = started("toll_v0")
    told = [play(env, move) for move in ("1", "0", "1", "1")]
    assert [o["left"].reward for o in told] == [1.0, 0.0, 1.0, -1.0]
    assert [o["right"].reward for o in told] == [-1.0, 0.0, -1.0, 1.0]
    assert [o["left"].terminated for o in told] == [False, False, False, True]


def test_agents_that_move_at_once_are_paid_at_once():
    env = started("classic.rps_v2", action_names=["rock", "paper", "scissors"])
    assert env.active_agents == ["player_0", "player_1"]
    told = env.step({"player_0": "Rock", "player_1": "paper"})
    assert {role: o.reward for role, o in told.items()} == {"player_0": -1.0, "player_1": 1.0}
    assert told["player_0"].obs == "1\nLegal moves: rock, paper, scissors"


def test_the_action_of_one_waits_while_the_other_is_asked_again():
    env = started("classic.rps_v2", action_names=["rock", "paper", "scissors"], invalid_reward=-0.1)
    told = env.step({"player_0": "rock", "player_1": "lizard"})
    assert env.active_agents == ["player_1"]
    assert (told["player_0"].obs, told["player_0"].reward) == ("Waiting for player_1.", 0.0)
    assert told["player_1"].reward == -0.1
    told = env.step({"player_1": "scissors"})
    assert {role: o.reward for role, o in told.items()} == {"player_0": 1.0, "player_1": -1.0}
    assert env.active_agents == ["player_0", "player_1"]


def test_terminated_agents_stay_inactive_and_truncation_is_reported():
    env = started("duel_v0")
    told = env.step({"ann": "1", "bob": "0", "eve": "2"})
    assert (told["bob"].terminated, told["bob"].truncated, env.active_agents) == (True, False, ["ann", "eve"])
    env.step({"ann": "1", "eve": "1"})
    told = env.step({"ann": "2", "eve": "2"})
    assert (told["ann"].terminated, told["ann"].truncated, told["ann"].reward) == (False, True, 2.0)
    assert (told["bob"].terminated, told["bob"].reward) == (True, 0.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"game": "classic.tictacto"}, "cannot be imported"),
        ({"game": BOARD, "order": "together"}, r"offers \['env'\]"),
        ({"game": BOARD, "order": "backwards"}, "order='backwards'"),
        ({"game": BOARD, "game_args": {"size": 4}}, "size"),
        ({"game": BOARD, "action_names": ["a", "b"]}, "has 9 actions"),
    ],
)
def test_wrong_settings_are_refused_with_a_hint(settings, says):
    with pytest.raises(ConfigError, match=says):
        PettingZooEnv(**settings)


def test_an_id_of_the_registry_plays_the_game_of_its_module():
    one, other = PettingZooEnv("classic/tictactoe-v3"), PettingZooEnv(BOARD)
    assert one.reset(seed=0) == other.reset(seed=0)
    while one.active_agents:
        (mover,) = one.active_agents
        move = one.legal_actions(mover)[-1]
        assert one.step({mover: move}) == other.step({mover: move})
    with pytest.raises(UnknownName, match="classic/tictactoe-v3"):
        PettingZooEnv("classic/tictactoe-v2")
