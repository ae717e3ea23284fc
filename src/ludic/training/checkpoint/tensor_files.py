"""Reads what `torch.save` and `torch.distributed.checkpoint` wrote without unpickling it: no file can name code to be run.

A pickle is a list of instructions. `read_pickle` follows those that make plain data; where one asks for a call, the caller gets the
name and the arguments as data, and decides. `read_tensor_file` and `read_tensor` accept tensors and ordered dictionaries so, and
read from the file only bytes that it has: a size or an offset beyond its end is an error.
"""

import io
import math
import mmap
import pickletools
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ludic.training.checkpoint.atomic import CheckpointError

# --- pickles ------------------------------------------------------------------------------------------------------


class Name(str):
    """What a pickle calls a class or a function: "torch.Size"."""


@dataclass(slots=True, eq=False)  # by identity: dictionaries have them as keys before they have their state
class Record:
    """An object of a pickle, as data."""

    name: Name
    """What would have been called."""
    arguments: tuple[Any, ...]
    state: Any = None


Construct: TypeAlias = Callable[[Name, tuple[Any, ...]], Any]
_LITERALS = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
)  # fmt: skip
_DTYPES = {Name(str(dtype)): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def read_pickle(data: bytes, construct: Construct = Record, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value that a pickle describes. `construct` makes an object of a name and arguments; by default a `Record`.

    ValueError, TypeError or LookupError for what is no such pickle. `persistent` gives the value of an id that stands for data
    beside the pickle, as the numbers of a tensor do.
    """
    machine = _Machine(construct, persistent)
    for opcode, argument, _ in pickletools.genops(data):
        follow = machine.instructions.get(opcode.name)
        if follow is None:
            raise ValueError(f"the instruction {opcode.name} does not belong there")
        follow(argument)
    return machine.result()


class _Machine:
    """Follows the instructions of a pickle that make plain data; it has no others."""

    def __init__(self, construct: Construct, persistent: Callable[[Any], Any] | None) -> None:
        self._construct = construct
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """The stacks that were in use when marks were set."""
        self._memo: dict[int, Any] = {}
        self.instructions: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(_LITERALS, self._push),
            **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _: None),
            "NONE": lambda _: self._push(None),
            "NEWTRUE": lambda _: self._push(True),
            "NEWFALSE": lambda _: self._push(False),
            "EMPTY_DICT": lambda _: self._push({}),
            "EMPTY_LIST": lambda _: self._push([]),
            "EMPTY_TUPLE": lambda _: self._push(()),
            "MARK": self._mark,
            "TUPLE": lambda _: self._push(tuple(self._since_mark())),
            "TUPLE1": lambda _: self._push(tuple(self._last(1))),
            "TUPLE2": lambda _: self._push(tuple(self._last(2))),
            "TUPLE3": lambda _: self._push(tuple(self._last(3))),
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "BINGET": self._recall,
            "LONG_BINGET": self._recall,
            "APPEND": lambda _: self._append(self._last(1)),
            "APPENDS": lambda _: self._append(self._since_mark()),
            "SETITEM": lambda _: self._set_items(self._last(2)),
            "SETITEMS": lambda _: self._set_items(self._since_mark()),
            "GLOBAL": lambda argument: self._push(_named(*argument.split(" "))),
            "STACK_GLOBAL": lambda _: self._push(_named(*self._last(2))),
            "REDUCE": self._call,
            "NEWOBJ": self._call,
            "BUILD": self._build,
        }
        if persistent is not None:
            self.instructions["BINPERSID"] = lambda _: self._push(persistent(self._stack.pop()))

    def result(self) -> Any:
        (value,) = self._stack
        return value

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("an instruction has nothing to work on")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._below.pop()
        return values

    def _remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _recall(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def _append(self, values: list[Any]) -> None:
        _require(self._stack[-1], list).extend(values)

    def _set_items(self, values: list[Any]) -> None:
        _require(self._stack[-1], dict, OrderedDict).update(zip(values[::2], values[1::2], strict=True))

    def _call(self, _: Any) -> None:
        callee, arguments = self._last(2)
        self._stack.append(self._construct(_require(callee, Name), _require(arguments, tuple)))

    def _build(self, _: Any) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is Record and target.state is None:
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict and state.keys() == {"_metadata"}:
            target.__dict__.update(state)  # as the state_dict of a torch module has it
        else:
            raise ValueError(f"a {type(target).__name__} takes no state")


def _named(module: Any, name: Any) -> Any:
    found = Name(f"{_require(module, str)}.{_require(name, str)}")
    return _DTYPES.get(found, found)


def _require(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise ValueError(f"a {type(value).__name__} stands where a {kinds[0].__name__} belongs")
    return value


# --- tensors ------------------------------------------------------------------------------------------------------

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_UNTYPED = Name("torch.storage.UntypedStorage")
_UNREADABLE = (
    ValueError, TypeError, LookupError, ArithmeticError, EOFError, OSError, RuntimeError, AttributeError, MemoryError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""What a damaged file may cause, here, in zipfile and in torch."""
_ALIGNED = 64


def read_tensor_file(path: Path, *, mapped: bool = False) -> Any:
    """What `torch.save` wrote: tensors and plain values, in lists, tuples and dictionaries; CheckpointError for all else.

    `mapped` tensors are read from the disk as they are used; they are for copying from.
    """
    with _explained(path), path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if mapped else None
        return _SavedByTorch(file, mapping).value()


def read_tensor(path: Path, *, offset: int, length: int) -> Tensor:
    """One tensor that `torch.save` wrote into a part of a file."""
    with _explained(path), path.open("rb") as file:
        value = _SavedByTorch(_Part(file, offset, length)).value()
    if type(value) is not Tensor:
        raise CheckpointError(f"{path} cannot be read: it has a {type(value).__name__} where a tensor should be.")
    return value


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error or type(error).__name__}.") from error


class _SavedByTorch:
    """A zip file of a pickle, data.pkl, and one file of numbers for each storage, data/0, data/1, …"""

    def __init__(self, file: Any, mapping: mmap.mmap | None = None) -> None:
        self._file, self._mapping = file, mapping
        self._size: int = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            self._entries = {entry.filename: entry for entry in archive.infolist()}
        (pickled,) = [name for name in self._entries if name.endswith("/data.pkl")]
        self._prefix = pickled.removesuffix("data.pkl")
        self._storages: dict[str, Tensor] = {}
        order = self._prefix + "byteorder"
        if order in self._entries and self._bytes(order) != sys.byteorder.encode():
            raise ValueError("it was written on a machine with another byte order")

    def value(self) -> Any:
        return read_pickle(self._bytes(self._prefix + "data.pkl"), self._construct, self._storage)

    def _construct(self, name: Name, arguments: tuple[Any, ...]) -> Any:
        if name == "torch._utils._rebuild_tensor_v2" and len(arguments) == 6:
            storage, offset, size, stride, requires_grad, _ = arguments
            return _tensor(_require(storage, _Storage), None, offset, size, stride).requires_grad_(
                requires_grad is True
            )
        if name == "torch._utils._rebuild_tensor_v3" and len(arguments) == 7:
            storage, offset, size, stride, requires_grad, _, dtype = arguments
            made = _tensor(_require(storage, _Storage), _require(dtype, torch.dtype), offset, size, stride)
            return made.requires_grad_(requires_grad is True)
        if name == "torch._utils._rebuild_parameter" and len(arguments) == 3:
            return torch.nn.Parameter(_require(arguments[0], Tensor), requires_grad=arguments[1] is True)
        if name == "collections.OrderedDict" and not arguments:
            return OrderedDict()
        if name == "torch.Size" and len(arguments) == 1:
            return torch.Size(numbers(arguments[0]))
        raise ValueError(f"it holds a {name}, which is not read")

    def _storage(self, identity: Any) -> "_Storage":
        kind, name, key, _, count = identity
        if kind != "storage" or type(name) is not Name or type(key) is not str or type(count) is not int:
            raise ValueError(f"{identity!r} names no storage")
        dtype = None if name == _UNTYPED else _STORAGES[name.removeprefix("torch.")]
        if key not in self._storages:
            self._storages[key] = self._numbers(f"{self._prefix}data/{key}")
        data = self._storages[key]
        if len(data) != count * (1 if dtype is None else dtype.itemsize):
            raise ValueError(f"{count} numbers are said to be in the {len(data)} bytes of data/{key}")
        return _Storage(data, dtype)

    def _numbers(self, name: str) -> Tensor:
        start, size = self._place(name)
        if self._mapping is not None and size and start % _ALIGNED == 0:
            return torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=start)
        numbers = torch.empty(size, dtype=torch.uint8)
        room = memoryview(numbers.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer
        self._file.seek(start)
        while room:
            count = self._file.readinto(room)
            if not count:
                raise EOFError(f"{name} ends too early")
            room = room[count:]
        return numbers

    def _bytes(self, name: str) -> bytes:
        start, size = self._place(name)
        self._file.seek(start)
        content: bytes = self._file.read(size)
        return content

    def _place(self, name: str) -> tuple[int, int]:
        """(where its content begins, how many bytes it has)."""
        entry = self._entries[name]
        self._file.seek(entry.header_offset)
        lengths = struct.unpack("<26xHH", self._file.read(30))
        start, size = entry.header_offset + 30 + sum(lengths), entry.file_size
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != size or start + size > self._size:
            raise ValueError(f"{name} is not within it, or compressed")
        return start, size


@dataclass(frozen=True, slots=True)
class _Storage:
    """The numbers of one or more tensors."""

    data: Tensor
    """Bytes."""
    dtype: torch.dtype | None
    """None where the tensors know it."""


def _tensor(storage: _Storage, dtype: torch.dtype | None, offset: Any, size: Any, stride: Any) -> Tensor:
    kind = storage.dtype or dtype
    sizes, strides = numbers(size), numbers(stride)
    (start,) = numbers((offset,))
    if kind is None or len(sizes) != len(strides):
        raise ValueError("a tensor's description is incomplete")
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=kind)
    last = start + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if last >= len(storage.data) // kind.itemsize:
        raise ValueError(f"a tensor of {sizes} is larger than its storage")
    return storage.data.view(kind).as_strided(sizes, strides, start)


def numbers(values: Any) -> tuple[int, ...]:
    """Whole numbers from 0 on, as sizes and offsets are."""
    if not isinstance(values, tuple) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)


class _Part(io.RawIOBase):
    """Some of the bytes of a file, as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("there is nothing before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count: int = self._file.readinto(room)
        self._position += count
        return count
