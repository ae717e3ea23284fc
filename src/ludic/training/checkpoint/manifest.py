"""The manifest of a checkpoint: the size and CRC-32 of every file, and of the manifest itself.

It is written last, so a folder that has one was finished. `manager`, `export` and the commands that take a checkpoint check
folders against it. A file that cannot be read counts as damaged.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from ludic.types import LudicError
from ludic.util.files import parse_json, sync, write_json

MANIFEST = "manifest.json"
FORMAT = 2
"""Version of the set of files. Checkpoints of another format are not read."""
_CHUNK = 1 << 22


class CheckpointError(LudicError, RuntimeError):
    """A checkpoint cannot be written or read."""


class _Damaged(Exception):
    """Why a folder cannot be relied on."""


def finish_folder(folder: Path, *, step: int, serial: int) -> None:
    """Sync every file in the folder and write its manifest."""
    write_manifest(folder, synced(folder, files_in(folder)), step=step, serial=serial)


def synced(folder: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Wait until these files are on the disk; return their entries for the manifest."""
    files = list(files)
    for file in files:
        sync(file)
    with ThreadPoolExecutor(4) as pool:
        checksums = pool.map(_checksum, files)
        return {
            file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "crc32": checksum}
            for file, checksum in zip(files, checksums, strict=True)
        }


def write_manifest(folder: Path, listed: Mapping[str, Any], *, step: int, serial: int) -> None:
    """Write the last file of a folder; `listed` is what `synced` returned."""
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        sync(inner)
    facts = {"format": FORMAT, "step": step, "serial": serial, "files": dict(listed)}
    write_json(folder / MANIFEST, {**facts, "crc32": _checksum_of(facts)})


def _checksum_of(facts: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _checksum(file: Path) -> int:
    """CRC-32 detects accidental damage, and is as fast as a fast disk."""
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The facts of a finished folder: format, step, serial, files. None if the manifest is missing or damaged."""
    try:
        return _manifest(folder)
    except _Damaged:
        return None


def _manifest(folder: Path) -> dict[str, Any]:
    """Every field is checked here, so that callers can rely on it."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise _Damaged(f"it has no complete {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise _Damaged(f"it has no complete {MANIFEST} ({error})") from error
    if not isinstance(manifest, dict) or "crc32" not in manifest:
        raise _Damaged(f"its {MANIFEST} is damaged")
    if manifest.pop("crc32") != _checksum_of(manifest):
        raise _Damaged(f"its {MANIFEST} is not what was written (its checksum differs)")
    if manifest.get("format") != FORMAT:
        raise _Damaged("another version of Ludic wrote it, in a format that this version does not read")
    if not _is_sound(manifest):
        raise _Damaged(f"its {MANIFEST} is damaged")
    return manifest


def _is_sound(manifest: Mapping[str, Any]) -> bool:
    listed = manifest.get("files")
    return (
        manifest.keys() == {"format", "step", "serial", "files"}
        and all(map(_is_count, (manifest["step"], manifest["serial"])))
        and isinstance(listed, dict)
        and all(
            _is_inside(name)
            and isinstance(entry, dict)
            and entry.keys() == {"size", "crc32"}
            and all(map(_is_count, entry.values()))
            for name, entry in listed.items()
        )
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_inside(name: str) -> bool:
    """True if a relative path stays in its folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == name and "\0" not in name


def problem_with(folder: Path, *, checksums: bool, share: slice = slice(None)) -> str | None:
    """The problem of a folder, or None. Sizes are always compared; `checksums` also reads every byte of a `share` of
    the files, so that several processes can divide the work."""
    if not folder.is_dir():
        return "it does not exist"
    try:
        listed = _manifest(folder)["files"]
        for name, expected in listed.items():
            _check_size(folder, name, expected["size"])
    except _Damaged as damage:
        return str(damage)
    by_size = sorted(listed.items(), key=lambda entry: entry[1]["size"], reverse=True)
    return _wrong_checksum(folder, dict(by_size[share])) if checksums else None


def _check_size(folder: Path, name: str, expected: int) -> None:
    file = folder / name
    try:
        if not file.is_file():
            raise _Damaged(f"{name} is missing")
        if not file.resolve().is_relative_to(folder.resolve()):
            raise _Damaged(f"{name} is a link to a file outside the checkpoint")
        size = file.stat().st_size
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise _Damaged(f"{name} cannot be read ({error})") from error
    if size != expected:
        raise _Damaged(f"{name} has {size} bytes instead of {expected}")


def _wrong_checksum(folder: Path, listed: Mapping[str, Any]) -> str | None:
    with ThreadPoolExecutor(4) as pool:
        found = {name: pool.submit(_checksum, folder / name) for name in listed}
        for name, checksum in found.items():
            try:
                if checksum.result() != listed[name]["crc32"]:
                    return f"{name} is not what was written (its checksum differs)"
            except OSError as error:
                return f"{name} cannot be read ({error})"
    return None


def listed_files(folder: Path) -> list[Path]:
    """The files of a folder: those that its manifest lists, or all if it has none."""
    manifest = read_manifest(folder)
    return list(files_in(folder)) if manifest is None else [folder / name for name in sorted(manifest["files"])]


def files_in(folder: Path) -> Iterator[Path]:
    """All files that a manifest lists."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def read_json(path: Path) -> Any:
    """The value in a JSON file; OSError or ValueError if there is none."""
    return parse_json(path.read_bytes())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError if there is none."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} cannot be read: it holds no JSON object.")
    return found
