"""The flags of a command as data. `ludic.cli.args.parse` makes them from the dataclass that it gives to tyro; the short help page
and messages about unknown flags read them.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from ludic.run.settings import docs_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag or positional argument of a command."""

    name: str
    """The field's: group_size."""
    help: str
    metavar: str
    """Stands for its value in a help text; empty for a switch."""
    default: str
    """Empty where there is none to show."""
    is_positional: bool = False
    is_required: bool = False
    has_no_form: bool = False
    """--no-NAME exists."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.flag, f"--no-{self.flag[2:]}") if self.has_no_form else (self.flag,)


class FlagsAsked(Exception):
    """Carries the flags of a command out of it: see `flags_of_command`."""

    def __init__(self, flags: tuple[Flag, ...]) -> None:
        super().__init__("asked for the flags")
        self.flags = flags


ASK = "--flags-of-this-command"
"""The argument by which `flags_of_command` asks `parse`, instead of a second list of which command has which dataclass."""


def flags_of_command(command: Callable[[list[str]], int]) -> tuple[Flag, ...]:
    """The flags of a command: of the dataclass that it gives to `parse`."""
    try:
        command([ASK])
    except FlagsAsked as answer:
        return answer.flags
    raise AssertionError(f"{command} does not parse its arguments with ludic.cli.args.parse")


def flags_of(arguments: type[Any]) -> tuple[Flag, ...]:
    """The flags of a dataclass of arguments, and of the dataclasses in its fields."""
    return tuple(_flags_in(arguments))


def _flags_in(arguments: type[Any]) -> Iterator[Flag]:
    docs, kinds = docs_of(arguments), typing.get_type_hints(arguments, include_extras=True)
    for field in dataclasses.fields(arguments):
        kind, notes = _without_notes(kinds[field.name])
        if dataclasses.is_dataclass(kind):
            yield from _flags_in(typing.cast(type[Any], kind))
        elif tyro.conf.Suppress not in notes:
            yield _flag(field, kind, notes, docs.get(field.name, ""))


def _without_notes(kind: Any) -> tuple[Any, list[Any]]:
    """The type inside nested Annotated, and all annotations."""
    notes: list[Any] = []
    while typing.get_origin(kind) is typing.Annotated:
        kind, *more = typing.get_args(kind)
        notes += more
    return kind, notes


def _flag(field: "dataclasses.Field[Any]", kind: Any, notes: list[Any], doc: str) -> Flag:
    is_positional = tyro.conf.Positional in notes
    metavar = next((note.metavar for note in notes if getattr(note, "metavar", None)), "")
    help = next((note.help for note in notes if getattr(note, "help", None)), doc)
    inner = _inner(kind)
    is_switch = inner is bool
    choices = tuple(map(str, typing.get_args(inner))) if typing.get_origin(inner) is Literal else ()
    if not metavar and not is_switch:
        names = {int: "INT", float: "FLOAT", Path: "PATH"}
        metavar = field.name.upper() if is_positional else "{" + ",".join(choices) + "}" if choices else ""
        metavar = metavar or ("NAME=VALUE" if typing.get_origin(kind) is dict else names.get(inner, "TEXT"))
    default = None if field.default is dataclasses.MISSING else field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Flag(
        name=field.name,
        help=" ".join(help.split()),
        metavar=metavar,
        default=_shown(default),
        is_positional=is_positional,
        is_required=field.default is field.default_factory is dataclasses.MISSING,
        has_no_form=is_switch and tyro.conf.FlagCreatePairsOff not in notes,
    )


def _inner(kind: Any) -> Any:
    """The type of one value: of the entries of a tuple, without None."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def _shown(default: Any) -> str:
    if default is None or isinstance(default, (bool, dict)) or default in ("", (), Path()):
        return ""
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
