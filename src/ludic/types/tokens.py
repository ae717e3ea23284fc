"""Arrays of token ids (int32) and of numbers per token (float32), candidate sets, and the trace of one model call.

A trace holds exactly the ids that the server saw and sampled. Arrays are checked once and read-only. Prompts of one conversation
share one buffer (`TokenLog`), so that storing every call of an episode takes memory linear in its tokens.
"""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ludic.types.messages import Image, ImageSpan, MessageSpan

TokenArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
"""One number per token: weights, rewards, values, returns."""
LogprobArray: TypeAlias = FloatArray
"""One log-probability per token."""
TurnNumbers: TypeAlias = FloatArray
"""The turn of each token. Whole numbers, held as float32 like every other number per token."""
ExpertArray: TypeAlias = npt.NDArray[np.int16]
"""[tokens, mixture layers, experts per token]: which experts each token was sent to; −1 where that is not known."""
TokenIds: TypeAlias = TokenArray | Sequence[int]
"""Token ids as a constructor accepts them; it stores a TokenArray."""

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
        return _frozen(ids) if ids.flags.writeable else ids
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (list, np.ndarray, Sequence)):
        raise TypeError(f"{name} must be a list or array of int, got {type(ids).__name__}.")
    if len(ids) == 0:
        return _NO_TOKENS
    wide = np.asarray(ids)
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a flat list of int, got elements of dtype {wide.dtype}.")
    narrow = wide.astype(np.int32)
    if np.count_nonzero(narrow != wide):
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


def number_array(
    values: npt.ArrayLike, dtype: npt.DTypeLike, shape: Sequence[str], name: str, num_tokens: int | None = None
) -> npt.NDArray[Any]:
    """`values` as a read-only array of whole numbers [tokens, *shape], -1 where not known, or a ValueError that names the field."""
    wide = np.asarray(values)
    if wide.ndim != 1 + len(shape) or num_tokens not in (None, len(wide)) or wide.dtype.kind not in "iu":
        tokens = "tokens" if num_tokens is None else f"{num_tokens} tokens"
        raise ValueError(
            f"{name} must be whole numbers [{', '.join([tokens, *shape])}]; they are {wide.dtype} {wide.shape}."
        )
    largest = np.iinfo(np.dtype(dtype)).max
    if wide.size and (wide.min() < -1 or wide.max() > largest):
        raise ValueError(f"{name} go from {wide.min()} to {wide.max()}; there are -1 (not known) to {largest}.")
    return _frozen(wide.astype(dtype, copy=False))


def _experts_to_dict(experts: ExpertArray) -> dict[str, Any]:
    """JSON form of experts; a list would take several times the space."""
    data = base64.b64encode(zlib.compress(experts.astype("<i2").tobytes())).decode()
    return {"shape": list(experts.shape), "int16_zlib_base64": data}


def _experts_from_dict(data: Mapping[str, Any]) -> ExpertArray:
    flat = np.frombuffer(zlib.decompress(base64.b64decode(data["int16_zlib_base64"])), dtype="<i2")
    return flat.reshape(data["shape"]).astype(np.int16)


def rounding_of(values: npt.ArrayLike) -> float:
    """The rounding error of numbers computed from values of this size."""
    return _ROUNDING * float(np.max(np.abs(values), initial=0.0))


def spread_of(values: npt.ArrayLike, made_of: npt.ArrayLike | None = None) -> float:
    """Population standard deviation, in float64; 0 if it is within the rounding error of the values.

    `made_of`: the numbers that the values are sums or differences of, where those are larger.
    """
    spread = float(np.std(np.asarray(values, dtype=np.float64)))
    return spread if spread > rounding_of(values if made_of is None else made_of) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CandidateSets:
    """The tokens that each token of a completion was drawn from, where the sampler ruled some out.

    Top-p, top-k and min-p keep a part of the vocabulary and renormalise it. A trainer needs exactly that part to compute the
    probability of a token under the distribution that it was drawn from.
    """

    ids: TokenArray
    """The candidates of all tokens, concatenated."""
    ends: npt.NDArray[np.int64]
    """End of each token's candidates in `ids`. A token without any was drawn from the whole vocabulary."""

    def __post_init__(self) -> None:
        ids = token_array(self.ids, "candidate ids")
        ends = np.array(self.ends, dtype=np.int64)
        if ends.ndim != 1 or (np.diff(ends, prepend=0) < 0).any() or (ends[-1] if len(ends) else 0) != len(ids):
            raise ValueError(
                f"The ends of candidates must rise to the {len(ids)} ids that there are; they are {ends[:8]}."
            )
        ends.setflags(write=False)
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "ends", ends)

    @classmethod
    def of(cls, lists: Sequence[TokenIds]) -> "CandidateSets":
        """One list of candidates per token; an empty one is the whole vocabulary."""
        arrays = [token_array(ids, "candidate ids") for ids in lists]
        ids = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
        return cls(ids, np.cumsum([len(array) for array in arrays], dtype=np.int64))

    @classmethod
    def joined(cls, parts: Iterable["CandidateSets | int"]) -> "CandidateSets":
        """Candidate sets of consecutive tokens; a number n stands for n tokens drawn from the whole vocabulary."""
        ids: list[TokenArray] = []
        ends: list[npt.NDArray[np.int64]] = []
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
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of candidates of each token; 0 is the whole vocabulary."""
        return np.diff(self.ends, prepend=0)

    def only(self, kept: npt.NDArray[np.bool_]) -> "CandidateSets":
        """The candidates of the kept tokens."""
        lengths = self.lengths
        return CandidateSets(self.ids[np.repeat(kept, lengths)], np.cumsum(lengths[kept], dtype=np.int64))

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
    def from_dict(cls, data: dict[str, Any]) -> "CandidateSets":
        return cls(data["ids"], data["ends"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CandidateSets):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.ends, other.ends)

    __hash__ = None  # type: ignore[assignment]


class TokenLog:
    """An append-only token buffer whose prefixes can be kept without copying them."""

    __slots__ = ("_buffer", "_shown", "_size")

    def __init__(self, ids: TokenIds = ()) -> None:
        self._size = 0
        self._allocate(max(64, 2 * len(ids)))
        self.append(ids)

    def __len__(self) -> int:
        return self._size

    def append(self, ids: TokenIds) -> None:
        new = ids if type(ids) is np.ndarray and ids.dtype is _INT32 else token_array(ids)
        start, buffer = self._size, self._buffer
        end = start + len(new)
        if end > len(buffer):
            # Doubling: the buffers that earlier views keep alive add up to less than the newest one.
            self._allocate(2 * end)
            self._buffer[:start] = buffer[:start]
        self._buffer[start:end] = new
        self._size = end

    def view(self) -> TokenArray:
        """Everything so far, read-only; later appends do not show in it."""
        return self._shown[: self._size]

    def _allocate(self, capacity: int) -> None:
        self._buffer = np.empty(capacity, dtype=np.int32)
        self._shown = self._buffer.view()
        self._shown.setflags(write=False)


class VersionRun(NamedTuple):
    """`length` consecutive completion tokens that policy `version` sampled."""

    version: int
    length: int


@dataclass(frozen=True, init=False, slots=True, eq=False)
class TokenTrace:
    """One model call in token space. Token arrays are stored only here (step `info` is plain JSON)."""

    prompt_token_ids: TokenArray
    """Exactly the tokens the server saw; never re-tokenised from text."""
    completion_token_ids: TokenArray
    """Exactly the tokens it sampled, the end-of-turn token included if it sampled one."""
    completion_logprobs: LogprobArray | None = None
    """Log-probability of each completion token under the distribution it was sampled from."""
    finish_reason: str | None = None
    """Why the model stopped: "stop", "length", …"""
    version_runs: tuple[VersionRun, ...] = ()
    """The policy version of each part of the completion; empty if the client does not report it."""
    temperature: float | None = None
    """Sampling temperature, so that a trainer can compute log-probs of the same distribution."""
    candidates: CandidateSets | None = None
    """The candidates of each completion token, if the sampler ruled tokens out and reports which."""
    untrainable_sampling: str | None = None
    """Settings that shaped the distribution and that a trainer cannot reproduce from this trace, such as "top_p=0.9"."""
    images: tuple[ImageSpan, ...] = ()
    """The pictures of the prompt, in order, and the tokens that stand for them."""
    experts: ExpertArray | None = None
    """Experts of a mixture for each token of prompt and completion, if the server records them."""
    message_spans: tuple[MessageSpan, ...] = ()
    """The message that each token of the prompt came from; empty if the request did not ask for it."""

    def __init__(
        self,
        prompt_token_ids: TokenIds,
        completion_token_ids: TokenIds,
        completion_logprobs: Sequence[float] | npt.NDArray[Any] | None = None,
        finish_reason: str | None = None,
        version_runs: Sequence[tuple[int, int]] = (),
        temperature: float | None = None,
        candidates: CandidateSets | None = None,
        untrainable_sampling: str | None = None,
        images: Sequence[ImageSpan] = (),
        experts: npt.ArrayLike | None = None,
        message_spans: Sequence[tuple[int, str, int, int, int, int]] = (),
    ) -> None:
        prompt = token_array(prompt_token_ids, "prompt_token_ids")
        completion = token_array(completion_token_ids, "completion_token_ids")
        num_tokens = len(completion)
        if completion_logprobs is not None:
            completion_logprobs = float_array(completion_logprobs, "completion_logprobs")
            if len(completion_logprobs) != num_tokens:
                raise ValueError(
                    f"TokenTrace has {num_tokens} completion tokens but {len(completion_logprobs)} "
                    "logprobs; ask the client for log-probs of the sampled tokens only."
                )
        if candidates is not None and len(candidates) != num_tokens:
            raise ValueError(f"TokenTrace has {num_tokens} completion tokens but {len(candidates)} candidate sets.")
        put = object.__setattr__
        put(self, "prompt_token_ids", prompt)
        put(self, "completion_token_ids", completion)
        put(self, "completion_logprobs", completion_logprobs)
        put(self, "finish_reason", finish_reason)
        put(self, "version_runs", _checked_runs(version_runs, num_tokens) if version_runs else ())
        put(self, "temperature", temperature)
        put(self, "candidates", candidates)
        put(self, "untrainable_sampling", untrainable_sampling)
        put(self, "images", tuple(images) if images else ())
        put(self, "experts", None if experts is None else _expert_array(experts, len(prompt) + num_tokens))
        put(self, "message_spans", _checked_spans(message_spans, len(prompt)) if message_spans else ())

    @property
    def policy_version(self) -> int | None:
        """The oldest version that sampled a part of this completion; staleness is measured from it."""
        return min((run.version for run in self.version_runs), default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with fields from `candidates` on only if they are set. A picture is named by its hash: its bytes are in the
        prompt's messages."""
        data = {
            "prompt_token_ids": self.prompt_token_ids.tolist(),
            "completion_token_ids": self.completion_token_ids.tolist(),
            "completion_logprobs": None if self.completion_logprobs is None else self.completion_logprobs.tolist(),
            "finish_reason": self.finish_reason,
            "version_runs": [list(run) for run in self.version_runs],
            "temperature": self.temperature,
        }
        if self.candidates is not None:
            data["candidates"] = self.candidates.to_dict()
        if self.untrainable_sampling is not None:
            data["untrainable_sampling"] = self.untrainable_sampling
        if self.images:
            data["images"] = [[span.image.sha256, span.start, span.length] for span in self.images]
        if self.experts is not None:
            data["experts"] = _experts_to_dict(self.experts)
        if self.message_spans:
            data["message_spans"] = [list(span) for span in self.message_spans]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any], images: Iterable[Image] = ()) -> "TokenTrace":
        """`images`: the pictures of the prompt's messages."""
        missing = [key for key in ("prompt_token_ids", "completion_token_ids") if key not in data]
        if missing:
            raise ValueError(f"A token trace needs {' and '.join(missing)}; it has only {sorted(data)}.")
        return cls(
            prompt_token_ids=data["prompt_token_ids"],
            completion_token_ids=data["completion_token_ids"],
            completion_logprobs=data.get("completion_logprobs"),
            finish_reason=data.get("finish_reason"),
            version_runs=data.get("version_runs") or (),
            temperature=data.get("temperature"),
            candidates=None if data.get("candidates") is None else CandidateSets.from_dict(data["candidates"]),
            untrainable_sampling=data.get("untrainable_sampling"),
            images=_placed(data["images"], images) if data.get("images") else (),
            experts=None if data.get("experts") is None else _experts_from_dict(data["experts"]),
            message_spans=data.get("message_spans") or (),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTrace):
            return NotImplemented
        return all(_are_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(TokenTrace))

    __hash__ = None  # type: ignore[assignment]


def _are_equal(a: Any, b: Any) -> bool:
    """True if two fields hold the same; NaN equals itself."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return a is b or (not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and bool(a == b))
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _placed(stored: Sequence[Sequence[Any]], images: Iterable[Image]) -> list[ImageSpan]:
    by_hash = {image.sha256: image for image in images}
    missing = [name for name, *_ in stored if name not in by_hash]
    if missing:
        raise ValueError(f"A token trace names the picture {missing[0]!r:.80}, which its messages do not hold.")
    return [ImageSpan(by_hash[name], int(start), int(length)) for name, start, length in stored]


def _checked_runs(runs: Sequence[tuple[int, int]], num_tokens: int) -> tuple[VersionRun, ...]:
    first = runs[0]
    if len(runs) == 1 and type(first) is VersionRun and first.length == num_tokens:  # one version: the usual case
        return runs if type(runs) is tuple else (first,)
    checked = tuple(VersionRun(int(version), int(length)) for version, length in runs)
    if sum(run.length for run in checked) != num_tokens:
        raise ValueError(
            f"version_runs {[tuple(run) for run in checked]} cover {sum(run.length for run in checked)} tokens, "
            f"but the completion has {num_tokens}."
        )
    return checked


def _expert_array(experts: npt.ArrayLike, num_tokens: int) -> ExpertArray:
    return number_array(experts, np.int16, ("layers", "experts per token"), "experts", num_tokens)


def _checked_spans(spans: Sequence[tuple[int, str, int, int, int, int]], num_tokens: int) -> tuple[MessageSpan, ...]:
    checked = tuple(MessageSpan(*span) for span in spans)
    starts, ends = [0, *(span.end for span in checked)], [*(span.start for span in checked), num_tokens]
    if starts != ends:
        raise ValueError(f"message_spans {[tuple(s) for s in checked[:8]]} do not cover {num_tokens} tokens once each.")
    return checked
