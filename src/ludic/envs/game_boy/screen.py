"""The screen as text: a character per tile where the game's alphabet is known, else two hexadecimal digits."""

from collections.abc import Collection, Mapping, Sequence

SPRITE = "@"
"""A moving object: the player, somebody else, a thing."""
FLOOR, WALL = ".", "#"


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
