"""Tic-tac-toe against a built-in opponent (`TicTacToeEnv`), and between two agents (`TicTacToeDuel`).

X moves first. The opponent's random numbers belong to the episode, so all rollouts of a group (one env seed) meet the same
opponent. Rules and perfect play are in board.py.
"""

import random
from collections.abc import Mapping
from functools import cache
from typing import Literal, TypeAlias, get_args

from ludic.envs.env import LudicEnv, rng_from_json, rng_to_json, world_of
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.envs.tic_tac_toe.board import (
    CELLS,
    EMPTY,
    MARKS,
    NOTATION,
    OTHER,
    Mark,
    Position,
    Result,
    View,
    compact,
    free_cells,
    free_moves,
    place,
    position,
    read_move,
    refusal,
    render,
    result_for,
)
from ludic.types import JSON, ConfigError, Info, Observation, Snapshot, StepOutcome, new_id

Opponent: TypeAlias = Literal["random", "minimax"]

_KIND, _DUEL_KIND, _VERSION = "tic_tac_toe", "tic_tac_toe_duel", 1
_ENDINGS: dict[Result, str] = {"win": "you won", "loss": "you lost", "draw": "a draw"}
_DUEL_REWARDS: dict[Result | None, float] = {"win": 1.0, "loss": -1.0, "draw": 0.0, None: 0.0}
_MAX_RANDOM_PLIES = 4


@cache
def _shown(
    board: str, mark: Mark, opponent_cell: int | None, view: View, to_move: Mark
) -> tuple[Observation, Result | None]:
    """The observation of a player, and how the game ended for it (None before its end)."""
    result = result_for(board, mark)
    if view == "compact":
        return (f"{mark} {compact(board)}" if mark == to_move or result is not None else ""), result
    lines = [] if opponent_cell is None else [f"Your opponent played {CELLS[opponent_cell]}."]
    lines.append(render(board))
    if result is not None:
        lines.append(f"You are {mark}. Game over: {_ENDINGS[result]}.")
    elif mark == to_move:
        lines += [f"Free moves: {', '.join(free_moves(board))}", f"You are {mark}. It is your move."]
    else:
        lines.append(f"You are {mark}. It is {to_move}'s move.")
    return "\n".join(lines), result


def _check_view(view: View) -> None:
    if view not in get_args(View):
        raise ConfigError(f"There is no view {view!r}; there is {' and '.join(get_args(View))}.")


class TicTacToeEnv(SingleAgentEnv):
    """Win +1, forced draw +1, other draw +0.5, loss 0; an illegal move costs 1 and ends the game."""

    blocking = False
    _rng = random.Random()  # replaced by every reset
    full_reward = 1.0

    def __init__(
        self,
        *,
        agent_starts: bool = True,
        show_opponent_move: bool = True,
        opponent: Opponent = "random",
        epsilon: float = 0.0,
        view: View = "text",
    ) -> None:
        """The agent is X if it starts, else O. `epsilon`: the probability that the minimax opponent picks any free cell.

        `view="compact"` shows ten words, for models with a small vocabulary (`board.COMPACT_WORDS`): the agent's mark, then the
        nine cells, `A1` while it is free and `A1=X` when X holds it.
        """
        super().__init__()
        if opponent not in get_args(Opponent):
            raise ConfigError(f"There is no opponent {opponent!r}; there is {' and '.join(get_args(Opponent))}.")
        if not 0.0 <= epsilon <= 1.0:
            raise ConfigError(f"epsilon={epsilon} is not a probability; it must lie between 0 and 1.")
        if epsilon and opponent == "random":
            raise ConfigError(f"epsilon={epsilon} only concerns opponent='minimax'; 'random' always plays at random.")
        _check_view(view)
        self.show_opponent_move = show_opponent_move
        self.view: View = view
        self.opponent: Opponent = opponent
        self.epsilon = epsilon
        self.agent_starts = agent_starts
        self._mark: Mark = "X" if agent_starts else "O"
        self._board = EMPTY
        self._all_optimal = True
        self._obs: Observation = ""

    @property
    def suggested_sysprompt(self) -> str | None:
        if self.view == "compact":
            return None
        return f"You play tic-tac-toe against an opponent. {NOTATION} Reply with your move."

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._rng = random.Random(seed)
        self._episode_id = new_id()
        self._all_optimal = True
        self._board, self._mark, opened = EMPTY, "X", None
        if not self.agent_starts:
            self._mark = "O"
            start = position(EMPTY, "X")
            opened = self._reply(start)
            self._board = start.after[opened].board
        shown = opened if self.show_opponent_move else None
        self._obs, _ = _shown(self._board, self._mark, shown, self.view, self._mark)
        return self._obs, {"agent_mark": self._mark, "opponent_move": None if opened is None else CELLS[opened]}

    def env_step(self, action: str) -> StepOutcome:
        mark = self._mark
        faced = position(self._board, mark)
        gto_action = CELLS[faced.best[0]]
        cell = read_move(action)
        if cell is None or cell not in faced.after:
            return self._illegal(action, cell, gto_action)

        self._all_optimal = self._all_optimal and cell in faced.optimal
        now, replied = faced.after[cell], None
        if now.moves:
            replied = self._reply(now)
            now = now.after[replied]
        self._board = now.board
        self._obs, result = _shown(self._board, mark, replied if self.show_opponent_move else None, self.view, mark)

        # The empty board is worth 0 to both marks, so a draw without a mistake is the best result.
        forced_draw = result == "draw" and self._all_optimal
        reward = 1.0 if result == "win" or forced_draw else 0.5 if result == "draw" else 0.0
        info: Info = {
            "agent_move": CELLS[cell],
            "opponent_move": None if replied is None else CELLS[replied],
            "gto_action": gto_action,
            "illegal_move": False,
            "error": None,
            "result": result,
            "forced_draw": forced_draw,
        }
        return StepOutcome(self._obs, reward, terminated=result is not None, info=info)

    def _illegal(self, action: str, cell: int | None, gto_action: str) -> StepOutcome:
        error = refusal(self._board, action, cell)
        self._obs = f"{error}\n{render(self._board)}\nYou are {self._mark}. Game over."
        info: Info = {
            "agent_move": None if cell is None else CELLS[cell],
            "opponent_move": None,
            "gto_action": gto_action,
            "illegal_move": True,
            "error": error,
            "result": None,
            "forced_draw": False,
        }
        return StepOutcome(self._obs, -1.0, terminated=True, info=info)

    def _reply(self, now: Position) -> int:
        """The opponent's move."""
        at_random = self.opponent == "random" or (self.epsilon > 0.0 and self._rng.random() < self.epsilon)
        return self._rng.choice(now.moves if at_random else now.best)

    def env_current_obs(self) -> Observation:
        return self._obs

    def legal_actions(self, agent_id: str) -> list[str]:
        return [] if self._over else list(free_moves(self._board))

    def reference_action(self, agent_id: str) -> str | None:
        return None if self._over else CELLS[position(self._board, self._mark).best[0]]

    def snapshot(self) -> Snapshot:
        world: dict[str, JSON] = {
            "board": self._board,
            "mark": self._mark,
            "all_optimal": self._all_optimal,
            "over": self._over,
            "rng": rng_to_json(self._rng),
        }
        return self._snapshot(_KIND, _VERSION, world)

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        self._rng = rng_from_json(world["rng"])
        self._board, self._mark, self._all_optimal = world["board"], world["mark"], world["all_optimal"]
        self._over = world["over"]
        self._obs = snapshot.obs[self.agent_id]
        self._episode_id = snapshot.episode_id


class TicTacToeDuel(LudicEnv[str, Observation, str]):
    """Two agents, "X" and "O". Win +1, loss −1, draw 0; an illegal or missing move ends the game: −1 for that player, 0 for the
    other. Both agents get an outcome for every move, so the loser gets its −1 in the step in which the winner gets its +1."""

    blocking = False

    def __init__(self, *, view: View = "text", random_plies: int = 0) -> None:
        """`view="compact"` shows ten words to the player to move, as in TicTacToeEnv: its mark, then the nine cells.

        `random_plies`: marks that are placed at random, in turn, before the game begins, so that self-play sees many games.
        """
        if not 0 <= random_plies <= _MAX_RANDOM_PLIES:
            raise ConfigError(
                f"random_plies={random_plies}; it is 0 to {_MAX_RANDOM_PLIES}: with one more, dice could win the game."
            )
        _check_view(view)
        self.view: View = view
        self.random_plies = random_plies
        self._board = EMPTY
        self._to_move: Mark = "X"
        self._over = True
        self._obs: dict[str, Observation] = {}

    @property
    def agent_ids(self) -> list[str]:
        return list(MARKS)

    @property
    def active_agents(self) -> list[str]:
        return [] if self._over else [self._to_move]

    @property
    def suggested_sysprompt(self) -> str | None:
        if self.view == "compact":
            return None
        return f"You play tic-tac-toe against another player; X moves first. {NOTATION} Reply with your move."

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        self._board, self._to_move, self._over = EMPTY, "X", False
        rng = random.Random(seed)
        for _ in range(self.random_plies):
            self._board = place(self._board, rng.choice(free_cells(self._board)), self._to_move)
            self._to_move = OTHER[self._to_move]
        self._episode_id = new_id()
        self._obs = {mark: self._observation(mark, None) for mark in MARKS}
        return {mark: (self._obs[mark], {"agent_mark": mark}) for mark in MARKS}

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        mover = self._to_move
        action = actions.get(mover, "")
        cell = read_move(action)
        faced = position(self._board, mover)
        gto_action = CELLS[faced.best[0]]
        if cell is None or cell not in faced.after:
            return self._forfeit(mover, action, cell, gto_action)

        now = faced.after[cell]
        self._board, self._to_move, self._over = now.board, OTHER[mover], not now.moves
        self._obs = {mark: self._observation(mark, cell if mark != mover else None) for mark in MARKS}
        outcomes = {}
        for mark in MARKS:
            result = result_for(self._board, mark)
            info = self._info(mark, mover, CELLS[cell], gto_action) | {"result": result}
            outcomes[str(mark)] = StepOutcome(self._obs[mark], _DUEL_REWARDS[result], terminated=self._over, info=info)
        return outcomes

    def _forfeit(self, mover: Mark, action: str, cell: int | None, gto_action: str) -> dict[str, StepOutcome]:
        self._over = True
        error = refusal(self._board, action, cell)
        told = {mover: error, OTHER[mover]: f"{mover} made an illegal move."}
        if self.view == "compact":
            self._obs = {m: f"{m} {compact(self._board)}" for m in MARKS}
        else:
            self._obs = {m: f"{told[m]}\n{render(self._board)}\nYou are {m}. Game over." for m in MARKS}
        name = None if cell is None else CELLS[cell]
        outcomes = {}
        for mark in MARKS:
            info = self._info(mark, mover, name, gto_action)
            if mark == mover:
                info |= {"illegal_move": True, "error": error}
            reward = -1.0 if mark == mover else 0.0
            outcomes[str(mark)] = StepOutcome(self._obs[mark], reward, terminated=True, info=info)
        return outcomes

    @staticmethod
    def _info(mark: Mark, mover: Mark, move: str | None, gto_action: str) -> Info:
        """The keys of TicTacToeEnv, from this player's point of view."""
        own = mark == mover
        return {
            "agent_move": move if own else None,
            "opponent_move": None if own else move,
            "gto_action": gto_action if own else None,
            "illegal_move": False,
            "error": None,
            "result": None,
        }

    def _observation(self, mark: Mark, opponent_cell: int | None) -> Observation:
        return _shown(self._board, mark, opponent_cell, self.view, self._to_move)[0]

    def current_obs(self) -> dict[str, Observation]:
        return dict(self._obs)

    def legal_actions(self, agent_id: str) -> list[str]:
        return list(free_moves(self._board)) if agent_id in self.active_agents else []

    def reference_action(self, agent_id: str) -> str | None:
        return CELLS[position(self._board, self._to_move).best[0]] if agent_id in self.active_agents else None

    def snapshot(self) -> Snapshot:
        world: dict[str, JSON] = {"board": self._board, "to_move": self._to_move, "over": self._over}
        return self._snapshot(_DUEL_KIND, _VERSION, world)

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_DUEL_KIND, version=_VERSION)
        self._board, self._to_move, self._over = world["board"], world["to_move"], world["over"]
        self._obs = dict(snapshot.obs)
        self._episode_id = snapshot.episode_id
