"""The trainer's records (`ludic.training.learner.token_recorder`), of which no more is read than a question needs.

A record is checked before memory is taken for it: its members are plain copies of columns, as `numpy.savez` stores them, and what
its columns say about each other holds.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SAMPLES = {"rollout_id": "S", "segment": "i", "num_tokens": "i", "num_weights": "i"}
"""Columns of one entry per sample, with the kind of their numbers. All others have one per token, and are floats."""
_MAX_SAMPLE_BYTES = 1 << 24
"""Limit for the columns of samples together: room for 300,000 samples."""
_MAX_TOKENS = 1 << 22
"""Limit for one sample."""
_MAX_SEGMENTS = 1 << 12
"""Limit for one rollout."""


class BadRecord(ValueError):
    """A record that cannot be read."""


def is_record(name: str) -> bool:
    return name.startswith("step_") and name.endswith(".npz")


def step_of_record(path: Path) -> int:
    digits = path.name.removeprefix("step_").partition(".")[0]
    return int(digits) if digits.isdecimal() and len(digits) < 16 else 0


def rollouts_in(path: Path) -> list[str]:
    """The rollouts that a record names; BadRecord."""
    with _opened(path) as (samples, _):
        return [id.decode("utf-8", "replace") for id in samples["rollout_id"].tolist()]


def segments_in(path: Path, rollout: str) -> dict[int, dict[str, np.ndarray]]:
    """The columns of a rollout's tokens by segment; BadRecord. A weight of the whole sample is repeated for each token."""
    with _opened(path) as (samples, columns):
        items = np.flatnonzero(samples["rollout_id"] == rollout.encode("utf-8", "replace")).tolist()
        if len(items) > _MAX_SEGMENTS:
            raise ValueError(f"it has {len(items)} segments of one rollout")
        ends = {name: np.cumsum(samples[name], dtype=np.int64) for name in ("num_tokens", "num_weights")}
        found = {}
        for item in items:
            own = {}
            for name, column in columns.items():
                counted = _counted_by(name)
                end, count = int(ends[counted][item]), int(samples[counted][item])
                own[name] = column.part(end - count, end)
            own["weight"] = np.broadcast_to(own["weight"], samples["num_tokens"][item])
            found[int(samples["segment"][item])] = own
        return found


def _counted_by(name: str) -> str:
    return "num_weights" if name == "weight" else "num_tokens"


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that has not been read."""

    archive: zipfile.ZipFile
    info: zipfile.ZipInfo
    start: int
    """Bytes of its header."""
    dtype: np.dtype
    length: int

    @classmethod
    def of(cls, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> "_Column":
        name = info.filename.removesuffix(".npy")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            start = member.tell()
        size = start + shape[0] * dtype.itemsize if len(shape) == 1 else -1
        is_ours = version == (1, 0) and info.compress_type == zipfile.ZIP_STORED and dtype.itemsize > 0
        if not is_ours or dtype.kind != _SAMPLES.get(name, "f") or size != info.file_size:
            raise ValueError(f"its column {name!r:.50} has {shape} of {dtype}")
        return cls(archive, info, start, dtype, shape[0])

    @property
    def num_bytes(self) -> int:
        return self.info.file_size

    def part(self, start: int, end: int) -> np.ndarray:
        num_bytes = (end - start) * self.dtype.itemsize
        with self.archive.open(self.info) as member:
            member.seek(self.start + start * self.dtype.itemsize)
            return np.frombuffer(member.read(num_bytes), self.dtype, count=end - start)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, np.ndarray], dict[str, _Column]]]:
    """The columns of samples, and those of tokens; BadRecord, also for what goes wrong inside the block."""
    try:
        with zipfile.ZipFile(path) as archive:
            columns = {i.filename.removesuffix(".npy"): _Column.of(archive, i) for i in archive.infolist()}
            of_samples = {name: columns.pop(name) for name in _SAMPLES}
            if sum(column.num_bytes for column in of_samples.values()) > _MAX_SAMPLE_BYTES:
                raise ValueError("it has too many samples")
            samples = {name: column.part(0, column.length) for name, column in of_samples.items()}
            _check(samples, columns)
            yield samples, columns
    except Exception as error:  # a stranger's file breaks zipfile and numpy in any way
        raise BadRecord(f"{path} cannot be read: {error!s:.200}") from error


def _check(samples: dict[str, np.ndarray], columns: dict[str, _Column]) -> None:
    counts, weights = samples["num_tokens"], samples["num_weights"]
    if len({len(values) for values in samples.values()}) > 1:
        raise ValueError("its columns differ in length")
    if min(samples["segment"].min(initial=0), counts.min(initial=0)) < 0 or counts.max(initial=0) > _MAX_TOKENS:
        raise ValueError("a number of its samples is out of range")
    if not ((weights == 1) | (weights == counts)).all():
        raise ValueError("a sample has neither one weight nor one for each token")
    for name, column in columns.items():
        if int(samples[_counted_by(name)].sum(dtype=np.int64)) != column.length:
            raise ValueError(f"its column {name!r:.50} has {column.length} entries")
