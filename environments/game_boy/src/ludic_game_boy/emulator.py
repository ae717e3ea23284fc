"""The emulator: buttons, memory, the screen as text, and saved states of a running cartridge.

A thin layer over PyBoy without a window, sound or wall clock. It knows nothing of any game; addresses and milestones are in
memory_map.py.
"""

import importlib.util
import io
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ludic.types import ConfigError

BUTTONS = ("a", "b", "start", "select", "up", "down", "left", "right")
COLUMNS, ROWS = 20, 18
"""Size of the screen, in tiles."""
_LCDC, _SCY, _SCX, _WY, _WX = 0xFF40, 0xFF42, 0xFF43, 0xFF4A, 0xFF4B
_OAM, _NUM_SPRITES = 0xFE00, 40
_TITLE, _TITLE_END = 0x134, 0x144
_TYPE, _TYPES_WITH_CLOCK = 0x147, (0x0F, 0x10)
_BOOT_FRAMES = 400  # the start-up animation takes about 320


def read_rom(path: str | Path) -> bytes:
    """The bytes of a cartridge file, if it looks like one."""
    try:
        rom = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"Cannot read the ROM {str(path)!r}: {error.strerror}. Ludic ships no games: give the path of a .gb file of "
            "your own, or rom='demo' for the small game that is built in."
        ) from error
    if len(rom) < 0x8000 or len(rom) % 0x4000:
        raise ConfigError(f"{str(path)!r} has {len(rom)} bytes; a Game Boy ROM has 32 KB or more, in banks of 16 KB.")
    return rom


def title_of(rom: bytes) -> str:
    """The title that the cartridge stores."""
    return rom[_TITLE:_TITLE_END].split(b"\0")[0].decode("ascii", "replace").strip()


def require_pyboy() -> None:
    if importlib.util.find_spec("pyboy") is None:
        raise ConfigError("The Game Boy env needs PyBoy, which is not installed: pip install 'pyboy>=2.5'")


class Emulator:
    """One running cartridge. The same presses from the same state always lead to the same state."""

    def __init__(self, rom: bytes) -> None:
        require_pyboy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SDL reports its path, although no window is opened
            from pyboy import PyBoy
        # From memory, not by path: beside a path PyBoy would look for battery saves of earlier games.
        try:
            self._boy: Any = PyBoy(io.BytesIO(rom), window="null", sound_emulated=False, log_level="ERROR")
        except Exception as error:  # PyBoy raises exceptions of many kinds
            raise ConfigError(f"PyBoy cannot run this ROM ({title_of(rom)!r}, {len(rom)} bytes): {error}") from error
        self._boy.set_emulation_speed(0)
        if rom[_TYPE] in _TYPES_WITH_CLOCK:
            self._boy.rtc_lock_experimental(
                True
            )  # it would follow the computer's clock, and episodes would depend on the hour

    def tick(self, frames: int) -> None:
        """Let time pass; a second has 60 frames."""
        self._boy.tick(frames, False, False)

    def press(self, button: str, *, hold_frames: int, settle_frames: int) -> None:
        self._boy.button_press(button)
        self.tick(hold_frames)
        self._boy.button_release(button)
        self.tick(settle_frames)

    def read(self, address: int, length: int = 1) -> bytes:
        """Memory as the processor sees it now."""
        return bytes(self._boy.memory[address : address + length])

    def tiles(self) -> list[list[int]]:
        """The number of the tile at each place of the screen, row by row: background, window before it, scrolled."""
        lcdc, scroll_y, scroll_x = self.read(_LCDC)[0], self.read(_SCY)[0], self.read(_SCX)[0]
        background = self._layer(0x9C00 if lcdc & 0x08 else 0x9800)
        down, right = scroll_y // 8, scroll_x // 8
        screen = [[background[(row + down) % 32][(col + right) % 32] for col in range(COLUMNS)] for row in range(ROWS)]
        if lcdc & 0x20:
            window = self._layer(0x9C00 if lcdc & 0x40 else 0x9800)
            top, left = self.read(_WY)[0] // 8, (self.read(_WX)[0] - 7) // 8
            for row in range(top, ROWS):
                for col in range(max(left, 0), COLUMNS):
                    screen[row][col] = window[row - top][col - left]
        return screen

    def _layer(self, start: int) -> list[bytes]:
        return [self.read(start + 32 * row, 32) for row in range(32)]

    def sprites(self) -> set[tuple[int, int]]:
        """Places of the screen (row, column) on which a moving object's middle lies."""
        if not self.read(_LCDC)[0] & 0x02:
            return set()
        table = self.read(_OAM, 4 * _NUM_SPRITES)
        middles = {((table[i] - 12) // 8, (table[i + 1] - 4) // 8) for i in range(0, len(table), 4)}
        return {(row, col) for row, col in middles if 0 <= row < ROWS and 0 <= col < COLUMNS}

    def save(self) -> bytes:
        """The whole state, for `load` of an emulator with the same cartridge."""
        state = io.BytesIO()
        self._boy.save_state(state)
        return state.getvalue()

    def load(self, state: bytes) -> None:
        try:
            self._boy.load_state(io.BytesIO(state))
        except Exception as error:  # PyBoy raises exceptions of many kinds
            raise ConfigError(
                f"This save state ({len(state)} bytes) cannot be loaded: {error}. It must have been saved by PyBoy, with "
                "the same ROM."
            ) from error

    def close(self) -> None:
        self._boy.stop(save=False)


@lru_cache(maxsize=8)
def booted_state(rom: bytes) -> bytes:
    """The state in which the cartridge's program begins; the same for every episode, so cached."""
    emulator = Emulator(rom)
    emulator.tick(_BOOT_FRAMES)
    state = emulator.save()
    emulator.close()
    return state


# --- actions and the screen as text ---

SPRITE = "@"
"""A moving object: the player, another character, an item."""
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
    """Rows of characters. A tile without a letter is floor if it is in `walkable`, else wall."""
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
