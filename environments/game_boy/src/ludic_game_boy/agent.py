"""`GameBoyAgent`: the agent for long games, with notes, a map of visited cells, and summaries of the past.

It depends on no game and no emulator: it reads `place` and `track` from an env's info.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

from ludic.agents.folding_agent import FoldingReActAgent
from ludic.agents.tool_agent import ToolLike
from ludic.types import Info, Observation

_MAX_NOTES, _MAX_NOTE_CHARS = 32, 500
Cell: TypeAlias = tuple[int, int]
"""(x, y); y grows downwards, as on the screen."""

MOVES: dict[str, Cell] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_BUMPS = 2  # in many games the first press of a direction only turns the player


class GameBoyAgent(FoldingReActAgent):
    """Plays long games: keeps notes, finds paths, and summarises the past when the dialogue is full."""

    name = "game_boy_agent"

    def __init__(self, *, tools: Sequence[ToolLike] | None = None, **agent_kwargs: Any) -> None:
        self._notes: dict[str, str] = {}
        self._map = ExploredMap()
        own: list[ToolLike] = [self.write_note, self.read_notes, self.path_to, self.show_map]
        super().__init__(tools=[*own, *(tools or ())], **agent_kwargs)

    # --- events of an episode ---

    def reset(self, system_prompt: str | None = None) -> None:
        super().reset(system_prompt)
        self._notes.clear()
        self._map = ExploredMap()

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        super().on_env_reset(obs, info)
        self._map.arrive(info.get("place", ()))

    def on_after_step(self, obs: Observation, info: Info) -> None:
        super().on_after_step(obs, info)
        self._map.follow(info.get("track", ()))

    # --- tools ---

    def write_note(self, title: str, text: str) -> str:
        """Keep something for the rest of the game. A note with the same title is replaced; an empty text deletes it.

        Args:
            title: A few words to find it by.
            text: At most 500 characters.
        """
        self._notes.pop(title, None)
        if not text.strip():
            return "Deleted."
        if len(self._notes) >= _MAX_NOTES:
            return f"There are {_MAX_NOTES} notes already; delete one first."
        self._notes[title] = text.strip()[:_MAX_NOTE_CHARS]
        return "Noted."

    def read_notes(self) -> str:
        """All notes."""
        return "\n".join(f"- {title}: {text}" for title, text in self._notes.items()) or "There are no notes."

    def path_to(self, x: int, y: int) -> str:
        """The buttons that lead to a place of this map, over ground that you have walked on before.

        Args:
            x: Column of the place, as in the facts.
            y: Row of the place, as in the facts.
        """
        presses = self._map.path((x, y))
        if presses is None:
            return "No way there is known. Explore further; show_map draws what is known."
        return in_buttons(presses) if presses else "You are there."

    def show_map(self) -> str:
        """A drawing of the ground that you have walked on in this map."""
        return self._map.drawn()

    # --- summing up ---

    def _memory(self, summary: str) -> str:
        notes = f"\n\nYour notes:\n{self.read_notes()}" if self._notes else ""
        return f"{super()._memory(summary)}{notes}"


class ExploredMap:
    """The visited cells of each area. A direction that failed twice at a cell counts as blocked."""

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
