"""Games of TextWorld: generated from settings and a seed, and run by the package's logic.

Neither needs Inform 7, which the package carries for x86_64 only and which other machines cannot run.
"""

import importlib
import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ludic.types import ConfigError, MissingPackage
from ludic_envs.adapters.base import GlobalRandom
from ludic_envs.adapters.textworld.narrator import Fact

_GENERATING = threading.Lock()
"""The package's generator has global state."""
_HOW = "pip install -e '.[textworld]' in a clone of Ludic, on Linux with x86_64 and on macOS; elsewhere see docs/envs/textworld.md"
_NO_EFFECT = ("look", "inventory", "examine ")
"""Commands that only show what an observation tells anyway."""


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage("textworld", "The env 'textworld'", _HOW) from error


def require_package() -> None:
    """Raise MissingPackage if TextWorld is not installed."""
    _package("textworld.generator")


def make_game(settings: str, seed: int) -> "Game":
    """The game of a seed; `settings` is JSON: {"level"} for a treasure hunt, else rooms, objects, quest_length, quest_breadth.

    Episodes of a group ask for theirs at the same moment: the first generates it, the others wait for that game alone."""
    with _lock_of(settings, seed):
        return _generated(settings, seed)


@lru_cache(maxsize=512)
def _lock_of(settings: str, seed: int) -> threading.Lock:
    return threading.Lock()


@lru_cache(maxsize=512)  # generating a game takes half a second
def _generated(settings: str, seed: int) -> "Game":
    asked = json.loads(settings)
    textworld = _package("textworld")
    options = textworld.GameOptions()
    options.seeds = seed
    with _GENERATING, GlobalRandom(seed).installed():
        try:
            if asked["level"] is not None:
                hunts = _package("textworld.challenges.tw_treasure_hunter.treasure_hunter")
                return Game(hunts.make({"level": asked["level"]}, options))
            options.nb_rooms, options.nb_objects = asked["rooms"], asked["objects"]
            options.quest_length, options.quest_breadth = asked["quest_length"], asked["quest_breadth"]
            return Game(_package("textworld.generator").make_game(options))
        except (ValueError, AssertionError, _package("textworld.generator").chaining.QuestError) as error:
            raise ConfigError(
                f"TextWorld cannot make a game with {settings}: {error}. Ask for a shorter quest."
            ) from error


class Game:
    """A generated game; it does not change, so that episodes may share it."""

    def __init__(self, generated: Any) -> None:
        self.generated = generated
        self.commands_of = _package("textworld.generator.inform7").Inform7Game(generated).gen_commands_from_actions
        self.names = {id: info.name for id, info in generated.infos.items() if info.name}
        self.objective = " ".join(generated.objective.split())
        self.max_score = float(generated.max_score)

    @property
    def goals(self) -> list[Fact]:
        """What makes the player win."""
        events = [quest.win_events[0] for quest in self.generated.quests if quest.win_events]
        return [fact for event in events for fact in as_facts(event.condition.preconditions)]


class Playthrough:
    """One run through a game."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self._progress = _package("textworld.generator.game").GameProgression(game.generated, track_quests=True)
        self._list_commands()

    def _list_commands(self) -> None:
        actions = self._progress.valid_actions
        known = dict(sorted(zip(self.game.commands_of(actions), actions, strict=True), key=lambda pair: pair[0]))
        useful = {command: action for command, action in known.items() if not command.startswith(_NO_EFFECT)}
        self._actions = useful or known

    @property
    def commands(self) -> list[str]:
        return list(self._actions)

    @property
    def facts(self) -> list[Fact]:
        return as_facts(self._progress.state.facts)

    @property
    def score(self) -> float:
        """From 0 to 1."""
        return float(self._progress.score) / self.game.max_score

    @property
    def is_won(self) -> bool:
        return bool(self._progress.completed)

    @property
    def is_over(self) -> bool:
        return self.is_won or bool(self._progress.failed)

    def play(self, command: str) -> None:
        self._progress.update(self._actions[command])
        self._list_commands()

    def winning_commands(self) -> list[str]:
        """The shortest known way to win from here; empty if there is none."""
        return list(self.game.commands_of(self._progress.winning_policy or ()))

    def close(self) -> None:
        """An adapter closes what it has opened; a playthrough holds nothing."""


def as_facts(propositions: Sequence[Any]) -> list[Fact]:
    return [Fact(each.name, tuple(argument.name for argument in each.arguments)) for each in propositions]
