"""What a player of a TextWorld game sees, written from the facts of its state.

TextWorld itself lets Inform 7 write the text, which needs a compiler and an interpreter for one kind of machine. The facts are the
same everywhere: `at(o_0, r_0)` says that an object is in a room, `in(k_0, c_0)` that it is in a container, `open(c_0)`, and so on.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_PLAYER, _INVENTORY = "P", "I"
_STATES = ("open", "closed", "locked", "eaten")
_DIRECTIONS = ("north", "east", "south", "west")


@dataclass(frozen=True, slots=True)
class Fact:
    """A predicate over ids of rooms and things."""

    name: str
    of: tuple[str, ...]


@dataclass(slots=True)
class Scene:
    """Facts sorted by what the narrator asks of them."""

    room: str = ""
    things: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Place (room, container, supporter or inventory) -> what is there."""
    states: dict[str, str] = field(default_factory=dict)
    """Container or door -> open, closed or locked."""
    exits: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Direction -> (room, door)."""

    @classmethod
    def of(cls, facts: Iterable[Fact]) -> "Scene":
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
    scene = Scene.of(facts)
    seen = [_described(thing, scene, names) for thing in scene.things[scene.room]]
    carried = [names[thing] for thing in scene.things[_INVENTORY]]
    ways = [
        _way(direction, *scene.exits[direction], scene, names) for direction in _DIRECTIONS if direction in scene.exits
    ]
    return (
        f"You are in the {names[scene.room]}. You see: {', '.join(seen) or 'nothing'}. Exits: {', '.join(ways) or 'none'}. "
        f"You carry: {', '.join(carried) or 'nothing'}."
    )


def _described(thing: str, scene: Scene, names: Mapping[str, str]) -> str:
    state = scene.states.get(thing)
    held = [] if state in ("closed", "locked") else [names[each] for each in scene.things.get(thing, ())]
    details = [*([state] if state else []), *([f"with {' and '.join(held)}"] if held else [])]
    return f"{names[thing]} ({', '.join(details)})" if details else names[thing]


def _way(direction: str, room: str, door: str | None, scene: Scene, names: Mapping[str, str]) -> str:
    return f"{direction} through the {names[door]} ({scene.states.get(door, 'open')})" if door else direction


def sketched(facts: Iterable[Fact], names: Mapping[str, str]) -> str:
    """The same in few characters, for small models."""
    scene = Scene.of(facts)
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
