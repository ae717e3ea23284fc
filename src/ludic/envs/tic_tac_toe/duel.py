"""Tic-tac-toe for two agents, "X" and "O": turn-based and zero-sum. X moves first.

Both agents get an outcome for every move, so the loser gets its −1 in the same step as the winner its +1.
It is deterministic, unless the seed draws the first plies. Rules and perfect play are in board.py.
"""

import random
from collections.abc import Mapping
from typing import get_args

from ludic.envs.env import LudicEnv, world_of
from ludic.envs.tic_tac_toe.board import (
    CELLS,
    EMPTY,
    MARKS,
    NOTATION,
    OTHER,
    Mark,
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

_KIND = "tic_tac_toe_duel"
_VERSION = 1
_MAX_RANDOM_PLIES = 4
_REWARDS: dict[Result | None, float] = {"win": 1.0, "loss": -1.0, "draw": 0.0, None: 0.0}
_ENDINGS: dict[Result, str] = {"win": "you won", "loss": "you lost", "draw": "a draw"}


class TicTacToeDuel(LudicEnv[str, Observation, str]):
    """Win +1, loss −1, draw 0. An illegal or missing move ends the game: −1 for the offender, 0 for the other."""

    blocking = False

    def __init__(self, *, view: View = "text", random_plies: int = 0) -> None:
        """`view="compact"` shows ten words to the player to move, as in TicTacToeEnv: its mark, then the nine cells.

        `random_plies`: so many marks stand on the board when the game begins, placed at random in turn: players who learn from
        each other do not get stuck in one game.
        """
        if not 0 <= random_plies <= _MAX_RANDOM_PLIES:
            raise ConfigError(
                f"random_plies={random_plies}; it is 0 to {_MAX_RANDOM_PLIES}: with one more, dice could win the game."
            )
        if view not in get_args(View):
            raise ConfigError(f"There is no view {view!r}; there is {' and '.join(get_args(View))}.")
        self.view: View = view
        self.random_plies = random_plies
        self._board = EMPTY
        self._to_move: Mark = "X"
        self._over = True
        self._obs: dict[str, Observation] = {}
        self._episode_id = ""

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
        dice = random.Random(seed)
        for _ in range(self.random_plies):
            self._board = place(self._board, dice.choice(free_cells(self._board)), self._to_move)
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
            outcomes[str(mark)] = StepOutcome(
                self._obs[mark], _REWARDS[result], truncated=False, terminated=self._over, info=info
            )
        return outcomes

    def _forfeit(self, mover: Mark, action: str, cell: int | None, gto_action: str) -> dict[str, StepOutcome]:
        self._over = True
        error = refusal(self._board, action, cell)
        told = {mover: error, OTHER[mover]: f"{mover} made an illegal move."}
        if self.view == "compact":
            self._obs = {m: self._observation(m, None) for m in MARKS}
        else:
            self._obs = {m: f"{told[m]}\n{render(self._board)}\nYou are {m}. Game over." for m in MARKS}
        name = None if cell is None else CELLS[cell]
        outcomes = {}
        for mark in MARKS:
            info = self._info(mark, mover, name, gto_action)
            if mark == mover:
                info |= {"illegal_move": True, "error": error}
            reward = -1.0 if mark == mover else 0.0
            outcomes[str(mark)] = StepOutcome(self._obs[mark], reward, truncated=False, terminated=True, info=info)
        return outcomes

    @staticmethod
    def _info(mark: Mark, mover: Mark, move: str | None, gto_action: str) -> Info:
        """As TicTacToeEnv reports it; moves of the other player never count as one's own."""
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
        if self.view == "compact":
            return f"{mark} {compact(self._board)}" if mark == self._to_move or self._over else ""
        lines = [] if opponent_cell is None else [f"Your opponent played {CELLS[opponent_cell]}."]
        lines.append(render(self._board))
        result = result_for(self._board, mark)
        if result is not None:
            lines += [f"You are {mark}. Game over: {_ENDINGS[result]}."]
        elif mark == self._to_move:
            lines += [f"Free moves: {', '.join(free_moves(self._board))}", f"You are {mark}. It is your move."]
        else:
            lines += [f"You are {mark}. It is {self._to_move}'s move."]
        return "\n".join(lines)

    def current_obs(self) -> dict[str, Observation]:
        return dict(self._obs)

    def legal_actions(self, agent_id: str) -> list[str]:
        return list(free_moves(self._board)) if agent_id in self.active_agents else []

    def reference_action(self, agent_id: str) -> str | None:
        return CELLS[position(self._board, self._to_move).best[0]] if agent_id in self.active_agents else None

    def snapshot(self) -> Snapshot:
        world: dict[str, JSON] = {"board": self._board, "to_move": self._to_move, "over": self._over}
        return Snapshot(
            env_kind=_KIND, version=_VERSION, episode_id=self._episode_id, obs=self.current_obs(), world=world
        )

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        self._board, self._to_move, self._over = world["board"], world["to_move"], world["over"]
        self._obs = dict(snapshot.obs)
        self._episode_id = snapshot.episode_id
