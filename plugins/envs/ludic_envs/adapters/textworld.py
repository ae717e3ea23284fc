"""TextWorld as an environment: an adventure with rooms, containers and keys, generated from the seed of the episode.

A quest takes many commands and pays at its end, so this is a task for learning over a long horizon. The commands that are
possible now are the env's `legal_actions`.

Games are generated and run by the package's logic; the text that a player sees is written here, from the facts of the state:
`at(o_0, r_0)` says that an object is in a room, `in(k_0, c_0)` that it is in a container. Neither needs Inform 7, which the package
carries for x86_64 only.
"""

import importlib
import json
import string
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from ludic.types import ConfigError, Info, MissingPackage, Observation, StepOutcome
from ludic_envs.adapters.base import GlobalRandom, ReplayedEnv

_PLAYER, _INVENTORY = "P", "I"
_STATES = ("open", "closed", "locked", "eaten")
_DIRECTIONS = ("north", "east", "south", "west")


@dataclass(frozen=True, slots=True)
class Fact:
    """A predicate over ids of rooms and things."""

    name: str
    of: tuple[str, ...]


@dataclass(slots=True)
class _Scene:
    """Facts sorted by what the narrator asks of them."""

    room: str = ""
    things: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Place (room, container, supporter or inventory) -> what is there."""
    states: dict[str, str] = field(default_factory=dict)
    """Container or door -> open, closed or locked."""
    exits: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Direction -> (room, door)."""

    @classmethod
    def of(cls, facts: Iterable[Fact]) -> "_Scene":
        listed = sorted(facts, key=lambda fact: (fact.name, fact.of))
        room = next(fact.of[1] for fact in listed if fact.name == "at" and fact.of[0] == _PLAYER)
        doors = {fact.of[::2]: fact.of[1] for fact in listed if fact.name == "link"}
        scene = cls(room)
        for fact in listed:
            match fact.name:
                case "at" | "in" | "on" if fact.of[0] != _PLAYER:
                    scene.things[fact.of[1]].append(fact.of[0])
                case name if name in _STATES:
                    scene.states[fact.of[0]] = name
                case name if name.removesuffix("_of") in _DIRECTIONS and fact.of[1] == room:
                    scene.exits[name.removesuffix("_of")] = (fact.of[0], doors.get((room, fact.of[0])))
        return scene


def told(facts: Iterable[Fact], names: Mapping[str, str]) -> str:
    """The player's surroundings in sentences."""
    scene = _Scene.of(facts)
    seen = [_described(thing, scene, names) for thing in scene.things[scene.room]]
    carried = [names[thing] for thing in scene.things[_INVENTORY]]
    ways = [
        _way(direction, *scene.exits[direction], scene, names) for direction in _DIRECTIONS if direction in scene.exits
    ]
    return (
        f"You are in the {names[scene.room]}. You see: {', '.join(seen) or 'nothing'}. Exits: {', '.join(ways) or 'none'}. "
        f"You carry: {', '.join(carried) or 'nothing'}."
    )


def _described(thing: str, scene: _Scene, names: Mapping[str, str]) -> str:
    state = scene.states.get(thing)
    held = [] if state in ("closed", "locked") else [names[each] for each in scene.things.get(thing, ())]
    details = [*([state] if state else []), *([f"with {' and '.join(held)}"] if held else [])]
    return f"{names[thing]} ({', '.join(details)})" if details else names[thing]


def _way(direction: str, room: str, door: str | None, scene: _Scene, names: Mapping[str, str]) -> str:
    return f"{direction} through the {names[door]} ({scene.states.get(door, 'open')})" if door else direction


def sketched(facts: Iterable[Fact], names: Mapping[str, str]) -> str:
    """The same in few characters, for small models."""
    scene = _Scene.of(facts)
    seen = [_described(thing, scene, names) for thing in scene.things[scene.room]]
    carried = [names[thing] for thing in scene.things[_INVENTORY]]
    return "\n".join(
        filter(None, [f"@{names[scene.room]}", ",".join(seen), f"+{','.join(carried)}" if carried else ""])
    )


def goals_told(facts: Iterable[Fact], names: Mapping[str, str]) -> str:
    """The conditions of a quest, without those about the player and about keys that fit."""
    wanted = [fact for fact in facts if _PLAYER not in fact.of and fact.name != "match"]
    spelled = {_INVENTORY: "you", **names}
    return ", ".join(" ".join([fact.name, *(spelled[each] for each in fact.of)]) for fact in wanted)


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
        """The facts that make the player win."""
        events = [quest.win_events[0] for quest in self.generated.quests if quest.win_events]
        return [fact for event in events for fact in _as_facts(event.condition.preconditions)]


class _Playthrough:
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
        return _as_facts(self._progress.state.facts)

    @property
    def score(self) -> float:
        """The share of the highest score, from 0 to 1."""
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


def _as_facts(propositions: Sequence[Any]) -> list[Fact]:
    return [Fact(each.name, tuple(argument.name for argument in each.arguments)) for each in propositions]


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
        self._live, self._num_moves = _Playthrough(make_game(self._settings, number % 2**31)), 0
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
