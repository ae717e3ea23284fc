"""Folders that are there completely or not at all: syncing, atomic replacement, and a manifest to check against.

The manifest is written last, so its presence says that the folder was finished; the sizes and checksums in it say
whether the files still are what was written.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_CHUNK = 1 << 22


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
    return json.loads(path.read_text(encoding="utf-8"))


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
    write_json(folder / MANIFEST, {**facts, "files": dict(listed)})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None when the folder was never finished."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and "files" in manifest else None


def problem_with(folder: Path, *, checksums: bool, share: slice = slice(None)) -> str | None:
    """What is wrong with a folder, or None. Sizes are always compared; `checksums` reads every byte of a `share` of the
    files: several processes can divide the work."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"it has no complete {MANIFEST}"
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != expected["size"]:
            return f"{name} has {size} bytes instead of {expected['size']}"
    by_size = sorted(manifest["files"].items(), key=lambda entry: entry[1]["size"], reverse=True)
    read = dict(by_size[share])
    return _wrong_checksum(folder, read) if checksums else None


def _wrong_checksum(folder: Path, listed: Mapping[str, Any]) -> str | None:
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(_checksum, [folder / name for name in listed])
        for (name, expected), checksum in zip(listed.items(), found, strict=True):
            if checksum != expected["crc32"]:
                return f"{name} is not what was written (its checksum differs)"
    return None


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
