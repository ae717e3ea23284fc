"""Key and door: what each move does, what the window shows, and that every world can be solved."""

from dataclasses import replace

import pytest

from ludic.envs.check import check_env
from ludic.envs.key_door import KeyDoorEnv, shortest_path
from ludic.types import ResetNeeded

AGENT = "agent_0"


def act(env, action):
    return env.step({AGENT: action})[AGENT]


def world(*rows, **settings):
    """An env whose episode starts on this map: @ agent, K key, D door, # wall."""
    env = KeyDoorEnv(size=len(rows), **settings)
    env.reset(seed=0)
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    place = {symbol: [*cell] for cell, symbol in cells.items()}
    saved = env.snapshot()
    drawn = {
        "free": [[*cell] for cell, symbol in cells.items() if symbol != "#"],
        "agent": place["@"],
        "key": place["K"],
        "door": place["D"],
    }
    env.restore(replace(saved, world=saved.world | drawn))
    return env


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"size": 3},
        {"size": 6, "view_radius": 2, "max_moves": 60},
        {"size": 4, "max_moves": 16},
        {"view": "compact"},
    ],
)
async def test_the_env_keeps_the_contract(settings):
    await check_env(lambda: KeyDoorEnv(**settings), seeds=tuple(range(6)))


@pytest.mark.parametrize("settings", [{}, {"size": 3, "max_moves": 12}, {"size": 9}])
def test_the_reference_always_opens_the_door_in_time(settings):
    env = KeyDoorEnv(**settings)
    for seed in range(100):
        env.reset(seed=seed)
        while env.active_agents:
            outcome = act(env, env.reference_action(AGENT))
        assert (outcome.reward, outcome.terminated, outcome.truncated) == (1.0, True, False)


def test_find_the_key_then_open_the_door():
    env = world("@K.", "##D", "...")
    picked = act(env, "right")
    assert (picked.info["event"], picked.info["has_key"], picked.reward) == ("picked_up", True, 0.0)
    assert act(env, "right").info["event"] == "moved"
    opened = act(env, "down")
    assert (opened.info["event"], opened.reward, opened.terminated) == ("opened", 1.0, True)
    with pytest.raises(ResetNeeded):
        act(env, "down")


def test_the_door_is_locked_without_the_key():
    env = world("@D.", "K..", "...")
    outcome = act(env, "right")
    assert (outcome.info["event"], outcome.reward, outcome.terminated) == ("locked", 0.0, False)
    assert "locked" in outcome.obs and "@D" in outcome.obs


@pytest.mark.parametrize("move", ["up", "left", "right"])
def test_walking_into_a_wall_wastes_the_move(move):
    env = world("@#.", "K..", "..D")
    outcome = act(env, move)
    assert (outcome.info["event"], outcome.info["moves_left"]) == ("bumped", env.max_moves - 1)
    assert not outcome.info["illegal_move"]
    assert env.snapshot().world["agent"] == [0, 0]


def test_out_of_moves_is_a_truncation_without_reward():
    env = KeyDoorEnv(max_moves=20)
    env.reset(seed=0)
    outcomes = [act(env, "?") for _ in range(20)]
    assert [o.truncated for o in outcomes] == [False] * 19 + [True]
    assert not any(o.terminated or o.reward for o in outcomes)
    assert env.active_agents == []


def test_the_window_hides_distant_cells():
    env = world("@...K", ".....", ".....", ".....", "D....")
    assert env.snapshot().world["moves_left"] == env.max_moves
    obs = act(env, "right").obs
    assert obs == f"You moved.\n###\n.@.\n...\nYou do not have the key. Moves left: {env.max_moves - 1}."
    assert act(env, "right").obs.splitlines()[1:4] == ["###", ".@.", "..."]
    assert act(env, "right").obs.splitlines()[1:4] == ["###", ".@K", "..."]


@pytest.mark.parametrize("view_radius", [1, 2])
def test_key_and_door_are_shown_exactly_when_they_are_in_reach(view_radius):
    env = KeyDoorEnv(size=6, view_radius=view_radius)
    for seed in range(50):
        obs, _ = env.reset(seed=seed)[AGENT]
        window = "".join(obs.splitlines()[:-1])
        assert len(window) == (2 * view_radius + 1) ** 2
        state = env.snapshot().world
        for symbol, thing in (("K", "key"), ("D", "door")):
            near = all(abs(a - b) <= view_radius for a, b in zip(state[thing], state["agent"], strict=True))
            assert (symbol in window) == near


def test_the_compact_view_shows_neighbours_bearings_and_the_key():
    env = world(".@.", "#K.", "..D", view_radius=2, view="compact")
    assert env.suggested_sysprompt is None
    assert act(env, "left").obs == "###.33-"
    assert act(env, "right").obs == "#K..23-"
    assert act(env, "down").obs == "..#.?3k"
    assert act(env, "up").obs == "#...?3k"
    assert act(env, "up").obs == "#...?3k", "the same cell shows the same text, whatever happened before"


def test_the_shortest_path_goes_around_walls():
    free = frozenset({(0, 0), (1, 0), (1, 1), (1, 2), (0, 2)})
    assert shortest_path((0, 0), (0, 2), free) == ["down", "right", "right", "up"]
    assert shortest_path((0, 0), (5, 5), free) is None
    assert shortest_path((0, 0), (0, 0), free) == []


def test_the_reference_does_not_plan_through_the_locked_door():
    env = world("@DK", "...", "###")
    moves = []
    while env.active_agents:
        moves.append(env.reference_action(AGENT))
        outcome = act(env, moves[-1])
    assert moves == ["down", "right", "right", "up", "left"]
    assert outcome.reward == 1.0
