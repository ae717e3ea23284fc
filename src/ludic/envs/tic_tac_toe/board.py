"""The rules of tic-tac-toe, as pure functions on a board of nine characters.

Cells count 0 … 8, row by row; each holds "X", "O" or "." (free). There are only some thousand positions, so everything is cached
without a limit; the mark is an argument and so part of the cache key. `position` gathers all facts for the envs, whose speed the
orchestration benchmark needs.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal, TypeAlias

Mark: TypeAlias = Literal["X", "O"]
Result: TypeAlias = Literal["win", "loss", "draw"]
View: TypeAlias = Literal["text", "compact"]
"""Format of the board: drawn, or in the words of `compact`."""

FREE: Final = "."
EMPTY: Final = FREE * 9
MARKS: Final[tuple[Mark, Mark]] = ("X", "O")
OTHER: Final[dict[Mark, Mark]] = {"X": "O", "O": "X"}
CELLS: Final = tuple(row + column for row in "ABC" for column in "123")
CELL_OF: Final = {name: cell for cell, name in enumerate(CELLS)}
NOTATION: Final = (
    "The rows are A, B and C from top to bottom, the columns 1, 2 and 3 from left to right. "
    "A move is a row letter and a column digit: A1 is the top left cell, B2 the centre, C3 the bottom right. "
    "Free cells are shown in brackets. Three marks in a row, a column or a diagonal win. "
    "Only a free cell may be chosen; any other move ends the game at once."
)
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def place(board: str, cell: int, mark: Mark) -> str:
    return board[:cell] + mark + board[cell + 1 :]


def read_move(action: str) -> int | None:
    """The cell that a text names, free or not; None when it names none."""
    return CELL_OF.get(action.strip().upper())


def refusal(board: str, action: str, cell: int | None) -> str:
    """Why a move is not legal, and the legal ones. `cell` is the result of `read_move`."""
    reason = f"{action!r:.40} is not a cell" if cell is None else f"{CELLS[cell]} is taken"
    return f"Illegal move: {reason}. Free were {', '.join(free_moves(board))}."


@cache
def free_cells(board: str) -> tuple[int, ...]:
    return tuple(cell for cell in range(9) if board[cell] == FREE)


@cache
def free_moves(board: str) -> tuple[str, ...]:
    """Names of the free cells, sorted."""
    return tuple(CELLS[cell] for cell in free_cells(board))


@cache
def winner(board: str) -> Mark | None:
    for a, b, c in _LINES:
        if board[a] == board[b] == board[c] != FREE:
            return "X" if board[a] == "X" else "O"
    return None


@cache
def result_for(board: str, mark: Mark) -> Result | None:
    """Result of the game for this mark; None before its end."""
    if won := winner(board):
        return "win" if won == mark else "loss"
    return None if FREE in board else "draw"


@cache
def render(board: str) -> str:
    def shown(cell: int) -> str:
        return f"[{CELLS[cell]}]" if board[cell] == FREE else f" {board[cell]}  "

    rows = [
        f"{name} {' '.join(shown(cell) for cell in range(start, start + 3))}"
        for name, start in zip("ABC", (0, 3, 6), strict=True)
    ]
    return "\n".join(["   1    2    3", *(row.rstrip() for row in rows)])


def compact(board: str) -> str:
    """Nine words, one per cell: its name while it is free, then its name and its mark."""
    return " ".join(CELLS[cell] if mark == FREE else f"{CELLS[cell]}={mark}" for cell, mark in enumerate(board))


COMPACT_WORDS = ("X", "O", *CELLS, *(f"{cell}={mark}" for cell in CELLS for mark in "XO"))
"""Every word of the compact view: the vocabulary of a small model. Each word names its cell and who holds it, so a model need not
count positions."""


# --- perfect play ---


@cache
def _score(board: str, to_move: Mark) -> int:
    """Positive when `to_move` wins under perfect play, more so the sooner; negative when it loses; 0 is a draw."""
    if won := winner(board):
        speed = 1 + len(free_cells(board))
        return speed if won == to_move else -speed
    return max((-_score(place(board, cell, to_move), OTHER[to_move]) for cell in free_cells(board)), default=0)


def _sign(score: int) -> int:
    return (score > 0) - (score < 0)


@cache
def value(board: str, to_move: Mark) -> int:
    """The result of perfect play for the mark to move: 1 win, 0 draw, −1 loss."""
    return _sign(_score(board, to_move))


def _move_scores(board: str, mark: Mark) -> dict[int, int]:
    return {cell: -_score(place(board, cell, mark), OTHER[mark]) for cell in free_cells(board)}


@cache
def optimal_moves(board: str, to_move: Mark) -> tuple[int, ...]:
    """Every cell that keeps the value of the position."""
    scores, worth = _move_scores(board, to_move), value(board, to_move)
    return tuple(cell for cell, score in scores.items() if _sign(score) == worth)


@cache
def best_moves(board: str, to_move: Mark) -> tuple[int, ...]:
    """The optimal moves that win soonest or lose latest."""
    scores = _move_scores(board, to_move)
    return tuple(cell for cell, score in scores.items() if score == max(scores.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A board with a mark to move, and what a turn needs."""

    board: str
    moves: tuple[int, ...]
    """The legal moves, sorted; empty when the game is over, as are the others."""
    optimal: tuple[int, ...]
    """See `optimal_moves`."""
    best: tuple[int, ...]
    """See `best_moves`."""
    after: dict[int, "Position"] = field(repr=False)
    """The board after each legal move."""


@cache
def position(board: str, to_move: Mark) -> Position:
    if result_for(board, to_move) is not None:
        return Position(board, (), (), (), {})
    moves = free_cells(board)
    after = {cell: position(place(board, cell, to_move), OTHER[to_move]) for cell in moves}
    return Position(board, moves, optimal_moves(board, to_move), best_moves(board, to_move), after)
