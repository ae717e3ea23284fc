"""The TextArena adapter, on real games that need no network."""

import asyncio
import random

import numpy as np
import pytest

from ludic.envs.check import check_env
from ludic.types import ConfigError, ResetNeeded, UnknownName
from ludic_envs.adapters.base import GlobalRandom
from ludic_envs.adapters.textarena import TextArenaEnv
from tests.extended import cases

pytestmark = pytest.mark.slow

ALONE = "player_0"


def started(game, *, seed=0, **settings):
    env = TextArenaEnv(game, **settings)
    env.reset(seed=seed)
    return env


def play(env, *moves):
    """Moves of the agents to act, one by one; returns all observations."""
    return [env.step({env.active_agents[0]: move}) for move in moves]


def episode(env, seed, choose):
    """All that the players of an episode are told."""
    told = [env.reset(seed=seed)]
    while env.active_agents and len(told) < 40:
        (mover,) = env.active_agents
        told.append(env.step({mover: choose(env, mover)}))
    return told


@pytest.mark.parametrize(
    ("game", "num_players"),
    [
        ("TicTacToe-v0", 2),
        ("PigDice-v0-short", 2),
        ("KuhnPoker-v0-short", 2),
        ("FrozenLake-v0-random", 1),
        ("Mastermind-v0", 1),
        ("ThreePlayerTicTacToe-v0", 3),
    ],
)
@pytest.mark.filterwarnings("ignore:.*ended within")
async def test_the_env_keeps_the_contract(game, num_players):
    await check_env(lambda: TextArenaEnv(game, num_players=num_players), max_steps=30)


MORE_GAMES = [
    *((game, 1) for game in (
        "2048-v0-easy", "Sudoku-v0-easy", "Blackjack-v0", "FifteenPuzzle-v0", "LightsOut-v0", "Minesweeper-v0-small",
        "Secretary-v0", "TowerOfHanoi-v0",
    )),
    *((game, 2) for game in (
        "Nim-v0", "LiarsDice-v0-small", "ConnectFour-v0", "IteratedPrisonersDilemma-v0", "IteratedRockPaperScissors-v0",
        "Othello-v0-tiny", "Poker-v0-small", "Snake-v0",
    )),
    ("ThreePlayerIPD-v0", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("game", "num_players"), cases(MORE_GAMES, default=[*MORE_GAMES[:2], *MORE_GAMES[8:10], MORE_GAMES[-1]])
)
@pytest.mark.filterwarnings("ignore:.*ended within")
async def test_more_games_keep_the_contract_in_their_first_moves(game, num_players):
    await check_env(lambda: TextArenaEnv(game, num_players=num_players), seeds=(0, 1), max_steps=8)


@pytest.mark.parametrize("seed", range(8))
def test_a_number_is_found_by_halving_and_the_seed_decides_which(seed):
    env = started("GuessTheNumber-v0", seed=seed)
    low, high, outcome = 1, 20, None
    while env.active_agents:
        guess = (low + high) // 2
        outcome = play(env, f"[{guess}]")[-1][ALONE]
        low, high = (guess + 1, high) if "higher" in outcome.obs else (low, guess - 1)
    assert (outcome.reward, outcome.terminated, outcome.info["illegal_move"]) == (1.0, True, False)
    random.seed(seed)  # TextArena's own recipe
    assert guess == random.randint(1, 20)


def test_a_solved_puzzle_earns_its_reward_at_the_end_and_nothing_before():
    env = started("TowerOfHanoi-v0")
    told = play(env, "A C", "[A B]", "C B", "A C", "B A", "B C", "A C")
    assert [o[ALONE].reward for o in told] == [0.0] * 6 + [1.0]
    assert "You moved disk 1 from A to C." in told[0][ALONE].obs
    assert "solved" in told[-1][ALONE].info["result"]["reason"]
    with pytest.raises(ResetNeeded):
        env.step({ALONE: "A C"})


def test_the_last_move_pays_both_players():
    env = started("TicTacToe-v0", num_players=2)
    told = play(env, "[0]", "[3]", "[1]", "[4]", "[2]")[-1]
    assert {role: o.reward for role, o in told.items()} == {"player_0": 1.0, "player_1": -1.0}
    assert all(o.terminated and not o.truncated for o in told.values())


def test_each_player_is_told_what_is_new_to_it_and_not_its_own_words():
    env = TextArenaEnv("TicTacToe-v0", num_players=2)
    opening = env.reset(seed=0)
    assert "you will be 'O'" in opening["player_0"][0] and "you will be 'X'" in opening["player_1"][0]
    (told,) = play(env, "I take the middle: [4]")
    assert "I take the middle" not in told["player_0"].obs
    assert told["player_1"].obs.startswith("[Player 0] I take the middle: [4]\n\nPlayer 0 placed their symbol")
    assert "Your goal" not in told["player_1"].obs, "the rules were told at the start"


def test_moves_that_the_game_lists_are_offered_and_free_text_is_not():
    env = started("TicTacToe-v0", num_players=2)
    play(env, "[4]")
    assert env.legal_actions("player_1") == [f"[{cell}]" for cell in (0, 1, 2, 3, 5, 6, 7, 8)]
    assert env.legal_actions("player_0") == []
    assert started("Mastermind-v0").legal_actions(ALONE) is None


@pytest.mark.parametrize("said", ["", "hello", "[4]", "9" * 5000])
def test_an_invalid_move_is_forgiven_once_and_then_loses(said):
    env = started("TicTacToe-v0", num_players=2)
    play(env, "[4]")
    first = env.step({"player_1": said})
    assert first["player_1"].info["illegal_move"] and not first["player_0"].info["illegal_move"]
    assert "attempted an invalid move" in first["player_1"].obs and env.active_agents == ["player_1"]
    second = env.step({"player_1": said})
    assert (second["player_1"].reward, second["player_0"].reward) == (-1.0, 1.0)
    assert second["player_1"].info["illegal_move"] and not second["player_0"].info["illegal_move"]


def roll(env, mover):
    return "[roll]"


async def test_random_state_belongs_to_the_episode_also_in_threads():
    def run(seed):
        return episode(TextArenaEnv("PigDice-v0", num_players=2), seed, roll)

    alone = {seed: run(seed) for seed in (1, 2)}
    seeds = [1, 2] * 4
    together = await asyncio.gather(*(asyncio.to_thread(run, seed) for seed in seeds))
    assert together == [alone[seed] for seed in seeds]


def test_a_game_leaves_the_global_random_state_unchanged():
    random.seed(1)
    np.random.seed(1)
    expected = [random.random(), np.random.random()]
    random.seed(1)
    np.random.seed(1)
    episode(TextArenaEnv("PigDice-v0", num_players=2), 3, roll)
    assert [random.random(), np.random.random()] == expected


def test_random_state_continues_after_an_error():
    def draw(dice):
        with dice.installed():
            return random.random(), np.random.random()

    dice, twin = GlobalRandom(5), GlobalRandom(5)
    mine = [draw(dice), draw(dice)]
    assert mine[0] != mine[1]
    with pytest.raises(KeyError), twin.installed():
        random.random(), np.random.random()
        raise KeyError
    assert draw(twin) == mine[1]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"game": "TicTacTo-v0"}, UnknownName, "Did you mean 'TicTacToe-v0'"),
        ({"game": "TicTacToe-v0"}, ConfigError, "by 1 player"),
        ({"game": "TicTacToe-v0", "num_players": 2, "game_args": {"size": 4}}, ConfigError, "size"),
    ],
)
def test_wrong_settings_are_refused_with_a_hint(settings, error, says):
    with pytest.raises(error, match=says):
        TextArenaEnv(**settings).reset(seed=0)
