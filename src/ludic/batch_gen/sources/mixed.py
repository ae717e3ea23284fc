"""Sources that combine batches: `MixedBatchSource` mixes several sources, `ReplayBatchSource` mixes in earlier samples.

A mixed batch holds one whole batch of the first source, so that its fresh samples are trained on at once. Every other source
contributes its share of samples, counted over the whole run: if a ratio such as 8 to 3 does not divide evenly, some batches
have one sample more. Surplus samples of these sources wait for the next batch.

The replay buffer stores a sample unchanged, with the log-probs of the policy that sampled it and its original weight, so ratios
and corrections work as on any stale sample. It drops samples that are more than `max_lag` versions behind, and the oldest ones
when it is full.
"""

import base64
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from ludic.plugins import find
from ludic.types import (
    AccountsForItems,
    ActorTokenLogps,
    BatchSource,
    CandidateSets,
    ConfigError,
    Image,
    ImageSpan,
    MessageSpan,
    RequestsExhausted,
    SampleAttachments,
    SampleOrigin,
    SAWBatch,
    SAWItem,
    StopReason,
    VersionRun,
    derive_seed,
)
from ludic.types.interfaces import load_into, state_of, tell_version

_MARK = b"LITM"
_SIZE = 4
"""Bytes of the mark that each stored sample begins with."""
_RECORDS = {
    kind.__name__: kind
    for kind in (SAWItem, SampleAttachments, SampleOrigin, ActorTokenLogps, CandidateSets, ImageSpan, Image)
}
_TUPLES: dict[str, Callable[..., Any]] = {
    "VersionRun": VersionRun,
    "MessageSpan": MessageSpan,
    "tuple": lambda *values: values,
}
_KIND = ""
"""Key of what a map stands for."""


def item_as_text(item: SAWItem) -> str:
    try:
        return base64.b64encode(_MARK + msgspec.msgpack.encode(_plain(item), enc_hook=_plain_value)).decode("ascii")
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"A sample cannot be kept in a checkpoint: {error}. Its meta holds None, flags, numbers, texts, lists and maps."
        ) from error


def item_of_text(text: str) -> SAWItem:
    data = base64.b64decode(text)
    if data[:_SIZE] != _MARK:
        return _of_other_form(data)
    made: SAWItem = _made(msgspec.msgpack.decode(data[_SIZE:]))
    return made


def _of_other_form(data: bytes) -> SAWItem:
    form = data[:_SIZE].decode("ascii", "replace")
    reader = find("stored_items", form)
    if reader is None:
        raise ConfigError(f"A stored sample has the form {form!r}, which no installed package reads.")
    (item,) = reader.load()(data)
    found: SAWItem = item
    return found


def _plain(value: Any) -> Any:
    """The value as msgpack holds it, with its kind where it is no number or text."""
    if isinstance(value, np.ndarray):
        raw = np.packbits(value) if value.dtype == np.bool_ else np.ascontiguousarray(value)
        return {_KIND: "array", "type": value.dtype.str, "shape": value.shape, "data": raw.tobytes()}
    if is_dataclass(value):
        own = {field.name: getattr(value, field.name) for field in fields(value) if not _is_usual(value, field)}
        return {_KIND: type(value).__name__, **{name: _plain(inner) for name, inner in own.items()}}
    if isinstance(value, tuple):
        return {_KIND: type(value).__name__, "values": [_plain(inner) for inner in value]}
    if isinstance(value, Mapping):
        return {_KIND: "map", "value": dict(value)}
    return {_KIND: "stop", "value": value.value} if isinstance(value, StopReason) else value


def _is_usual(record: Any, field: Any) -> bool:
    """True if a field is left out: it has its default, or is the mask of a sample in which every token counts."""
    value = getattr(record, field.name)
    if field.name == "attention_mask":
        return bool(value.all())
    return field.default is not MISSING and type(value) is type(field.default) and bool(value == field.default)


def _plain_value(value: Any) -> Any:
    """A value inside meta that msgpack does not know."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"it holds a {type(value).__name__}")


def _made(value: Any) -> Any:
    """Inverse of `_plain`."""
    if not isinstance(value, dict):
        return value
    kind = value.pop(_KIND)
    if kind == "array":
        return _array(value["type"], value["shape"], value["data"])
    if kind in _TUPLES:
        return _TUPLES[kind](*map(_made, value["values"]))
    if kind in ("map", "stop"):
        return StopReason(value["value"]) if kind == "stop" else value["value"]
    if kind == "SAWItem":
        value.setdefault("attention_mask", None)
    return _RECORDS[kind](**{name: _made(inner) for name, inner in value.items()})


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    if np.dtype(dtype) != np.bool_:
        return np.frombuffer(data, dtype).reshape(shape)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=int(np.prod(shape)))
    return bits.astype(np.bool_).reshape(shape)


_MAX_EMPTY = 16
"""Empty batches in a row after which a source counts as exhausted."""


class _StoredItem:
    """A sample and its encoded text in a checkpoint.

    The trainer asks for the state at every step, so each sample is encoded once and cached.
    """

    def __init__(self, item: SAWItem, text: str | None = None) -> None:
        self.item = item
        self._text = text

    @classmethod
    def read(cls, text: str) -> "_StoredItem":
        return cls(item_of_text(text), text)

    @property
    def text(self) -> str:
        if self._text is None:
            self._text = item_as_text(self.item)
        return self._text


def _refuse_accounts(who: str, source: BatchSource) -> None:
    """Raise ConfigError if `source` needs to know which of its samples were trained on; a wrapper cannot report that."""
    if isinstance(source, AccountsForItems):
        raise ConfigError(
            f"{who} was given a {type(source).__name__}, which must know which of its samples were trained on; {who} mixes, "
            "delays or repeats samples and cannot report that. Give the source to the Trainer directly."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPart:
    """One source of a mixture."""

    name: str
    """Prefix of its logged metrics."""
    source: BatchSource
    share: float
    """Relative number of its samples, compared with the shares of the other parts."""
    objective: str | None = None
    """Objective tag of its samples (see mix_objectives); None keeps their tags."""

    def __post_init__(self) -> None:
        if not (self.share > 0 and math.isfinite(self.share)):
            raise ConfigError(
                f"MixedPart {self.name!r} has share={self.share}; it must be above 0. To disable a part, leave it out."
            )
        _refuse_accounts("MixedBatchSource", self.source)


class MixedBatchSource:
    """Whole batches of the first part, plus the share of samples of every other part."""

    def __init__(self, parts: Sequence[MixedPart]) -> None:
        names = [part.name for part in parts]
        if not parts or len(set(names)) != len(names):
            raise ConfigError(f"MixedBatchSource has the parts {names}; it needs at least one, with different names.")
        self._lead, *self._others = parts
        self._num_lead = 0
        """Samples of the first part so far."""
        self._num_given = {part.name: 0 for part in self._others}
        self._waiting: dict[str, deque[_StoredItem]] = {part.name: deque() for part in self._others}

    async def next_batch(self) -> SAWBatch:
        batch = await self._lead.source.next_batch()
        taken = {self._lead.name: _tagged(batch.items, self._lead)}
        self._num_lead += len(batch.items)
        for part in self._others:
            taken[part.name] = _tagged(await self._take(part, self._num_due(part)), part)
        counts = {f"{name}/num_mixed": len(items) for name, items in taken.items()}
        meta = {**batch.meta, "source": "mixed", **counts}
        return SAWBatch(items=[item for items in taken.values() for item in items], meta=meta)

    get_next_batch = next_batch

    def notify_version(self, version: int) -> None:
        for part in (self._lead, *self._others):
            tell_version(part.source, version)

    def _num_due(self, part: MixedPart) -> int:
        # 1e-9 corrects shares such as 0.3 / 0.1, whose quotient is just below 3.
        wanted = math.floor(self._num_lead * part.share / self._lead.share + 1e-9)
        return wanted - self._num_given[part.name]

    async def _take(self, part: MixedPart, count: int) -> list[SAWItem]:
        waiting = self._waiting[part.name]
        num_empty = 0
        while len(waiting) < count:
            brought = (await part.source.next_batch()).items
            waiting += map(_StoredItem, brought)
            num_empty = 0 if brought else num_empty + 1
            if num_empty == _MAX_EMPTY:
                raise RequestsExhausted(f"The part {part.name!r} gave {_MAX_EMPTY} batches in a row without a sample.")
        self._num_given[part.name] += count
        return [waiting.popleft().item for _ in range(count)]

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """Call it between batches. It includes the waiting samples, less than one batch of each part."""
        return {
            "num_lead": self._num_lead,
            "num_given": dict(self._num_given),
            "waiting": {name: [stored.text for stored in waiting] for name, waiting in self._waiting.items()},
            "sources": {part.name: state_of(part.source) for part in (self._lead, *self._others)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = {part.name for part in (self._lead, *self._others)}
        if names != state["sources"].keys():
            raise ConfigError(
                f"The saved mixture has the parts {sorted(state['sources'])}, this one {sorted(names)}. Resume with the parts "
                "that the run was started with."
            )
        self._num_lead, self._num_given = state["num_lead"], dict(state["num_given"])
        self._waiting = {name: deque(map(_StoredItem.read, texts)) for name, texts in state["waiting"].items()}
        for part in (self._lead, *self._others):
            load_into(part.source, state["sources"][part.name])


def _tagged(items: Sequence[SAWItem], part: MixedPart) -> list[SAWItem]:
    return list(items) if part.objective is None else [item.with_origin(objective=part.objective) for item in items]


# --- replay ---


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    stored: _StoredItem
    version: int
    """The oldest policy version of its tokens; if the sample names none, the trainer's version when it was added."""


class ReplayBatchSource:
    """Batches of `source`, each with `num_replayed` samples of earlier ones.

    `capacity` counts samples. `half_life` makes newer samples more likely: a sample that many versions older is half as likely;
    None draws uniformly. With `fresh_every=4`, three replay-only batches follow each fresh one.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        capacity: int,
        num_replayed: int,
        max_lag: int | None = None,
        half_life: float | None = None,
        fresh_every: int = 1,
        seed: int = 0,
    ) -> None:
        if capacity < 1 or num_replayed < 1 or fresh_every < 1:
            raise ConfigError(
                f"capacity={capacity}, num_replayed={num_replayed}, fresh_every={fresh_every}; each must be at least 1."
            )
        if max_lag is not None and max_lag < 0:
            raise ConfigError(f"max_lag={max_lag}; it must be 0 or more, or None for no limit.")
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life={half_life}; it must be above 0, or None to draw uniformly.")
        _refuse_accounts("ReplayBatchSource", source)
        self._source = source
        self._capacity, self._num_replayed, self._fresh_every = capacity, num_replayed, fresh_every
        self._max_lag, self._half_life = max_lag, half_life
        self._seed = seed
        self._version = 0
        self._num_batches = 0
        self._kept: deque[_Kept] = deque()

    def __len__(self) -> int:
        """Samples in the buffer."""
        return len(self._kept)

    async def next_batch(self) -> SAWBatch:
        num_expired = self._drop_expired()
        is_fresh_due = self._num_batches % self._fresh_every == 0
        fresh = await self._source.next_batch() if is_fresh_due or not self._kept else SAWBatch(items=[])
        drawn = self._draw()
        self._keep(fresh.items)
        self._num_batches += 1
        counts = {"num_replayed": len(drawn), "num_kept": len(self._kept), "num_expired": num_expired}
        numbers: dict[str, float] = dict(counts)
        if drawn:
            numbers["replay_lag_mean"] = fmean(self._lag(kept) for kept in drawn)
        meta = {**fresh.meta, "source": "replay", **numbers}
        return SAWBatch(items=[*fresh.items, *(_replayed(kept.stored.item) for kept in drawn)], meta=meta)

    get_next_batch = next_batch

    def notify_version(self, version: int) -> None:
        """Set the version of the policy that is trained next."""
        self._version = version
        tell_version(self._source, version)

    # --- the buffer ---

    def _lag(self, kept: _Kept) -> int:
        return self._version - kept.version

    def _drop_expired(self) -> int:
        """Drop samples that are too old and return their number."""
        num_before = len(self._kept)
        if self._max_lag is not None:
            self._kept = deque(kept for kept in self._kept if self._lag(kept) <= self._max_lag)
        return num_before - len(self._kept)

    def _keep(self, items: Sequence[SAWItem]) -> None:
        for item in items:
            version = self._version if item.oldest_version is None else item.oldest_version
            self._kept.append(_Kept(stored=_StoredItem(item), version=version))
        while len(self._kept) > self._capacity:
            self._kept.popleft()

    def _draw(self) -> list[_Kept]:
        """Draw without replacement. The seed depends on the batch number, so a resumed run draws the same."""
        rng = random.Random(derive_seed(self._seed, self._num_batches))
        # Gumbel top-k: the k largest values of log-weight plus noise are a weighted draw, and no weight underflows.
        keyed = [(self._log_weight(kept) - math.log(rng.expovariate(1.0)), kept) for kept in self._kept]
        keyed.sort(key=lambda pair: -pair[0])
        return [kept for _, kept in keyed[: self._num_replayed]]

    def _log_weight(self, kept: _Kept) -> float:
        return 0.0 if self._half_life is None else -math.log(2) * self._lag(kept) / self._half_life

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """Call it between batches. It includes the samples of the buffer, at most `capacity`."""
        return {
            "version": self._version,
            "num_batches": self._num_batches,
            "kept": [[kept.version, kept.stored.text] for kept in self._kept],
            "source": state_of(self._source),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._version, self._num_batches = state["version"], state["num_batches"]
        kept = [_Kept(stored=_StoredItem.read(text), version=version) for version, text in state["kept"]]
        self._kept = deque(kept[-self._capacity :])
        load_into(self._source, state["source"])


def _replayed(item: SAWItem) -> SAWItem:
    """Its siblings are not all here: filters that compare a group's members must not take some for the whole."""
    return item.with_origin(group_id=None, is_replayed=True)
