"""Tic-tac-toe: perfect play for both marks, the reward table, the opponent's dice, and the duel."""

import random
from dataclasses import replace
from functools import cache, partial

import pytest

from ludic.envs.check import check_env
from ludic.envs.tic_tac_toe import TicTacToeDuel, TicTacToeEnv
from ludic.envs.tic_tac_toe.board import (
    CELLS,
    EMPTY,
    best_moves,
    optimal_moves,
    value,
    winner,
)
from ludic.types import ConfigError, ResetNeeded

AGENT = "agent_0"
SETTINGS = [
    {"agent_starts": starts, **opponent}
    for starts in (True, False)
    for opponent in (
        {},
        {"opponent": "minimax"},
        {"opponent": "minimax", "epsilon": 0.5},
        {"show_opponent_move": False},
    )
]


def act(env, action):
    return env.step({AGENT: action})[AGENT]


def play(env, seed, choose):
    """A whole episode; returns its outcomes."""
    env.reset(seed=seed)
    outcomes = []
    while env.active_agents:
        outcomes.append(act(env, choose(env)))
    return outcomes


def reference(env):
    return env.reference_action(AGENT)


def random_legal(seed):
    rng = random.Random(seed)
    return lambda env: rng.choice(env.legal_actions(AGENT))


def at(env, board):
    """The env in the middle of an episode, with this board in front of the agent."""
    env.reset(seed=0)
    saved = env.snapshot()
    env.restore(replace(saved, world=saved.world | {"board": board}))
    return env


# --- the board ---


@pytest.mark.parametrize(
    ("board", "mark", "optimal", "worth"),
    [
        # After an edge opening O holds the draw in the centre, next to the edge, or opposite (D-10).
        ("...X.....", "O", {0, 4, 5, 6}, 0),
        # After a corner opening only the centre holds.
        ("X........", "O", {4}, 0),
        # After a centre opening only the corners hold.
        ("....X....", "O", {0, 2, 6, 8}, 0),
        (EMPTY, "X", set(range(9)), 0),
        # Both can complete a row. X must do so at once; O may also block at A3, which opens a second line for O.
        ("XX.OO....", "X", {2}, 1),
        ("XX.OO....", "O", {2, 5}, 1),
        # X threatens A2 and B1, and O has no line to complete: nothing helps.
        ("X.X.O.X.O", "O", {1, 3, 5, 7}, -1),
    ],
)
def test_optimal_moves_and_values_worked_by_hand(board, mark, optimal, worth):
    play(TicTacToeEnv(), 0, reference)  # an X game first: it must leave nothing behind that answers for O
    assert set(optimal_moves(board, mark)) == optimal
    assert value(board, mark) == worth


@cache
def slow_value(board, mark, other):
    """Minimax as written in any textbook: what `mark`, to move, gets."""
    if winner(board):
        return -1
    free = [i for i in range(9) if board[i] == "."]
    return max((-slow_value(board[:i] + mark + board[i + 1 :], other, mark) for i in free), default=0)


def test_every_reachable_position_agrees_with_textbook_minimax():
    todo, seen = [(EMPTY, "X", "O")], set()
    while todo:
        board, mark, other = todo.pop()
        if board in seen or winner(board):
            continue
        seen.add(board)
        children = {i: board[:i] + mark + board[i + 1 :] for i in range(9) if board[i] == "."}
        worth = slow_value(board, mark, other)
        assert value(board, mark) == worth
        assert set(optimal_moves(board, mark)) == {
            i for i, child in children.items() if -slow_value(child, other, mark) == worth
        }
        todo += [(child, other, mark) for child in children.values()]
    assert len(seen) == 5478 - 942  # all reachable positions less those already won


def test_the_best_moves_win_at_once_or_hold_out_longest():
    assert best_moves("XX.OO....", "O") == (5,)
    # X will win, but not at once if O stops A1 B1 C1.
    assert value("XO.X.....", "O") == -1
    assert best_moves("XO.X.....", "O") == (6,)


# --- against the built-in opponent ---


@pytest.mark.parametrize("settings", SETTINGS)
async def test_the_env_keeps_the_contract(settings):
    await check_env(lambda: TicTacToeEnv(**settings), seeds=tuple(range(12)))


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_reference_always_earns_full_reward(settings):
    env = TicTacToeEnv(**settings)
    for seed in range(200):
        outcomes = play(env, seed, reference)
        assert sum(outcome.reward for outcome in outcomes) == 1.0
        last = outcomes[-1].info
        assert last["result"] == "win" or last["forced_draw"]


def test_a_draw_that_missed_a_win_pays_half():
    # X O X      C1 would win the column. C2 only blocks, O must answer C1, and the last cell makes it a draw.
    # X O O
    # . . .
    env = at(TicTacToeEnv(opponent="minimax"), "XOXXOO...")
    missed = act(env, "C2")
    assert (missed.reward, missed.info["opponent_move"], missed.info["gto_action"]) == (0.0, "C1", "C1")
    outcome = act(env, "C3")
    assert (outcome.reward, outcome.info["result"], outcome.info["forced_draw"]) == (0.5, "draw", False)


@pytest.mark.parametrize("agent_starts", [True, False])
def test_draws_are_forced_exactly_when_every_move_was_optimal(agent_starts):
    """Judged by the textbook minimax, over random games against random opponents."""
    env, rng = TicTacToeEnv(agent_starts=agent_starts), random.Random(1)
    me, you = ("X", "O") if agent_starts else ("O", "X")
    seen = set()
    for seed in range(400):
        env.reset(seed=seed)
        flawless = True
        while env.active_agents:
            board, cell = env.snapshot().world["board"], rng.choice(env.legal_actions(AGENT))
            i = CELLS.index(cell)
            flawless &= -slow_value(board[:i] + me + board[i + 1 :], you, me) == slow_value(board, me, you)
            outcome = act(env, cell)
        if outcome.info["result"] == "draw":
            assert outcome.info["forced_draw"] == flawless
            assert outcome.reward == (1.0 if flawless else 0.5)
            seen.add(flawless)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("action", "named", "reason"),
    [
        ("A1", "A1", "A1 is taken"),
        ("", None, "'' is not a cell"),
        ("D4", None, "'D4' is not a cell"),
        ("B2 C3", None, ""),
    ],
)
def test_an_illegal_move_costs_one_and_ends_the_game(action, named, reason):
    env = at(TicTacToeEnv(), "X...O....")
    outcome = act(env, action)
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (-1.0, True, False)
    info = outcome.info
    assert (info["illegal_move"], info["agent_move"], info["result"]) == (True, named, None)
    assert reason in info["error"] and "Free were A2, A3, B1" in info["error"]
    with pytest.raises(ResetNeeded):
        act(env, "A2")


def test_the_observation_has_board_free_moves_and_own_mark():
    env = at(TicTacToeEnv(opponent="minimax"), "X...O....")
    assert act(env, "A2").obs == (
        "Your opponent played A3.\n"
        "   1    2    3\nA  X    X    O\nB [B1]  O   [B3]\nC [C1] [C2] [C3]\n"
        "Free moves: B1, B3, C1, C2, C3\n"
        "You are X. It is your move."
    )
    assert "A1" in env.suggested_sysprompt


def test_the_opening_move_of_the_opponent_is_announced():
    env = TicTacToeEnv(agent_starts=False)
    obs, info = env.reset(seed=4)[AGENT]
    assert obs.startswith(f"Your opponent played {info['opponent_move']}.\n")
    assert obs.endswith("You are O. It is your move.") and f"[{info['opponent_move']}]" not in obs
    hidden, _ = TicTacToeEnv(agent_starts=False, show_opponent_move=False).reset(seed=4)[AGENT]
    assert hidden == obs.split("\n", 1)[1]


@pytest.mark.parametrize("agent_starts", [True, False])
def test_the_minimax_opponent_never_loses(agent_starts):
    env, choose = TicTacToeEnv(agent_starts=agent_starts, opponent="minimax"), random_legal(0)
    results = {play(env, seed, choose)[-1].info["result"] for seed in range(300)}
    assert results == {"loss", "draw"}


def test_epsilon_one_plays_as_widely_as_the_random_opponent():
    env = TicTacToeEnv(agent_starts=False, opponent="minimax", epsilon=1.0)
    assert {env.reset(seed=seed)[AGENT][1]["opponent_move"] for seed in range(100)} == set(CELLS)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"opponent": "perfect"}, "random and minimax"),
        ({"opponent": "minimax", "epsilon": 1.5}, "between 0 and 1"),
        ({"opponent": "minimax", "epsilon": float("nan")}, "between 0 and 1"),
        ({"epsilon": 0.1}, "only concerns opponent='minimax'"),
        ({"view": "braille"}, "no view 'braille'"),
    ],
)
def test_wrong_settings_are_refused_with_the_known_ones(settings, says):
    with pytest.raises(ConfigError, match=says):
        TicTacToeEnv(**settings)


# --- the duel ---


def duel_after(*moves):
    """A duel after these moves, X first; returns the env and the last outcomes."""
    env = TicTacToeDuel()
    env.reset(seed=0)
    for move in moves:
        outcomes = env.step({env.active_agents[0]: move})
    return env, outcomes


@pytest.mark.parametrize(("settings", "num_seeds"), [({}, 12), ({"view": "compact", "random_plies": 2}, 6)])
async def test_the_duel_keeps_the_contract(settings, num_seeds):
    await check_env(partial(TicTacToeDuel, **settings), seeds=tuple(range(num_seeds)))


@pytest.mark.parametrize(
    ("moves", "winner", "loser"),
    [(["A1", "B1", "A2", "B2", "A3"], "X", "O"), (["A1", "B1", "A2", "B2", "C3", "B3"], "O", "X")],
)
def test_the_loser_gets_its_minus_one_in_the_same_step(moves, winner, loser):
    env, outcomes = duel_after(*moves)
    assert (outcomes[winner].reward, outcomes[loser].reward) == (1.0, -1.0)
    assert (outcomes[winner].info["result"], outcomes[loser].info["result"]) == ("win", "loss")
    assert outcomes[winner].terminated and outcomes[loser].terminated
    assert env.active_agents == []
    with pytest.raises(ResetNeeded):
        env.step({"X": "C1"})


@pytest.mark.parametrize("actions", [{"O": "A1"}, {"O": "nonsense"}, {}, {"X": "B2"}])
def test_an_illegal_or_missing_move_only_costs_the_offender(actions):
    env, _ = duel_after("A1")
    outcomes = env.step(actions)
    assert (outcomes["O"].reward, outcomes["X"].reward) == (-1.0, 0.0)
    assert (outcomes["O"].info["illegal_move"], outcomes["X"].info["illegal_move"]) == (True, False)
    assert all(outcome.terminated for outcome in outcomes.values()) and not env.active_agents
    assert "O made an illegal move." in outcomes["X"].obs


def test_each_duellist_is_addressed_by_its_mark_and_turn():
    env, outcomes = duel_after("B2")
    assert env.active_agents == ["O"]
    assert outcomes["O"].obs.startswith("Your opponent played B2.") and "Free moves: A1" in outcomes["O"].obs
    assert outcomes["O"].obs.endswith("You are O. It is your move.")
    assert outcomes["X"].obs.endswith("You are X. It is O's move.") and "Free moves" not in outcomes["X"].obs
    assert (env.legal_actions("X"), env.reference_action("X")) == ([], None)
    assert outcomes["X"].info["agent_move"] == outcomes["O"].info["opponent_move"] == "B2"


# --- the compact view ---


def test_a_compact_duel_shows_the_board_to_the_player_to_move():
    env = TicTacToeDuel(view="compact")
    assert env.reset(seed=0)["X"][0] == "X A1 A2 A3 B1 B2 B3 C1 C2 C3" and env.current_obs()["O"] == ""
    env.step({"X": "B2"})
    assert env.current_obs() == {"X": "", "O": "O A1 A2 A3 B1 B2=X B3 C1 C2 C3"}
    assert env.suggested_sysprompt is None
    env.step({"O": "B2"})
    assert env.current_obs()["X"] == "X A1 A2 A3 B1 B2=X B3 C1 C2 C3"  # the end is shown to both


@pytest.mark.parametrize(("plies", "to_move"), [(0, "X"), (1, "O"), (2, "X"), (4, "X")])
def test_the_seed_places_the_first_plies_and_nothing_else(plies, to_move):
    boards = set()
    for seed in (*range(8), 0):
        env = TicTacToeDuel(random_plies=plies)
        env.reset(seed=seed)
        board = env.snapshot().world["board"]
        boards.add((seed, board))
        assert env.active_agents == [to_move]
        assert (board.count("X"), board.count("O")) == ((plies + 1) // 2, plies // 2)
    assert len(boards) == 8, "one seed, one board"
    assert plies == 0 or len({board for _, board in boards}) > 1
