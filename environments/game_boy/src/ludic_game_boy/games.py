"""The memory maps that are built in.

Pokémon Red's addresses are facts about the game that its players have published, found in the public disassembly of the
`pret` project (wram and event constants) and in the RAM map of the Data Crystal wiki; they hold for the English
version.
"""

from ludic_game_boy.demo_rom import TITLE
from ludic_game_boy.memory_map import Fact, Kind, MemoryMap, Milestone

_UPPER = {0x80 + i: letter for i, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ():;[]")}
_LOWER = {0xA0 + i: letter for i, letter in enumerate("abcdefghijklmnopqrstuvwxyzé")}
_DIGITS = {0xF6 + i: digit for i, digit in enumerate("0123456789")}
_POKEMON_LETTERS = {
    **_UPPER, **_LOWER, **_DIGITS,
    0x7F: " ", 0x79: "+", 0x7A: "-", 0x7B: "+", 0x7C: "|", 0x7D: "+", 0x7E: "+",
    0xBB: "'d", 0xBC: "'l", 0xBD: "'s", 0xBE: "'t", 0xBF: "'v", 0xE0: "'", 0xE1: "Pk", 0xE2: "Mn", 0xE3: "-", 0xE4: "'r",
    0xE5: "'m", 0xE6: "?", 0xE7: "!", 0xE8: ".", 0xEC: "▷", 0xED: "▶", 0xEE: "▼", 0xEF: "♂", 0xF0: "¥", 0xF1: "×",
    0xF2: ".", 0xF3: "/", 0xF4: ",", 0xF5: "♀",
}  # fmt: skip
_EVENTS = 0xD747


def _event(number: int) -> Fact:
    """One of the game's 2,560 event flags."""
    return Fact(address=_EVENTS + number // 8, kind=Kind.BIT, bit=number % 8, shown=False)


def _party() -> dict[str, Fact]:
    """Level, health and full health of the six places; 44 bytes each."""
    facts = {}
    for place in range(6):
        start = 0xD16B + 44 * place
        shown = place == 0
        facts[f"pokemon_{place + 1}_level"] = Fact(address=start + 33, shown=shown)
        facts[f"pokemon_{place + 1}_hp"] = Fact(address=start + 1, length=2, shown=shown)
        facts[f"pokemon_{place + 1}_max_hp"] = Fact(address=start + 34, length=2, shown=shown)
    return facts


POKEMON_RED = MemoryMap(
    name="pokemon_red",
    title="POKEMON RED",
    facts={
        "map": Fact(address=0xD35E),
        "x": Fact(address=0xD362),
        "y": Fact(address=0xD361),
        "badges": Fact(address=0xD356, kind=Kind.BITS),
        "party_size": Fact(address=0xD163),
        **_party(),
        "money": Fact(address=0xD347, length=3, kind=Kind.DECIMAL),
        "pokedex_owned": Fact(address=0xD2F7, length=19, kind=Kind.BITS),
        "pokedex_seen": Fact(address=0xD30A, length=19, kind=Kind.BITS),
        "items": Fact(address=0xD31D),
        "in_battle": Fact(address=0xD057),
        "player": Fact(address=0xD158, length=11, kind=Kind.TEXT),
        "rival": Fact(address=0xD34A, length=11, kind=Kind.TEXT, shown=False),
        "text_box": Fact(address=0xD125, shown=False),
        "map_width": Fact(address=0xD369, shown=False),
        "map_height": Fact(address=0xD368, shown=False),
        "events": Fact(address=_EVENTS, length=320, kind=Kind.BITS, shown=False),
        "followed_oak": _event(0x000),
        "got_starter": _event(0x022),
        "fought_rival": _event(0x023),
        "got_pokedex": _event(0x025),
        "delivered_parcel": _event(0x038),
        "got_parcel": _event(0x039),
        "beat_brock": _event(0x077),
        "hall_of_fame_teams": Fact(address=0xD5A2, shown=False),
    },
    milestones=[
        Milestone(name="followed Oak into the laboratory", fact="followed_oak"),
        Milestone(name="chose a first Pokémon", fact="got_starter"),
        Milestone(name="fought the rival", fact="fought_rival"),
        Milestone(name="picked up the parcel in Viridian City", fact="got_parcel"),
        Milestone(name="brought Oak the parcel", fact="delivered_parcel"),
        Milestone(name="got the Pokédex", fact="got_pokedex"),
        Milestone(name="a second Pokémon", fact="party_size", at_least=2),
        *(Milestone(name=f"badge {n}", fact="badges", at_least=n, reward=2.0) for n in range(1, 9)),
        Milestone(name="entered the Hall of Fame", fact="hall_of_fame_teams", reward=10.0, is_end=True),
    ],
    letters=_POKEMON_LETTERS,
    walkable=0xD530,
    place=("x", "y", "map"),
    hints=(
        "The game is Pokémon Red. On the map a step takes two tiles; your own figure is in the middle of the screen, and "
        "the first press of a direction may only turn it. A closes a text box, B leaves a menu."
    ),
)

DEMO = MemoryMap(
    name="demo",
    title=TITLE,
    facts={
        "x": Fact(address=0xC000),
        "y": Fact(address=0xC001),
        "has_key": Fact(address=0xC002, kind=Kind.BIT),
        "is_out": Fact(address=0xC002, kind=Kind.BIT, bit=1, shown=False),
        "steps": Fact(address=0xC003),
    },
    milestones=[
        Milestone(name="found the key", fact="has_key", reward=0.5),
        Milestone(name="left by the door", fact="is_out", reward=0.5, is_end=True),
    ],
    letters={0: " ", **{code: chr(code) for code in range(32, 127)}},
    place=("x", "y"),
    route=(
        *("right", "right", "down", "down", "right", "right", "up", "up"),
        *("right", "right", "right", "right", "right", "left", "down", "down", "right", "down", "down"),
        *("left", "down", "down", "right", "right"),
    ),
    hints="You are @. Walls are #, the key is k, the door is D; it opens only to who has the key.",
)

UNKNOWN = MemoryMap(name="unknown")
"""For a game without a map: the screen as numbers, no facts and no rewards."""

MAPS = {memory_map.name: memory_map for memory_map in (POKEMON_RED, DEMO)}
