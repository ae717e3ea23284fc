"""TextWorld as an environment: an adventure with rooms, containers and keys, generated from the seed of the episode.

A quest takes many commands and pays at its end, so this is a task for learning over a long horizon. The commands that are
possible now are the env's `legal_actions`.
"""

import json
import string
from collections.abc import Mapping
from typing import Literal, TypeAlias

from ludic.types import ConfigError, Info, Observation, StepOutcome
from ludic_envs.adapters.base import ReplayedEnv
from ludic_envs.adapters.textworld.games import Playthrough, make_game, require_package
from ludic_envs.adapters.textworld.narrator import goals_told, sketched, told

View: TypeAlias = Literal["full", "short"]
_LABELS = string.digits[1:] + string.ascii_lowercase + string.ascii_uppercase
_SYSTEM_PROMPT = "You play a text adventure. Reply with one of the listed commands, {how}, and nothing else."


class TextWorldEnv(ReplayedEnv):
    """A generated game of TextWorld; its score, scaled to 1, is the reward."""

    kind = "textworld"
    full_reward = 1.0

    def __init__(
        self,
        *,
        rooms: int = 3,
        objects: int = 4,
        quest_length: int = 3,
        quest_breadth: int = 1,
        level: int | None = None,
        num_games: int | None = None,
        max_moves: int = 50,
        view: View = "full",
        numbered: bool = False,
        illegal_reward: float = 0.0,
    ) -> None:
        """`level` (1 to 30) asks for one of TextWorld's treasure hunts, which get harder, instead of a game by the other sizes.
        `num_games` limits how many games the seeds lead to. `numbered` lists the commands with one character each, which is
        then the action. `view="short"` shows little text and the goal as facts, for small models. `illegal_reward` is added
        for every reply that is no listed command."""
        for name, value in (("rooms", rooms), ("quest_length", quest_length), ("max_moves", max_moves)):
            if value < 1:
                raise ConfigError(f"{name}={value}; it must be at least 1.")
        if level is not None and not 1 <= level <= 30:
            raise ConfigError(f"level={level}; TextWorld has treasure hunts of levels 1 to 30.")
        if view not in ("full", "short"):
            raise ConfigError(f"view={view!r}; there are full and short.")
        require_package()
        self._settings = json.dumps(
            {
                "rooms": rooms,
                "objects": objects,
                "quest_length": quest_length,
                "quest_breadth": quest_breadth,
                "level": level,
            }
        )
        self.num_games, self.max_moves, self.view, self.numbered = num_games, max_moves, view, numbered
        self.illegal_reward = illegal_reward
        self._roles = ["agent_0"]
        self._system_prompt = _SYSTEM_PROMPT.format(how="by its character" if numbered else "as it is written")
        self._num_moves = 0

    def _to_act(self) -> list[str]:
        return [] if self._live.is_over or self._num_moves >= self.max_moves else list(self._roles)

    def _begin(self, seed: int) -> dict[str, tuple[Observation, Info]]:
        number = seed if self.num_games is None else seed % self.num_games
        self._live, self._num_moves = Playthrough(make_game(self._settings, number % 2**31)), 0
        intro = f"{self._live.game.objective}\n\n" if self.view == "full" else ""
        info: Info = {"game": number, "shortest": len(self._live.winning_commands())}
        return {"agent_0": (intro + self._shown(), info)}

    def _advance(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        live, before = self._live, self._live.score
        self._num_moves += 1
        command = self._read(actions.get("agent_0", ""))
        if command is not None:
            live.play(command)
        is_cut = self._num_moves >= self.max_moves and not live.is_over
        info: Info = {
            "moves": self._num_moves,
            "illegal_move": command is None,
            "score": live.score,
            "won": live.is_won,
            "correct": live.is_won,
        }
        event = "" if command is not None or self.view == "short" else "That is not possible here. "
        end = "You have won." if live.is_won else "The game is over." if live.is_over or is_cut else self._shown()
        reward = live.score - before + (self.illegal_reward if command is None else 0.0)
        outcome = StepOutcome(event + end, reward, is_cut, live.is_over, info=info)
        return {"agent_0": outcome}

    def _read(self, said: str) -> str | None:
        """The command that a reply names."""
        wanted = said.strip()
        if self.numbered:
            return dict(zip(_LABELS, self._live.commands, strict=False)).get(wanted)
        return next((each for each in self._live.commands if each.casefold() == wanted.casefold()), None)

    def _shown(self) -> str:
        live, names = self._live, self._live.game.names
        listed = (
            [f"{label} {each}" for label, each in zip(_LABELS, live.commands, strict=False)]
            if self.numbered
            else live.commands
        )
        if self.view == "short":
            return "\n".join([f"!{goals_told(live.game.goals, names)}", sketched(live.facts, names), *listed])
        return f"{told(live.facts, names)}\nCommands:\n" + "\n".join(listed)

    def legal_actions(self, agent_id: str) -> list[str] | None:
        if not self.active_agents:
            return []
        return list(_LABELS[: len(self._live.commands)]) if self.numbered else self._live.commands

    def reference_action(self, agent_id: str) -> str | None:
        """The first command of the shortest known way to win."""
        way = self._live.winning_commands() if self.active_agents else []
        if not way:
            return None
        return _LABELS[self._live.commands.index(way[0])] if self.numbered else way[0]
