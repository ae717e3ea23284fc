"""Files of a rank: safetensors files with its parts of sharded tensors, whole tensors, and plain values as JSON.

    step_000100/ranks/00000-000.safetensors   the first file of rank 0; a run of one process is rank 0 alone

`StoredTensors` reads safetensors files, ours and those of transformers, into tensors that are sharded in any way. safetensors
checks that a header fits the bytes of its file; our own metadata in it is checked here before it is used.
"""

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ludic.training.checkpoint.manifest import CheckpointError, files_in, listed_files
from ludic.types import ConfigError
from ludic.util.files import parse_json

RANKS = "ranks"
_VALUES = "values"
"""The tensor whose bytes are the JSON text of a rank's values; tensors among the values are "values.0", "values.1", …"""
_PARTS = "parts"
"""Metadata of a file: name -> (shape of the whole tensor, where this part begins in it)."""
_LARGEST_FILE = 1 << 32
"""Bytes after which a rank begins another file: fewer bytes of a GPU are in CPU memory at a time, and checksums run in parallel."""
_UNSTORABLE = (torch.complex128, torch.complex32)
"""safetensors has no names for these."""

_LISTS: dict[str, Any] = {"list": list, "tuple": tuple}
_DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}

Box: TypeAlias = tuple[int, ...]


# --- sharded tensors ----------------------------------------------------------------------------------------------


def is_sharded(tensor: Any) -> bool:
    """True for a DTensor. Where torch.distributed.tensor is not loaded there can be none, so this never loads it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local_part(tensor: Any) -> tuple[Tensor, Box]:
    """This rank's part of a tensor, and where it begins in the whole."""
    if not is_sharded(tensor):
        return tensor, (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


def is_written_by(rank: int, tensor: Any) -> bool:
    """True if this rank writes its part: of the ranks that hold the same part one does, and rank 0 writes unsharded tensors."""
    if not is_sharded(tensor):
        return rank == 0
    place = tensor.device_mesh.get_coordinate()
    if place is None or any(at and kind.is_replicate() for at, kind in zip(place, tensor.placements, strict=True)):
        return False
    return not any(place) or tensor.to_local().numel() > 0


def _copy_part(source: Tensor, begins: Box, target: Any) -> None:
    """Copy the overlap of `source`, a part that begins at `begins` in the whole tensor, with this rank's part of `target`."""
    local, start = _local_part(target)
    low = [max(pair) for pair in zip(begins, start, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(begins, source.shape, start, local.shape, strict=True)]
    if all(first < end for first, end in zip(low, high, strict=True)):
        of_source = tuple(slice(i - a, j - a) for i, j, a in zip(low, high, begins, strict=True))
        of_target = tuple(slice(i - b, j - b) for i, j, b in zip(low, high, start, strict=True))
        local[of_target].copy_(source[of_source])


# --- writing ------------------------------------------------------------------------------------------------------


def write_rank_files(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's part of each tensor. Values are given as tensors: see `encoded`."""
    (folder / RANKS).mkdir(exist_ok=True)
    for number, names in enumerate(_files(tensors)):
        content, parts = {}, {}
        for name in names:
            local, begins = _local_part(tensors[name].detach())
            content[name] = local
            if is_sharded(tensors[name]):
                parts[name] = (list(tensors[name].shape), begins)
        file = folder / RANKS / f"{rank:05d}-{number:03d}.safetensors"
        save_file(_separate(content), file, metadata={_PARTS: json.dumps(parts)})


def written_by(rank: int, folder: Path) -> list[Path]:
    """The files that a rank has written; rank 0 also those outside the rank files."""
    owners = {file: int(file.name[:5]) if file.parent.name == RANKS else 0 for file in files_in(folder)}
    return [file for file, owner in owners.items() if owner == rank]


def _files(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names by file; the first file has all values."""
    is_value = {name: name.partition(".")[0] == _VALUES for name in tensors}
    names, size = [name for name in tensors if is_value[name]], 0
    for name in tensors:
        if not is_value[name]:
            length = _local_part(tensors[name])[0].nbytes
            if size + length > _LARGEST_FILE and size:
                yield names
                names, size = [], 0
            names.append(name)
            size += length
    yield names


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In CPU memory, contiguous, and no two in the same memory, as safetensors requires."""
    found: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.to("cpu").contiguous()
        if own.untyped_storage().nbytes() != own.nbytes or own.data_ptr() in used:
            own = own.clone()
        used.add(own.data_ptr())
        found[name] = own
    return found


def encoded(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Tables of nested plain values and tensors as a few tensors, copied; `read_values` restores them with their types.

    ConfigError for values that could not be restored.
    """
    tensors: dict[str, Tensor] = {}

    def encode(path: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            is_plain = value.layout is torch.strided and not (value.is_quantized or value.is_conj() or value.is_neg())
            if not is_plain or is_sharded(value):
                raise ConfigError(
                    f"state[{path}] is a tensor of an unusual kind; give a plain one (.full_tensor(), .to_dense().clone())."
                )
            if value.dtype in _UNSTORABLE:
                raise ConfigError(
                    f"state[{path}] is {value.dtype}; safetensors cannot store it. Give torch.view_as_real of it."
                )
            tensors[f"{_VALUES}.{len(tensors)}"] = value.detach().to("cpu", copy=True)
            return {"tensor": len(tensors) - 1}
        if type(value) is float and not math.isfinite(value):
            return {"float": repr(value)}
        if type(value) in _LISTS.values():
            return {type(value).__name__: [encode(f"{path}[{index}]", each) for index, each in enumerate(value)]}
        if type(value) in _DICTS.values():
            pairs = [[encode(path, key), encode(f"{path}[{key!r}]", each)] for key, each in value.items()]
            if hasattr(value, "_metadata"):  # torch puts versions there, next to a module's weights
                return {type(value).__name__: pairs, "_metadata": encode(path, value._metadata)}
            return {type(value).__name__: pairs}
        if value is None or type(value) in (str, int, float, bool):
            return value
        raise ConfigError(
            f"state[{path}] is a {type(value).__name__}; a checkpoint holds plain values, lists, tuples, dicts and tensors. "
            "Turn it into one of these (array.tolist(), torch.from_numpy(array))."
        )

    pairs = {name: [[key, encode(key, value)] for key, value in table.items()] for name, table in tables.items()}
    text = json.dumps({name: {"dict": table} for name, table in pairs.items()})
    return tensors | {_VALUES: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


# --- reading ------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An open safetensors file. Any error in the block is reported as damage of the file."""
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except (
        SafetensorError, OSError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError,
        RecursionError,
    ) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise CheckpointError(f"{file} cannot be read: {reason}.") from error


def rank_files(folder: Path) -> list[Path]:
    return [file for file in listed_files(folder) if file.parent == folder / RANKS]


def num_ranks(folder: Path) -> int:
    """The number of ranks that wrote a checkpoint; 1 if none wrote a file, as in an export."""
    return len({file.name.partition("-")[0] for file in rank_files(folder)}) or 1


def read_values(folder: Path, rank: int) -> dict[str, Any]:
    """The tables that a rank gave to `encoded`; empty if there was no such rank."""
    file = folder / RANKS / f"{rank:05d}-000.safetensors"
    if file not in listed_files(folder):
        return {}
    with _opened(file) as stored:
        text = parse_json(stored.get_tensor(_VALUES).numpy().tobytes())
        return {name: _decoded(node, stored) for name, node in text.items()}


def _decoded(node: Any, stored: Any) -> Any:
    if type(node) is not dict:
        if type(node) is list:
            raise ValueError("it holds a list in the place of a value")
        return node
    metadata = node.pop("_metadata", None)
    ((kind, inner),) = node.items()
    if kind == "tensor":
        return stored.get_tensor(f"{_VALUES}.{inner:d}").clone()
    if kind == "float":
        return float(inner)
    if kind in _LISTS:
        return _LISTS[kind](_decoded(each, stored) for each in inner)
    if kind not in _DICTS:
        raise ValueError(f"it holds a {kind}, which is not read")
    found = _DICTS[kind]((_decoded(key, stored), _decoded(value, stored)) for key, value in inner)
    if metadata is not None and isinstance(found, OrderedDict):
        found._metadata = _decoded(metadata, stored)  # type: ignore[attr-defined] # as torch does
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """The place of a part of a tensor."""

    file: Path
    begins: Box
    sizes: Box


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Facts about a tensor that are known without reading its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    parts: list[_Part]


class StoredTensors(dict[str, _StoredTensor]):
    """The tensors of several files under one prefix, named without it. Parts of one tensor may lie in several files."""

    def __init__(self, files: Sequence[Path], prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix
        for file in files:
            with _opened(file) as stored:
                parts = parse_json((stored.metadata() or {}).get(_PARTS, "{}"))
                for name in stored.keys():  # noqa: SIM118 - it is not a mapping
                    if name.startswith(prefix):
                        self._add(name, file, stored.get_tensor(name), parts.get(name))
        for name, about in self.items():
            if sum(math.prod(part.sizes) for part in about.parts) != math.prod(about.shape):
                raise CheckpointError(
                    f"{files[0].parent} cannot be read: the parts of {prefix}{name} are not the whole."
                )

    def _add(self, name: str, file: Path, tensor: Tensor, place: Any) -> None:
        shape, begins = (tensor.shape, (0,) * tensor.ndim) if place is None else map(_numbers, place)
        if any(first + size > whole for first, size, whole in zip(begins, tensor.shape, shape, strict=True)):
            raise ValueError(f"a part of {name} is not within {tuple(shape)}")
        about = self.setdefault(name.removeprefix(self._prefix), _StoredTensor(shape, tensor.dtype, []))
        if (about.shape, about.dtype) != (shape, tensor.dtype) or any(begins == part.begins for part in about.parts):
            raise ValueError(f"{name} contradicts its part in {about.parts[0].file.name}")
        about.parts.append(_Part(file, tuple(begins), tuple(tensor.shape)))

    def copy_into(self, targets: Mapping[str, Any]) -> None:
        """Fill these tensors; of those that are sharded, this rank's part."""
        by_file: dict[Path, list[tuple[str, _Part]]] = {}
        for name in targets:
            for part in self[name].parts:
                by_file.setdefault(part.file, []).append((name, part))
        for file, wanted in by_file.items():
            with _opened(file) as stored, torch.no_grad():
                for name, part in wanted:
                    # Mapped, not read: only the bytes that are copied come from the disk.
                    _copy_part(stored.get_tensor(f"{self._prefix}{name}"), part.begins, targets[name])

    def whole(self) -> dict[str, Tensor]:
        """All of them in CPU memory."""
        found = {name: torch.empty(about.shape, dtype=about.dtype) for name, about in self.items()}
        self.copy_into(found)
        return found


class WholeTensors(dict[str, Tensor]):
    """Tensors in memory, to be copied from like stored ones."""

    def copy_into(self, targets: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                _copy_part(self[name], (0,) * target.ndim, target)


def _numbers(values: Any) -> torch.Size:
    """Whole numbers from 0 on."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{values!r} is no shape")
    return torch.Size(values)
