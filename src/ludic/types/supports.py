"""Which tokens could have been drawn at each place of a completion, where a sampler ruled some out.

Top-p, top-k and min-p leave a part of the vocabulary and renormalise it. A trainer that wants the probability of a token
under the distribution that it was drawn from needs exactly that part, so it is recorded and travels with the sample.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ludic.types.arrays import TokenArray, TokenIds, token_array

EndArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenSupports:
    """The candidates of each of several tokens, one list after the other."""

    ids: TokenArray
    """The candidates of all tokens."""
    ends: EndArray
    """Where the candidates of each token end in `ids`. A token without any was drawn from the whole vocabulary."""

    def __post_init__(self) -> None:
        ids = token_array(self.ids, "support ids")
        ends = np.array(self.ends, dtype=np.int64)
        if ends.ndim != 1 or (np.diff(ends, prepend=0) < 0).any() or (ends[-1] if len(ends) else 0) != len(ids):
            raise ValueError(
                f"The ends of supports must rise to the {len(ids)} ids that there are; they are {ends[:8]}."
            )
        ends.setflags(write=False)
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "ends", ends)

    @classmethod
    def of(cls, lists: Sequence[TokenIds]) -> "TokenSupports":
        """One list of candidates per token; an empty one is the whole vocabulary."""
        arrays = [token_array(ids, "support ids") for ids in lists]
        ids = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
        return cls(ids, np.cumsum([len(array) for array in arrays], dtype=np.int64))

    @classmethod
    def joined(cls, parts: Iterable["TokenSupports | int"]) -> "TokenSupports":
        """Those of tokens one after the other; a number stands for so many tokens of the whole vocabulary."""
        ids: list[TokenArray] = []
        ends: list[EndArray] = []
        so_far = 0
        for part in parts:
            if isinstance(part, int):
                ends.append(np.full(part, so_far, dtype=np.int64))
                continue
            ids.append(part.ids)
            ends.append(part.ends + so_far)
            so_far += len(part.ids)
        none, never = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
        return cls(np.concatenate([none, *ids]), np.concatenate([never, *ends]))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> TokenArray:
        """The candidates of one token."""
        return self.ids[self.ends[index] - self.lengths[index] : self.ends[index]]

    @property
    def lengths(self) -> EndArray:
        """How many candidates each token had; 0 is the whole vocabulary."""
        return np.diff(self.ends, prepend=0)

    def first(self, count: int) -> "TokenSupports":
        """Those of the first `count` tokens."""
        ends = self.ends[:count]
        return TokenSupports(self.ids[: ends[-1] if len(ends) else 0], ends)

    def first_outside(self, tokens: TokenIds) -> int | None:
        """The first token that is not among its own candidates; None when all are."""
        lengths = self.lengths
        places = np.repeat(np.arange(len(self)), lengths)
        is_found = lengths == 0
        is_found[places[self.ids == np.asarray(tokens)[places]]] = True
        return None if is_found.all() else int(is_found.argmin())

    def to_dict(self) -> dict[str, Any]:
        return {"ids": self.ids.tolist(), "ends": self.ends.tolist()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TokenSupports":
        return cls(data["ids"], data["ends"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSupports):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.ends, other.ends)

    __hash__ = None  # type: ignore[assignment]
