"""2048: slides and merges worked by hand, rewards, and the three ways a game ends."""

from dataclasses import replace

import pytest

from ludic.envs.check import check_env
from ludic.types import ConfigError, ResetNeeded
from ludic_envs.twenty_forty_eight import TwentyFortyEightEnv, legal_moves, slide, slide_left

AGENT = "agent_0"
STUCK = [[2, 4, 2, 4], [4, 2, 4, 2], [2, 4, 2, 4], [4, 2, 4, 2]]


def act(env, action):
    return env.step({AGENT: action})[AGENT]


def game(grid, **settings):
    """An env in the middle of an episode, with this grid."""
    env = TwentyFortyEightEnv(size=len(grid), **settings)
    env.reset(seed=0)
    saved = env.snapshot()
    env.restore(replace(saved, world=saved.world | {"grid": grid}))
    return env


@pytest.mark.parametrize("settings", [{}, {"size": 3, "target": 64}, {"size": 2, "target": 8}, {"max_moves": 5}])
async def test_the_env_keeps_the_contract(settings):
    await check_env(lambda: TwentyFortyEightEnv(**settings), seeds=tuple(range(4)), max_steps=60)


@pytest.mark.parametrize(
    ("row", "slid", "gained"),
    [
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((2, 2, 4, 0), (4, 4, 0, 0), 4),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),
        ((2, 0, 0, 2), (4, 0, 0, 0), 4),
        ((0, 2, 0, 4), (2, 4, 0, 0), 0),
        ((4, 4, 8, 0), (8, 8, 0, 0), 8),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
        ((0, 0, 0, 0), (0, 0, 0, 0), 0),
    ],
)
def test_a_row_slides_and_merges_once_from_the_wall(row, slid, gained):
    assert slide_left(row) == (slid, gained)


@pytest.mark.parametrize(
    ("move", "after", "gained"),
    [
        ("left", ((4, 0, 0), (4, 2, 0), (2, 0, 0)), 4),
        ("right", ((0, 0, 4), (0, 4, 2), (0, 0, 2)), 4),
        ("up", ((2, 4, 2), (4, 0, 0), (0, 0, 0)), 4),
        ("down", ((0, 0, 0), (2, 0, 0), (4, 4, 2)), 4),
    ],
)
def test_a_grid_slides_in_four_directions(move, after, gained):
    # Sideways the 2 2 of the first row merges; up and down the 2 . 2 of the middle column.
    assert slide(((2, 2, 0), (4, 0, 2), (0, 2, 0)), move) == (after, gained)


def test_the_reward_is_the_merged_sum_over_the_target():
    env = game([[2, 2, 2, 2], [4, 2, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    outcome = act(env, " LEFT ")
    assert outcome.reward == (4 + 4 + 4) / 2048
    assert (outcome.info["merged"], outcome.info["score"], outcome.info["illegal_move"]) == (12, 12, False)
    tiles = [tile for row in env.snapshot().world["grid"] for tile in row if tile]
    assert sorted(tiles)[-4:] == [4, 4, 4, 4] and len(tiles) == 5  # four slid tiles and a new one


@pytest.mark.parametrize("action", ["up", "left", "", "sideways", "9" * 300])
def test_a_move_that_changes_nothing_costs_and_counts(action):
    env = game([[2, 4], [0, 0]], illegal_reward=-0.25)
    before = env.snapshot().world
    outcome = act(env, action)
    assert (outcome.reward, outcome.info["illegal_move"], outcome.terminated) == (-0.25, True, False)
    after = env.snapshot().world
    assert after == before | {"moves_left": before["moves_left"] - 1}  # no new tile, and no dice thrown
    assert "changed nothing" in outcome.obs


def test_reaching_the_target_ends_the_game():
    outcome = act(game([[16, 16], [0, 0]], target=32), "left")
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (1.0, True, False)
    assert outcome.info["reached_target"] and outcome.info["max_tile"] == 32


def test_a_full_grid_without_merges_ends_the_game():
    assert legal_moves(tuple(map(tuple, STUCK))) == []
    # The last row slides, and the new tile (2 or 4) fills the only free cell, next to 16 and 32.
    env = game([[8, 16, 32], [16, 64, 8], [32, 16, 0]], target=128)
    outcome = act(env, "right")
    assert (outcome.terminated, outcome.info["reached_target"], env.active_agents) == (True, False, [])
    with pytest.raises(ResetNeeded):
        act(env, "left")


def test_running_out_of_moves_is_a_truncation():
    env = TwentyFortyEightEnv(max_moves=3)
    env.reset(seed=0)
    outcomes = [act(env, "nonsense") for _ in range(3)]
    assert [(o.truncated, o.terminated) for o in outcomes] == [(False, False), (False, False), (True, False)]


def test_reaching_the_target_with_the_last_move_is_no_truncation():
    outcome = act(game([[4, 4], [0, 0]], target=8, max_moves=1), "left")
    assert (outcome.terminated, outcome.truncated) == (True, False)


def test_a_game_starts_with_two_small_tiles():
    env = TwentyFortyEightEnv()
    for seed in range(50):
        env.reset(seed=seed)
        tiles = [tile for row in env.snapshot().world["grid"] for tile in row if tile]
        assert len(tiles) == 2 and set(tiles) <= {2, 4}


def test_legal_actions_are_those_that_change_something():
    assert game([[2, 4], [0, 0]]).legal_actions(AGENT) == ["down"]


def test_the_observation_shows_the_grid_and_the_moves():
    assert game([[2, 4], [0, 16]], target=16).suggested_sysprompt is not None
    env = game([[2, 4], [0, 8]], target=16, max_moves=9)
    assert act(env, "?").obs == (
        "'?' changed nothing.\n 2  4\n .  8\nScore: 0. Moves left: 8.\nMoves that change something: down, left"
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"size": 1}, "smallest is 2"),
        ({"target": 100}, "power of two"),
        ({"target": 4}, "from 8 on"),
        ({"max_moves": 0}, "1"),
    ],
)
def test_wrong_settings_are_refused_with_a_hint(settings, says):
    with pytest.raises(ConfigError, match=says):
        TwentyFortyEightEnv(**settings)
