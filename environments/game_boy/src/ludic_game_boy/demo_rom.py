"""A small game, assembled here: fetch the key, leave by the door.

For trying and testing the env without a cartridge. It has no title logo, which emulators do not need, and no pictures: the number
of a tile is its ASCII code, so the tile map reads as the room.

Memory: C000 x, C001 y, C002 flags (1 key, 2 out), C003 steps, C004 buttons of the last frame. C100 holds the room, 32
bytes a row, as 9800 does on screen.
"""

import re
from collections import defaultdict
from functools import cache

TITLE = "LUDIC DEMO"
ROOM = """\
############
#@..#.....k#
#.#.#.###.##
#.#...#....#
#.#####.##.#
#.......#..#
#.###.#.#.##
#...#.#....D
############

 FIND THE KEY, THEN
 LEAVE BY THE DOOR.
"""

# fmt: off
_OPCODES = {  # of those of the processor that the program uses; b, w and r stand for a byte, a word and a distance
    "di": "F3", "xor a": "AF", "cpl": "2F", "inc a": "3C", "ret": "C9", "push de": "D5", "pop de": "D1", "push hl": "E5",
    "pop hl": "E1", "inc de": "13", "add hl,de": "19", "inc (hl)": "34", "dec (hl)": "35", "ld a,(hl)": "7E",
    "ld a,(hl+)": "2A", "ld (de),a": "12", "ld a,b": "78", "ld a,c": "79", "ld a,d": "7A", "ld b,a": "47", "ld c,a": "4F",
    "ld d,a": "57", "ld e,a": "5F", "and c": "A1", "jr n": "18 r", "jr nz,n": "20 r", "jr z,n": "28 r", "jr c,n": "38 r",
    "call n": "CD w", "ld a,n": "3E b", "cp n": "FE b", "and n": "E6 b", "sub n": "D6 b", "or n": "F6 b",
    "ld hl,n": "21 w", "ld de,n": "11 w", "ld sp,n": "31 w", "ld a,(n)": "FA w", "ld (n),a": "EA w", "ldh a,(n)": "F0 b",
    "ldh (n),a": "E0 b",
}
# fmt: on

_PROGRAM = """
start: di; ld sp,$FFFE
dark:  ldh a,($44); cp 144; jr c,dark; xor a; ldh ($40),a
       ld hl,room; ld de,$C100
copy:  ld a,(hl+); call put; inc de; ld a,d; cp $C3; jr nz,copy
       ld a,1; ld ($C000),a; ld ($C001),a; xor a; ld ($C002),a; ld ($C003),a; ld ($C004),a
       ld a,$91; ldh ($40),a
frame: ldh a,($44); cp 144; jr nz,frame
       ld a,$20; ldh ($00),a; ldh a,($00); ldh a,($00); cpl; and $0F; ld b,a
       ld a,($C004); cpl; ld c,a; ld a,b; ld ($C004),a; and c; ld b,a
       ld hl,$C000; ld de,1;     ld a,b; and 1; jr nz,right
       ld de,$FFFF;              ld a,b; and 2; jr nz,left
       ld hl,$C001; ld de,$FFE0; ld a,b; and 4; jr nz,left
       ld de,32;                 ld a,b; and 8; jr nz,right
wait:  ldh a,($44); cp 144; jr z,wait; jr frame
right: ld a,1; jr move
left:  ld a,$FF
move:  ld c,a; push hl; call cell; push hl; add hl,de; ld a,(hl); pop de
       cp 35; jr z,stay; cp 68; jr nz,free
       ld a,($C002); and 1; jr z,stay; ld a,($C002); or 2; ld ($C002),a; jr step
free:  cp 107; jr nz,step; ld a,($C002); or 1; ld ($C002),a
step:  ld a,46; call put; push hl; pop de; ld a,64; call put
       ld hl,$C003; inc (hl); pop hl; ld a,c; cp 1; jr z,more; dec (hl); jr wait
more:  inc (hl); jr wait
stay:  pop hl; jr wait
put:   ld (de),a; push de; ld b,a; ld a,d; sub $29; ld d,a; ld a,b; ld (de),a; pop de; ret
cell:  push de; ld hl,$C0E0; ld de,32; ld a,($C001); inc a; ld b,a
rows:  add hl,de; ld a,b; sub 1; ld b,a; jr nz,rows
       ld a,($C000); ld e,a; add hl,de; pop de; ret
"""
_CODE_AT, _ROOM_AT = 0x150, 0x400
_OPERAND = re.compile(r"\$?\w+(?=\)?(,a)?$)")


def _assemble(program: str, labels: dict[str, int]) -> bytes:
    """Machine code; writes down in `labels` where each one is."""
    code = bytearray()
    for line in program.split("\n"):
        name, colon, rest = line.rpartition(":")
        if colon:
            labels[name] = _CODE_AT + len(code)
        for instruction in filter(None, map(str.strip, rest.split(";"))):
            code += _encode(instruction, labels, _CODE_AT + len(code))
    return bytes(code)


def _encode(instruction: str, labels: dict[str, int], here: int) -> bytes:
    if instruction in _OPCODES:
        return bytes.fromhex(_OPCODES[instruction])
    operand = next(_OPERAND.finditer(instruction))[0]
    opcode, kind = _OPCODES["n".join(instruction.rsplit(operand, 1))].split()
    value = labels[operand] if operand.isidentifier() else int(operand.replace("$", "0x"), 0)
    if kind == "r":
        value = (value - here - 2) & 0xFF
    return bytes.fromhex(opcode) + value.to_bytes(2 if kind == "w" else 1, "little")


@cache
def demo_rom() -> bytes:
    """A cartridge of 32 KB."""
    guesses: dict[str, int] = defaultdict(int)
    _assemble(_PROGRAM, guesses)  # once to learn where the labels are, then for good
    code = _assemble(_PROGRAM, {**guesses, "room": _ROOM_AT})
    rom = bytearray(0x8000)
    rom[0x100:0x104] = bytes.fromhex("00 C3 50 01")  # where every cartridge starts: jump to the program
    rom[0x134 : 0x134 + len(TITLE)] = TITLE.encode()
    rom[0x14D] = -sum(byte + 1 for byte in rom[0x134:0x14D]) & 0xFF
    rom[_CODE_AT : _CODE_AT + len(code)] = code
    for number, row in enumerate(ROOM.split("\n")):
        rom[_ROOM_AT + 32 * number : _ROOM_AT + 32 * number + len(row)] = row.encode()
    return bytes(rom)
