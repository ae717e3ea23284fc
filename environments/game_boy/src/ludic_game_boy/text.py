"""Text in and out: the buttons that an action names, and the screen as characters."""

import re
from collections.abc import Collection, Mapping, Sequence

from ludic_game_boy.emulator import BUTTONS

SPRITE = "@"
"""A moving object: the player, another character, a thing."""
FLOOR, WALL = ".", "#"
_WORD = re.compile(r"[^\W\d]+|\d+|[^\s,;.×]")


def read_buttons(action: str, limit: int) -> list[str] | str:
    """The presses of `a`, `up 3`, `up 3 right a`, also with commas, line breaks and × between; or why the text cannot be read."""
    presses: list[str] = []
    previous = ""
    for word in _WORD.findall(action.lower()):
        if word == "x":  # up x3
            continue
        if word in BUTTONS:
            presses.append(word)
        elif word.isdecimal() and previous in BUTTONS:
            count = int(word[:6])
            if count == 0:
                return "A number of presses is at least 1."
            presses += [previous] * min(count - 1, limit + 1)
        else:
            return f"{word!r:.40} is no button. Write one or several of {', '.join(BUTTONS)}, for example: up 3 a"
        if len(presses) > limit:
            return f"That is more than {limit} presses; send at most {limit} at a time."
        previous = word
    return presses or f"No button was named. Write one or several of {', '.join(BUTTONS)}, for example: up 3 a"


def screen_text(
    tiles: Sequence[Sequence[int]],
    letters: Mapping[int, str],
    *,
    sprites: Collection[tuple[int, int]] = (),
    walkable: Collection[int] = (),
) -> str:
    """Rows of characters. A tile that is no letter is floor or wall, as far as `walkable` knows."""
    if not letters:
        return "\n".join(" ".join(f"{tile:02x}" for tile in row) for row in tiles)
    rows = []
    for y, row in enumerate(tiles):
        shown = [
            letters.get(tile) or (SPRITE if (y, x) in sprites else FLOOR if tile in walkable else WALL)
            for x, tile in enumerate(row)
        ]
        rows.append("".join(shown).rstrip())
    return "\n".join(rows).strip("\n")
