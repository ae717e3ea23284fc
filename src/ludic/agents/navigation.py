"""Where an agent has been, and how to get back there: a map drawn from nothing but its own steps."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

Cell: TypeAlias = tuple[int, int]
"""(x, y); y grows downwards, as on the screen."""

MOVES: dict[str, Cell] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_BUMPS = 2  # in many games the first press of a direction only turns the player


class ExploredMap:
    """The cells walked on, map by map. A way that was refused twice counts as closed."""

    def __init__(self) -> None:
        self._cells: dict[Any, set[Cell]] = {}
        self._bumps: Counter[tuple[Any, Cell, str]] = Counter()
        self._area: Any = None
        self.here: Cell | None = None

    def arrive(self, place: Sequence[Any]) -> None:
        """The player is seen at `place`: x, y, and the area if the game has several."""
        if len(place) < 2:
            return
        self.here = (int(place[0]), int(place[1]))
        self._area = tuple(place[2:])
        self._cells.setdefault(self._area, set()).add(self.here)

    def follow(self, track: Sequence[Sequence[Any]]) -> None:
        """Presses with the place after each, as GameBoyEnv reports them."""
        for button, *place in track:
            before = (self._area, self.here)
            self.arrive(place)
            if button in MOVES and self.here is not None and (self._area, self.here) == before:
                self._bumps[self._area, self.here, button] += 1

    def path(self, goal: Cell) -> list[str] | None:
        """The shortest known way from here, over cells walked on; the goal itself may be new. None if there is none."""
        if self.here is None:
            return None
        known = self._cells[self._area] | {goal}
        came: dict[Cell, tuple[Cell, str] | None] = {self.here: None}
        queue = deque([self.here])
        while queue and goal not in came:
            cell = queue.popleft()
            for button, (dx, dy) in MOVES.items():
                then = (cell[0] + dx, cell[1] + dy)
                if then in known and then not in came and self._bumps[self._area, cell, button] < _BUMPS:
                    came[then] = (cell, button)
                    queue.append(then)
        return _walked(came, goal) if goal in came else None

    def drawn(self) -> str:
        """The cells of this area as a picture: `.` walked on, `@` here, blank unknown."""
        if self.here is None:
            return "Nothing is known yet."
        cells = self._cells[self._area]
        xs, ys = [x for x, _ in cells], [y for _, y in cells]
        rows = [
            "".join(
                "@" if (x, y) == self.here else "." if (x, y) in cells else " " for x in range(min(xs), max(xs) + 1)
            )
            for y in range(min(ys), max(ys) + 1)
        ]
        return "\n".join(
            [f"Top left is x={min(xs)}, y={min(ys)}; you are at x={self.here[0]}, y={self.here[1]}.", *rows]
        )


def _walked(came: dict[Cell, tuple[Cell, str] | None], goal: Cell) -> list[str]:
    presses = []
    cell = goal
    while (step := came[cell]) is not None:
        cell, button = step
        presses.append(button)
    return presses[::-1]


def in_buttons(presses: Sequence[str]) -> str:
    """`up 3 right 2`: as an env reads it."""
    runs = [(button, len(list(run))) for button, run in groupby(presses)]
    return " ".join(button if count == 1 else f"{button} {count}" for button, count in runs)
