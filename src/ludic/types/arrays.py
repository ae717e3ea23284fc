"""Flat arrays of token ids (int32) and of numbers per token (float32), checked once and read-only; and when numbers are equal."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
"""One number per token: weights, rewards, values, returns."""
LogprobArray: TypeAlias = FloatArray
"""One log-probability per token."""
TurnNumbers: TypeAlias = FloatArray
"""Which turn each token belongs to. Whole numbers, held as float32 like every other number per token."""
TokenIds: TypeAlias = TokenArray | Sequence[int]
"""What a constructor accepts; what it stores is a TokenArray."""

_ROUNDING = 8 * float(np.finfo(np.float32).eps)
"""Relative: a few float32 operations. A reward model or a weight is float32 even where a Python float holds it."""
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)
_NO_TOKENS.setflags(write=False)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array itself if it is read-only, else a read-only copy: the caller may write to its own buffer again."""
    if not array.flags.writeable:
        return array
    copied = array.copy()
    copied.setflags(write=False)
    return copied


def token_array(ids: TokenIds, name: str = "token ids") -> TokenArray:
    """`ids` as int32, or a TypeError that names the field."""
    if type(ids) is np.ndarray and ids.dtype is _INT32 and ids.ndim == 1:
        return _frozen(ids)
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a list or array of int, got {type(ids).__name__}.")
    if len(ids) == 0:
        return _NO_TOKENS
    wide = np.asarray(ids)
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a flat list of int, got elements of dtype {wide.dtype}.")
    narrow = wide.astype(np.int32)
    if (narrow != wide).any():
        raise ValueError(f"{name} contains ids that do not fit 32 bits (max {wide.max()}).")
    narrow.setflags(write=False)
    return narrow


def float_array(values: Sequence[float] | npt.NDArray[Any], name: str = "values") -> FloatArray:
    """`values` as float32, or a TypeError that names the field."""
    if type(values) is np.ndarray and values.dtype is _FLOAT32 and values.ndim == 1:
        return _frozen(values)
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a list or array of numbers, got {type(values).__name__}.")
    wide = np.asarray(values)
    if wide.size and (wide.ndim != 1 or wide.dtype.kind not in "iuf"):
        raise TypeError(f"{name} must be a flat list of numbers, got elements of dtype {wide.dtype}.")
    narrow = wide.astype(np.float32)
    narrow.setflags(write=False)
    return narrow


def rounding_of(values: npt.ArrayLike) -> float:
    """What numbers computed from values of this size can differ by although they are equal."""
    return _ROUNDING * float(np.max(np.abs(values), initial=0.0))


def spread_of(values: npt.ArrayLike, made_of: npt.ArrayLike | None = None) -> float:
    """Population standard deviation, in float64; 0 where it is no more than rounding of the values.

    `made_of`: the numbers that the values are sums or differences of, where those are larger.
    """
    spread = float(np.std(np.asarray(values, dtype=np.float64)))
    return spread if spread > rounding_of(values if made_of is None else made_of) else 0.0
