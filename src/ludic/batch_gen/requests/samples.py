"""Reads task samples from a JSONL file, a JSON list, a Parquet file or a Hugging Face dataset.

A dataset is written `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`, such as hub:openai/gsm8k:main:train; NAME may also be a
folder that `datasets` can read.
"""

from pathlib import Path
from typing import Any, TypeAlias

from ludic.types import ConfigError, MissingExtra
from ludic.util.files import parse_json

Sample: TypeAlias = dict[str, Any]
HUB = "hub:"


def read_samples(place: str | Path, flag: str = "--data") -> list[Sample]:
    """All samples at `place`; error messages name `flag`."""
    if is_on_hub(place):
        return _from_hub(str(place), flag)
    path = Path(place)
    if path.suffix == ".parquet":
        return _from_parquet(path, flag)
    if path.suffix == ".json" and (listed := _from_json_list(path, flag)) is not None:
        return listed
    return [read_sample(line, number, path) for number, line in read_lines(path, flag)]


def is_on_hub(place: str | Path) -> bool:
    return str(place).startswith(HUB)


def read_lines(path: Path, flag: str = "--data") -> list[tuple[int, str]]:
    """Number and text of each non-empty line of a JSONL file."""
    try:
        lines = [
            (number, line)
            for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
            if line.strip()
        ]
    except OSError as error:
        raise ConfigError(f"Cannot read {flag} {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{flag} {path} is not text (byte {error.start} is not UTF-8); it should hold one JSON object per line. A Parquet file "
            "is recognised by its name, *.parquet."
        ) from error
    if not lines:
        raise ConfigError(f"{flag} {path} is empty; it should hold one JSON object per line.")
    return lines


def read_sample(line: str, number: int, path: Path) -> Sample:
    try:
        sample = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"Line {number} of {path} is not JSON: {error}.") from error
    if not isinstance(sample, dict):
        raise ConfigError(f"Line {number} of {path} is {line!r:.60}; each line should be one JSON object.")
    return sample


def _from_json_list(path: Path, flag: str) -> list[Sample] | None:
    """The samples, or None if the file holds one object per line."""
    text = "\n".join(line for _, line in read_lines(path, flag))
    if not text.lstrip().startswith("["):
        return None
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {path} is not JSON: {error}.") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{flag} {path} should be a list of JSON objects, at least one.")
    return list(rows)


def _from_parquet(path: Path, flag: str) -> list[Sample]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingExtra("datasets", f"{flag} {path}") from error
    try:
        rows = _rows_of(parquet.ParquetFile(path), f"{flag} {path}")
    except (OSError, ArrowException) as error:
        raise ConfigError(f"Cannot read {flag} {path}: {str(error).splitlines()[0]}") from error
    if not rows:
        raise ConfigError(f"{flag} {path} is empty.")
    return rows


_MAX_VALUES, _MAX_CHARS = 2**26, 2**31
"""Limits on a decoded Parquet file: a small file may repeat one value as often as it says."""


def _rows_of(file: Any, shown: str) -> list[Sample]:
    """The footer bounds the values, and the rows decoded at a time; the characters are counted as they come."""
    meta, room, rows = file.metadata, _MAX_CHARS, list[Sample]()
    columns = [meta.row_group(g).column(c) for g in range(meta.num_row_groups) for c in range(meta.num_columns)]
    largest = max((column.total_uncompressed_size for column in columns), default=0)
    if largest <= _MAX_CHARS and sum(column.num_values for column in columns) <= _MAX_VALUES:
        for batch in file.iter_batches(batch_size=min(_MAX_CHARS // (8 * largest + 1) + 1, 1024)):
            rows += batch.to_pylist()
            room -= sum(len(str(row)) for row in rows[-batch.num_rows :])
            if room < 0:
                break
        else:
            return rows
    raise ConfigError(
        f"{shown} has more than {_MAX_VALUES:,} values or {_MAX_CHARS:,} characters once it is decoded. Write a part of it into "
        "another file."
    )


def _from_hub(place: str, flag: str) -> list[Sample]:
    name, *config, split = _parts(place, flag)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra("datasets", f"{place} (or give {flag} a JSONL file)") from error
    try:
        rows = [dict(row) for row in load_dataset(name, *config, split=split)]
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{flag} {place} could not be fetched: {reason} Give a JSONL file instead.") from error
    if not rows:
        raise ConfigError(f"{flag} {place} is empty.")
    return rows


def _parts(place: str, flag: str) -> list[str]:
    parts = place.removeprefix(HUB).split(":")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise ConfigError(
            f"{flag} {place} should be hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT, such as hub:openai/gsm8k:main:train."
        )
    return parts
