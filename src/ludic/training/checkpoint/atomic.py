"""Folders that are there completely or not at all: syncing, atomic replacement, and a manifest to check against.

The manifest is written last, so its presence says that the folder was finished; the sizes and checksums in it, and its own
checksum, say whether the files still are what was written. A file that cannot be read is damage like any other.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from ludic.types import LudicError

MANIFEST = "manifest.json"
SHARDED = "sharded"
"""The manifest's `format` of a checkpoint whose ranks wrote a part each; that of one process has none."""
_CHUNK = 1 << 22
_FACTS = frozenset({"step", "serial", "files", "format", "world_size", "crc32"})


class CheckpointError(LudicError, RuntimeError):
    """A checkpoint cannot be written or read."""


class _Damaged(Exception):
    """Why a manifest cannot be relied on."""


def write_json(path: Path, value: Any) -> None:
    """Replace a file by another, in one moment and for good."""
    text = json.dumps(value, indent=1, allow_nan=False)
    unfinished = path.with_name(f".unfinished-{path.name}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def read_json(path: Path) -> Any:
    """OSError or ValueError where there is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file of a checkpoint holds; CheckpointError if it holds none."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} cannot be read: it holds no JSON object.")
    return found


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish_folder(folder: Path, facts: Mapping[str, Any]) -> None:
    """Sync all that is in the folder and write its manifest, with `facts` beside the list of files."""
    write_manifest(folder, facts, synced(folder, list(files_in(folder))))


def synced(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Wait until these are on the disk; their entries for the manifest."""
    for file in files:
        sync(file)
    with ThreadPoolExecutor(4) as pool:
        checksums = pool.map(_checksum, files)
        return {
            file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "crc32": checksum}
            for file, checksum in zip(files, checksums, strict=True)
        }


def write_manifest(folder: Path, facts: Mapping[str, Any], listed: Mapping[str, Any]) -> None:
    """The last file of a folder; `listed` comes from `synced`."""
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        sync(inner)
    whole = {**facts, "files": dict(listed)}
    write_json(folder / MANIFEST, {**whole, "crc32": _checksum_of(whole)})


def _checksum_of(facts: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None when the folder was never finished, or the manifest is damaged."""
    try:
        return _manifest(folder)
    except _Damaged:
        return None


def _manifest(folder: Path) -> dict[str, Any]:
    """Checked field by field, so that those who read it need not; manifests of older versions have no checksum."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise _Damaged(f"it has no complete {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise _Damaged(f"it has no complete {MANIFEST} ({error})") from error
    if not isinstance(manifest, dict) or not _is_sound(manifest):
        raise _Damaged(f"its {MANIFEST} is damaged")
    checksum = manifest.pop("crc32", None)
    if checksum is not None and checksum != _checksum_of(manifest):
        raise _Damaged(f"its {MANIFEST} is not what was written (its checksum differs)")
    return manifest


def _is_sound(manifest: Mapping[str, Any]) -> bool:
    listed = manifest.get("files")
    if not manifest.keys() <= _FACTS or not isinstance(listed, dict):
        return False
    if not all(_is_count(manifest.get(name)) for name in ("step", "serial")):
        return False
    entries_are_sound = all(
        _is_inside(name)
        and isinstance(entry, dict)
        and entry.keys() == {"size", "crc32"}
        and _is_count(entry["size"])
        and _is_count(entry["crc32"])
        for name, entry in listed.items()
    )
    num_ranks = sum(name.startswith("rank_") for name in listed)
    kind = (None, None, False) if not num_ranks else (SHARDED, num_ranks, True)
    return entries_are_sound and kind == (
        manifest.get("format"),
        manifest.get("world_size"),
        any(name.startswith("shards/") for name in listed),
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_inside(name: str) -> bool:
    """Whether a relative path stays in its folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == name and "\0" not in name


def problem_with(folder: Path, *, checksums: bool, share: slice = slice(None)) -> str | None:
    """What is wrong with a folder, or None. Sizes are always compared; `checksums` reads every byte of a `share` of the
    files: several processes can divide the work."""
    try:
        listed = _manifest(folder)["files"]
        for name, expected in listed.items():
            size = _size(folder, name)
            if size != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']}"
    except _Damaged as damage:
        return str(damage)
    by_size = sorted(listed.items(), key=lambda entry: entry[1]["size"], reverse=True)
    read = dict(by_size[share])
    return _wrong_checksum(folder, read) if checksums else None


def _size(folder: Path, name: str) -> int:
    file = folder / name
    try:
        if not file.is_file():
            raise _Damaged(f"{name} is missing")
        if not file.resolve().is_relative_to(folder.resolve()):
            raise _Damaged(f"{name} is a link to a file outside the checkpoint")
        return file.stat().st_size
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise _Damaged(f"{name} cannot be read ({error})") from error


def _wrong_checksum(folder: Path, listed: Mapping[str, Any]) -> str | None:
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(_readable_checksum, [folder / name for name in listed])
        for (name, expected), checksum in zip(listed.items(), found, strict=True):
            if isinstance(checksum, str):
                return f"{name} cannot be read ({checksum})"
            if checksum != expected["crc32"]:
                return f"{name} is not what was written (its checksum differs)"
    return None


def _readable_checksum(file: Path) -> int | str:
    try:
        return _checksum(file)
    except OSError as error:
        return str(error)


def listed_files(folder: Path) -> list[Path]:
    """The files of a folder that belong to it: those of its manifest; without one, all."""
    manifest = read_manifest(folder)
    return list(files_in(folder)) if manifest is None else [folder / name for name in sorted(manifest["files"])]


def files_in(folder: Path) -> Iterator[Path]:
    """All that a manifest lists."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def _checksum(file: Path) -> int:
    """CRC-32: it is against accidents, and keeps up with a fast disk."""
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
