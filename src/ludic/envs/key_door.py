"""Key and door: a grid world with partial observation.

The agent finds the key, then opens the door with it. It sees only the cells around itself, so it must remember where it has been.
Every world can be solved within the given number of moves.
"""

import random
from collections import deque
from typing import Final, Literal, TypeAlias, get_args

from ludic.envs.env import world_of
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import JSON, ConfigError, Info, Observation, Snapshot, StepOutcome, new_id

Cell: TypeAlias = tuple[int, int]
"""(row, column)"""
View: TypeAlias = Literal["text", "compact"]

MOVES: Final[dict[str, Cell]] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WALL_SHARE = 0.2
_KIND = "key_door"
_VERSION = 1
_EVENTS = {
    "moved": "You moved.",
    "bumped": "There is a wall; you stay where you are.",
    "locked": "The door is locked and you have no key; you stay where you are.",
    "picked_up": "You picked up the key.",
    "opened": "You opened the door.",
    "unreadable": f"That is none of {', '.join(MOVES)}; you stay where you are.",
}


def _neighbour(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def shortest_path(start: Cell, goal: Cell, free: frozenset[Cell]) -> list[str] | None:
    """The moves of a shortest path over free cells (the goal counts as free); None if there is no path."""
    came_by: dict[Cell, tuple[Cell, str] | None] = {start: None}
    queue = deque([start])
    while queue and goal not in came_by:
        cell = queue.popleft()
        for move in MOVES:
            then = _neighbour(cell, move)
            if then not in came_by and (then in free or then == goal):
                came_by[then] = (cell, move)
                queue.append(then)
    if goal not in came_by:
        return None
    path = []
    cell = goal
    while (step := came_by[cell]) is not None:
        cell, move = step
        path.append(move)
    return path[::-1]


class KeyDoorEnv(SingleAgentEnv):
    """Reward 1 for opening the door, 0 for everything else; out of moves is a truncation."""

    blocking = False
    full_reward = 1.0

    def __init__(
        self, *, size: int = 5, view_radius: int = 1, max_moves: int | None = None, view: View = "text"
    ) -> None:
        """A world of `size` × `size` cells, of which the agent sees those at most `view_radius` away per axis.

        `view="compact"` is for small models: seven characters and no system prompt. What is up, down, left and right of the agent;
        where key and door are, as on a number pad (7 is up left), or ? if not in sight; k with the key or - without.
        Without a clock and events, an agent that comes back to a cell sees the same text.
        """
        super().__init__()
        max_moves = 4 * size * size if max_moves is None else max_moves
        if size < 3:
            raise ConfigError(f"size={size} leaves no room for agent, key, door and walls; the smallest is 3.")
        if view_radius < 1:
            raise ConfigError(f"view_radius={view_radius} would show no neighbouring cell; the smallest is 1.")
        if max_moves < 4 * size:
            # Without walls the longest solution takes 4 · size − 2 moves, so solvable worlds always exist.
            raise ConfigError(f"max_moves={max_moves} is too few for a world of size {size}; give at least {4 * size}.")
        if view not in get_args(View):
            raise ConfigError(f"There is no view {view!r}; there is {' and '.join(get_args(View))}.")
        self.size = size
        self.view_radius = view_radius
        self.view: View = view
        self.max_moves = max_moves
        self._free: frozenset[Cell] = frozenset()
        self._agent: Cell = (0, 0)
        self._key: Cell = (0, 0)
        self._door: Cell = (0, 0)
        self._has_key = False
        self._moves_left = 0
        self._obs: Observation = ""

    @property
    def suggested_sysprompt(self) -> str | None:
        if self.view == "compact":
            return None
        return (
            "You walk through a small world of cells: find the key (K), then carry it to the door (D). "
            f"You see only the cells up to {self.view_radius} away from you: @ is you, # a wall, . free floor. "
            "The key is picked up by stepping on it, and the door opens only with it. "
            f"Reply with one move: {', '.join(MOVES)}. Every reply uses up a move, also one that leads nowhere."
        )

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._build(random.Random(seed))
        self._has_key = False
        self._moves_left = self.max_moves
        self._episode_id = new_id()
        self._obs = self._view()
        return self._obs, {"has_key": False, "moves_left": self._moves_left}

    def _build(self, rng: random.Random) -> None:
        """Draw worlds until one can be solved in time."""
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            free = rng.sample(cells, len(cells) - int(_WALL_SHARE * len(cells)))
            self._agent, self._key, self._door = free[:3]
            self._free = frozenset(free)
            to_key = shortest_path(self._agent, self._key, self._free - {self._door})
            to_door = shortest_path(self._key, self._door, self._free)
            if to_key is not None and to_door is not None and len(to_key) + len(to_door) <= self.max_moves:
                return

    def env_step(self, action: str) -> StepOutcome:
        event = self._move(action.strip().lower())
        self._moves_left -= 1
        opened = event == "opened"
        out_of_moves = not opened and self._moves_left == 0
        self._obs = self._view() if self.view == "compact" else f"{_EVENTS[event]}\n{self._view()}"
        info: Info = {
            "event": event,
            "illegal_move": event == "unreadable",
            "has_key": self._has_key,
            "moves_left": self._moves_left,
        }
        return StepOutcome(self._obs, float(opened), truncated=out_of_moves, terminated=opened, info=info)

    def _move(self, move: str) -> str:
        """Carry out a move; returns a key of _EVENTS."""
        if move not in MOVES:
            return "unreadable"
        then = _neighbour(self._agent, move)
        if then not in self._free:
            return "bumped"
        if then == self._door and not self._has_key:
            return "locked"
        self._agent = then
        if then == self._door:
            return "opened"
        if then == self._key and not self._has_key:
            self._has_key = True
            return "picked_up"
        return "moved"

    def _view(self) -> Observation:
        if self.view == "compact":
            around = "".join(self._symbol(_neighbour(self._agent, move)) for move in MOVES)
            return f"{around}{self._bearing(self._key)}{self._bearing(self._door)}{'k' if self._has_key else '-'}"
        row, column = self._agent
        offsets = range(-self.view_radius, self.view_radius + 1)
        window = ["".join(self._symbol((row + down, column + right)) for right in offsets) for down in offsets]
        carrying = "You carry the key." if self._has_key else "You do not have the key."
        return "\n".join([*window, f"{carrying} Moves left: {self._moves_left}."])

    def _bearing(self, cell: Cell) -> str:
        """The key of a number pad that lies in the direction of the cell; 5 is the agent's own cell, ? beyond its view."""
        down, right = cell[0] - self._agent[0], cell[1] - self._agent[1]
        if max(abs(down), abs(right)) > self.view_radius or (cell == self._key and self._has_key):
            return "?"
        return "789456123"[3 * ((down > 0) - (down < 0) + 1) + (right > 0) - (right < 0) + 1]

    def _symbol(self, cell: Cell) -> str:
        if cell == self._agent:
            return "@"
        if cell == self._key and not self._has_key:
            return "K"
        if cell == self._door:
            return "D"
        return "." if cell in self._free else "#"

    def env_current_obs(self) -> Observation:
        return self._obs

    def legal_actions(self, agent_id: str) -> list[str]:
        """Always all four: the agent must find out which lead into a wall."""
        return [] if self._over else list(MOVES)

    def reference_action(self, agent_id: str) -> str | None:
        """The first move of a shortest path, with full knowledge of the world."""
        if self._over:
            return None
        goal, free = (self._door, self._free) if self._has_key else (self._key, self._free - {self._door})
        path = shortest_path(self._agent, goal, free)
        assert path, "the world was built so that key and door can be reached"
        return path[0]

    def snapshot(self) -> Snapshot:
        world: dict[str, JSON] = {
            "free": [[row, column] for row, column in sorted(self._free)],
            "agent": [*self._agent],
            "key": [*self._key],
            "door": [*self._door],
            "has_key": self._has_key,
            "moves_left": self._moves_left,
            "over": self._over,
        }
        return self._snapshot(_KIND, _VERSION, world)

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        self._free = frozenset((row, column) for row, column in world["free"])
        self._agent, self._key, self._door = tuple(world["agent"]), tuple(world["key"]), tuple(world["door"])
        self._has_key, self._moves_left, self._over = world["has_key"], world["moves_left"], world["over"]
        self._obs = snapshot.obs[self.agent_id]
        self._episode_id = snapshot.episode_id
