"""`GameBoyAgent`: the harness for long games. Notes that last, a map of where it has been, and summaries of the past.

It knows no game and no emulator: it reads `place` and `track` out of an env's info (see ludic.envs.game_boy), and
leaves the pressing of buttons to the env.
"""

from collections.abc import Sequence
from typing import Any

from ludic.agents.folding_agent import FoldingReActAgent
from ludic.agents.navigation import ExploredMap, in_buttons
from ludic.agents.tool_agent import ToolLike
from ludic.types import Info, Observation

_MAX_NOTES, _MAX_NOTE_CHARS = 32, 500


class GameBoyAgent(FoldingReActAgent):
    """Plays long games: keeps notes, finds ways back, and sums up the past when the dialogue is full."""

    name = "game_boy_agent"

    def __init__(
        self,
        *,
        tools: Sequence[ToolLike] | None = None,
        **agent_kwargs: Any,
    ) -> None:
        self._notes: dict[str, str] = {}
        self._map = ExploredMap()
        own: list[ToolLike] = [self.write_note, self.read_notes, self.path_to, self.show_map]
        super().__init__(tools=[*own, *(tools or ())], **agent_kwargs)

    # --- what happens to the agent ---

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
