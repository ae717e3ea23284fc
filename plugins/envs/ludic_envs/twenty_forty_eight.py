"""2048: slide the tiles, merge equal ones, reach the target.

A long game with a reward on nearly every move, to test credit assignment over many turns.
"""

import random
from functools import lru_cache
from typing import Final, TypeAlias

from ludic.envs.env import rng_from_json, rng_to_json, world_of
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import JSON, ConfigError, Info, Observation, Snapshot, StepOutcome, new_id

Row: TypeAlias = tuple[int, ...]
Grid: TypeAlias = tuple[Row, ...]
"""Rows from top to bottom; 0 is an empty cell."""

MOVES: Final = ("up", "down", "left", "right")
_FOUR_SHARE = 0.1
_KIND = "twenty_forty_eight"
_VERSION = 1


@lru_cache(maxsize=65536)  # every row of a 4 × 4 game up to 2048 fits
def slide_left(row: Row) -> tuple[Row, int]:
    """The row after a slide to the left, and the sum of the merged tiles.

    Each tile merges at most once, those nearest the wall first: 2 2 2 2 becomes 4 4, and 4 2 2 becomes 4 4.
    """
    merged: list[int] = []
    gained = 0
    fresh = False  # whether the last tile is a merged one
    for tile in filter(None, row):
        if merged and merged[-1] == tile and not fresh:
            merged[-1] = 2 * tile
            gained += 2 * tile
            fresh = True
        else:
            merged.append(tile)
            fresh = False
    return (*merged, *(0,) * (len(row) - len(merged))), gained


def slide(grid: Grid, move: str) -> tuple[Grid, int]:
    """The grid after a move, before a new tile appears, and the sum of the merged tiles."""
    lines = tuple(zip(*grid, strict=True)) if move in ("up", "down") else grid
    backwards = move in ("down", "right")
    slid = [slide_left(line[::-1] if backwards else line) for line in lines]
    moved = tuple(line[::-1] if backwards else line for line, _ in slid)
    return tuple(zip(*moved, strict=True)) if move in ("up", "down") else moved, sum(gained for _, gained in slid)


def legal_moves(grid: Grid) -> list[str]:
    """The moves that change something."""
    return [move for move in MOVES if slide(grid, move)[0] != grid]


class TwentyFortyEightEnv(SingleAgentEnv):
    """Reward per move: the sum of the merged tiles / target. A move that changes nothing costs `illegal_reward` and counts."""

    blocking = False
    _rng = random.Random()  # replaced by every reset

    def __init__(
        self, *, size: int = 4, target: int = 2048, max_moves: int = 1000, illegal_reward: float = -0.1
    ) -> None:
        super().__init__()
        if size < 2:
            raise ConfigError(f"size={size} leaves no room for two tiles side by side; the smallest is 2.")
        if target < 8 or target & (target - 1):
            raise ConfigError(f"target={target} cannot be merged to; give a power of two from 8 on.")
        if max_moves < 1:
            raise ConfigError(f"max_moves={max_moves} allows no move; give at least 1.")
        self.size = size
        self.target = target
        self.max_moves = max_moves
        self.illegal_reward = illegal_reward
        self._grid: Grid = ((0,) * size,) * size
        self._legal: list[str] = []
        self._score = 0
        self._moves_left = 0
        self._obs: Observation = ""

    @property
    def suggested_sysprompt(self) -> str | None:
        return (
            f"You play 2048 on a grid of {self.size} × {self.size} cells. Each move slides all tiles in one direction; "
            "two equal tiles that meet merge into their sum, and then a new 2 or 4 appears on a free cell. "
            f"Reach a tile of {self.target} before no move is left. Empty cells are shown as dots. "
            f"Reply with one move: {', '.join(MOVES)}. A move that changes nothing is lost."
        )

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._rng = random.Random(seed)
        self._set_grid(self._with_new_tile(self._with_new_tile(((0,) * self.size,) * self.size)))
        self._score = 0
        self._moves_left = self.max_moves
        self._episode_id = new_id()
        self._obs = self._view()
        return self._obs, {"score": 0, "max_tile": self._max_tile, "moves_left": self._moves_left}

    def env_step(self, action: str) -> StepOutcome:
        move = action.strip().lower()
        grid, gained = slide(self._grid, move) if move in MOVES else (self._grid, 0)
        illegal = grid == self._grid
        if not illegal:
            self._set_grid(self._with_new_tile(grid))
        self._score += gained
        self._moves_left -= 1
        reached = self._max_tile >= self.target
        terminated = reached or not self._legal
        self._obs = self._view()
        if illegal:
            self._obs = f"{action!r:.40} changed nothing.\n{self._obs}"
        info: Info = {
            "move": move if move in MOVES else None,
            "illegal_move": illegal,
            "merged": gained,
            "score": self._score,
            "max_tile": self._max_tile,
            "reached_target": reached,
            "moves_left": self._moves_left,
        }
        return StepOutcome(
            self._obs,
            self.illegal_reward if illegal else gained / self.target,
            truncated=not terminated and self._moves_left == 0,
            terminated=terminated,
            info=info,
        )

    def _set_grid(self, grid: Grid) -> None:
        self._grid, self._legal = grid, legal_moves(grid)

    @property
    def _max_tile(self) -> int:
        return max(map(max, self._grid))

    def _with_new_tile(self, grid: Grid) -> Grid:
        """Add a 2, or sometimes a 4, on a random empty cell."""
        empty = [(r, c) for r, row in enumerate(grid) for c, tile in enumerate(row) if not tile]
        r, c = self._rng.choice(empty)
        tile = 4 if self._rng.random() < _FOUR_SHARE else 2
        row = (*grid[r][:c], tile, *grid[r][c + 1 :])
        return (*grid[:r], row, *grid[r + 1 :])

    def _view(self) -> Observation:
        width = len(str(self.target))
        rows = [" ".join(f"{tile or '.':>{width}}" for tile in row) for row in self._grid]
        moves = ", ".join(self._legal) or "none"
        return "\n".join(
            [*rows, f"Score: {self._score}. Moves left: {self._moves_left}.", f"Moves that change something: {moves}"]
        )

    def env_current_obs(self) -> Observation:
        return self._obs

    def legal_actions(self, agent_id: str) -> list[str]:
        return [] if self._over else list(self._legal)

    def snapshot(self) -> Snapshot:
        world: dict[str, JSON] = {
            "grid": [list(row) for row in self._grid],
            "score": self._score,
            "moves_left": self._moves_left,
            "over": self._over,
            "rng": rng_to_json(self._rng),
        }
        return self._snapshot(_KIND, _VERSION, world)

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        self._rng = rng_from_json(world["rng"])
        self._set_grid(tuple(tuple(row) for row in world["grid"]))
        self._score, self._moves_left, self._over = world["score"], world["moves_left"], world["over"]
        self._obs = snapshot.obs[self.agent_id]
        self._episode_id = snapshot.episode_id
