"""Tic-tac-toe against a built-in opponent.

X moves first: the agent is X when it starts and O when it does not. The opponent's random numbers belong to the episode,
so all rollouts of a group (one env seed) meet the same opponent. Rules and perfect play are in board.py.
"""

import random
from functools import cache
from typing import Literal, TypeAlias, get_args

from ludic.envs.env import dice_from_json, dice_to_json, world_of
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.envs.tic_tac_toe.board import (
    CELLS,
    EMPTY,
    NOTATION,
    Mark,
    Position,
    Result,
    View,
    compact,
    free_moves,
    position,
    read_move,
    refusal,
    render,
    result_for,
)
from ludic.types import JSON, ConfigError, Info, Observation, Snapshot, StepOutcome, new_id

Opponent: TypeAlias = Literal["random", "minimax"]

_KIND = "tic_tac_toe"
_VERSION = 1
_ENDINGS: dict[Result, str] = {"win": "you won", "loss": "you lost", "draw": "a draw"}


@cache
def _view(board: str, mark: Mark, opponent_cell: int | None, view: View) -> tuple[Observation, Result | None]:
    """What the agent is shown, and how the game ended for it (None while it goes on)."""
    if view == "compact":
        return f"{mark} {compact(board)}", result_for(board, mark)
    lines = [] if opponent_cell is None else [f"Your opponent played {CELLS[opponent_cell]}."]
    lines.append(render(board))
    result = result_for(board, mark)
    if result is None:
        lines += [f"Free moves: {', '.join(free_moves(board))}", f"You are {mark}. It is your move."]
    else:
        lines += [f"You are {mark}. Game over: {_ENDINGS[result]}."]
    return "\n".join(lines), result


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
        """`epsilon`: the probability that the minimax opponent picks any free cell instead of a best one.

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
        if view not in get_args(View):
            raise ConfigError(f"There is no view {view!r}; there is {' and '.join(get_args(View))}.")
        self.show_opponent_move = show_opponent_move
        self.view: View = view
        self.opponent: Opponent = opponent
        self.epsilon = epsilon
        self.agent_starts = agent_starts
        self._mark: Mark = "X" if agent_starts else "O"
        self._board = EMPTY
        self._all_optimal = True
        self._obs: Observation = ""
        self._episode_id = ""

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
        self._obs, _ = _view(self._board, self._mark, opened if self.show_opponent_move else None, self.view)
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
        self._obs, result = _view(self._board, mark, replied if self.show_opponent_move else None, self.view)

        # The empty board is worth 0 to both marks, so a draw without a mistake of ours is all there was to get.
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
        return StepOutcome(self._obs, reward, truncated=False, terminated=result is not None, info=info)

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
        return StepOutcome(self._obs, -1.0, truncated=False, terminated=True, info=info)

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
            "rng": dice_to_json(self._rng),
        }
        return Snapshot(
            env_kind=_KIND, version=_VERSION, episode_id=self._episode_id, obs=self.current_obs(), world=world
        )

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        self._rng = dice_from_json(world["rng"])
        self._board, self._mark, self._all_optimal = world["board"], world["mark"], world["all_optimal"]
        self._over = world["over"]
        self._obs = snapshot.obs[self.agent_id]
        self._episode_id = snapshot.episode_id
