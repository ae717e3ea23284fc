"""Settings of a command: one frozen dataclass of sections, from a TOML file and from flags, and back to TOML.

A section of the file is a nested dataclass; a flag is the name of a field, whatever its section, so names are unique.
The docstring under a field is its help text. None means "not set" and is left out of a file, so it has to be the
default wherever it is allowed.
"""

import ast
import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import tyro

from ludic.types import ConfigError

T = TypeVar("T")
W = TypeVar("W")


def read_pair(pair: str, flag: str = "--set") -> tuple[str, Any]:
    """`name=value`; the value is JSON or a Python literal (`True`, `(1, 2)`) where it is one, else text."""
    name, equals, value = pair.partition("=")
    if not equals or not name:
        raise ConfigError(f"{flag} {pair!r} is not of the form name=value.")
    return name, _read_value(value)


def _read_value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def _show_pairs(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in arguments.items()]


# What a field may be beside int, float, bool, str, Path, a Literal and a tuple of texts.
Arguments: TypeAlias = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE",
        instance_from_str=lambda pairs: dict(map(read_pair, pairs)),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=_show_pairs,
    ),
    tyro.conf.arg(help_behavior_hint=""),
]
"""Keyword arguments of a part: a table in the file, `--flag name=value` (again and again) on the command line."""
Switch: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""Something a command does when asked to; not a setting, so nothing has to be able to take it back."""
MaybeInt: TypeAlias = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
MaybeFloat: TypeAlias = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
MaybeText: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
MaybePath: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one section."""

    section: str
    name: str
    kind: Any
    """Its type, without annotations."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def holds_arguments(self) -> bool:
        return typing.get_origin(self.kind) is dict


def settings_of(cls: type) -> list[Setting]:
    """Every setting of a config class, section by section."""
    return [
        Setting(section, field.name, kinds[field.name])
        for section, kind in typing.get_type_hints(cls).items()
        for kinds in [typing.get_type_hints(kind)]
        for field in dataclasses.fields(kind)
    ]


def values_of(config: Any) -> dict[str, Any]:
    """Name -> value over all sections."""
    return {s.name: getattr(getattr(config, s.section), s.name) for s in settings_of(type(config))}


def with_values(config: T, values: Mapping[str, Any]) -> T:
    """The config with some settings replaced; every section checks itself again."""
    changed: dict[str, dict[str, Any]] = {}
    for setting in settings_of(type(config)):
        if setting.name in values:
            changed.setdefault(setting.section, {})[setting.name] = values[setting.name]
    sections = {name: dataclasses.replace(getattr(config, name), **new) for name, new in changed.items()}
    return dataclasses.replace(config, **sections)  # type: ignore[type-var]


def check_numbers(values: Mapping[str, Any], where: str = "") -> None:
    """No setting is NaN or infinite, and whole numbers fit 64 bits, which is what TOML and torch take.

    An argument of a part may be infinite (`--algo-set clip_high=Infinity`): that is for the part to say.
    """
    for name, value in values.items():
        numbers = list(_numbers_in(value))
        if any(isinstance(number, int) and not -(2**63) <= number < 2**63 for number in numbers):
            raise ConfigError(f"{where}{name} = {value}; a whole number lies between -2^63 and 2^63 - 1.")
        if any(number != number for number in numbers) or value in (math.inf, -math.inf):
            raise ConfigError(f"{where}{name} = {value}; it must be a finite number.")


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _numbers_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers_in(inner)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that two configs do not share."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.before)} there, {_shown(self.now)} now"


def _shown(value: Any) -> str:
    return "not set" if value is None else toml_value(value)


def differences(before: Any, now: Any) -> list[Difference]:
    old, new = values_of(before), values_of(now)
    return [Difference(name, old[name], new[name]) for name in old if old[name] != new[name]]


# --- flags ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command(typing.Generic[W, T]):
    """What was typed."""

    words: W
    """Those of the command itself."""
    config: T


def parse_flags(words: type[W], default: T, args: Sequence[str], *, prog: str, description: str) -> Command[W, T]:
    """The words of the command, and the settings, over those of `default`.

    `words` is a dataclass of what is not a setting: the positional argument, switches such as --dry-run. A wrong flag ends
    the process with code 2 and a message that names the nearest one, --help with code 0.
    """
    rest, arguments = _take_arguments(type(default), args)
    sections = [field.name for field in dataclasses.fields(default)]  # type: ignore[arg-type]
    typed = dataclasses.make_dataclass(
        "typed",
        [
            ("command", words),
            *(
                (name, type(getattr(default, name)), dataclasses.field(default=getattr(default, name)))
                for name in sections
            ),
        ],
        frozen=True,
    )
    parsed: Any = tyro.cli(
        typed, args=rest, prog=prog, description=description, config=(tyro.conf.OmitArgPrefixes,), compact_help=False
    )
    config = type(default)(**{name: getattr(parsed, name) for name in sections})
    config = with_values(config, _merged_arguments(config, default, arguments))
    check_numbers(values_of(config))
    return Command(parsed.command, config)


def _merged_arguments(config: Any, default: Any, given: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pairs add to those of the file; but the file's parser_set is for the file's parser, not for one given instead."""
    values, before = values_of(config), values_of(default)
    merged = {}
    for setting in settings_of(type(config)):
        if setting.holds_arguments:
            part = setting.name.removesuffix("_set")
            is_for_another = values[part] != before[part]
            merged[setting.name] = ({} if is_for_another else before[setting.name]) | given.get(setting.name, {})
    return merged


def _take_arguments(cls: type, args: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Pairs can be given again and again and add to those of the file, so they are read here."""
    by_flag = {setting.flag: setting.name for setting in settings_of(cls) if setting.holds_arguments}
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    remaining = iter(args)
    for arg in remaining:
        flag, equals, value = arg.partition("=")
        flag = flag.replace("_", "-")  # --algo_set is --algo-set, as it is for every other flag
        if flag not in by_flag:
            rest.append(arg)
            continue
        name, given = read_pair(value if equals else next(remaining, ""), flag)
        found.setdefault(by_flag[flag], {})[name] = _storable(given, f"{flag} {name}")
    return rest, found


def _storable(value: Any, where: str) -> Any:
    """What a TOML file gives back as it was: no null, lists instead of tuples."""
    if isinstance(value, (list, tuple)):
        return [_storable(inner, where) for inner in value]
    if isinstance(value, dict):
        return {str(key): _storable(inner, where) for key, inner in value.items()}
    if not isinstance(value, (bool, int, float, str)):
        raise ConfigError(f"{where}={value!r} cannot be kept in a config file; give text, numbers, true/false, lists.")
    return value


# --- TOML -----------------------------------------------------------------------------------------------------


def read_toml(cls: type[T], path: Path) -> T:
    """The config in a file; what the file does not mention keeps its default."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    return from_table(cls, content, str(path))


def from_table(cls: type[T], content: Mapping[str, Any], where: str) -> T:
    by_section: dict[str, dict[str, Setting]] = {}
    for setting in settings_of(cls):
        by_section.setdefault(setting.section, {})[setting.name] = setting
    sections = {}
    for section, table in content.items():
        if section not in by_section or not isinstance(table, dict):
            raise ConfigError(_unknown_key(section, by_section, where))
        known = by_section[section]
        for name in table:
            if name not in known:
                raise ConfigError(_unknown_name(section, name, by_section, where))
        given = {name: _read(value, known[name].kind, f"{where}: {name}") for name, value in table.items()}
        check_numbers(given, f"{where}: ")
        sections[section] = typing.get_type_hints(cls)[section](**given)
    return cls(**sections)


def _unknown_key(name: str, by_section: Mapping[str, Mapping[str, Setting]], where: str) -> str:
    """A key outside the sections: either a section with a typo, or a setting in front of its section."""
    owners = [section for section, known in by_section.items() if name in known]
    if owners:
        return f"{where}: {name} stands outside its section. Put it under [{owners[0]}]."
    return f"{where}: there is no section [{name}].{_nearest(name, by_section)} Sections: {', '.join(by_section)}."


def _unknown_name(section: str, name: str, by_section: Mapping[str, Mapping[str, Setting]], where: str) -> str:
    owners = [other for other, known in by_section.items() if name in known]
    if owners:
        return f"{where}: {name} belongs under [{owners[0]}], not under [{section}]."
    everywhere = [each for known in by_section.values() for each in known]
    near = _nearest(name, by_section[section]) or _nearest(name, everywhere)
    return f"{where}: there is no setting {name!r} in [{section}].{near} It has: {', '.join(by_section[section])}."


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _read(value: Any, kind: Any, where: str) -> Any:
    """A TOML value as the field's type."""
    for fits, convert in _readings(kind):
        if fits(value):
            return convert(value)
    raise ConfigError(f"{where} = {value!r}: expected {_kind_name(kind)}.")


def _readings(kind: Any) -> Iterator[tuple[Callable[[Any], bool], Callable[[Any], Any]]]:
    """(does the value fit, how it is taken), for each form that a type accepts."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in inner:
            yield from _readings(member)
    elif origin is Literal:
        yield (lambda value: value in inner), (lambda value: value)
    elif origin is tuple:
        fits_inside = [fits for fits, _ in _readings(inner[0])]
        yield (lambda value: isinstance(value, list) and all(any(f(one) for f in fits_inside) for one in value)), tuple
    elif origin is dict:
        yield (lambda value: isinstance(value, dict)), (lambda value: value)
    elif kind is float:
        yield (lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)), float
    elif kind is Path:
        yield (lambda value: isinstance(value, str)), Path
    else:
        yield (lambda value: type(value) is kind), (lambda value: value)


def _kind_name(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind_name(member) for member in inner if member is not type(None))
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path, as text"}
    if origin is tuple:
        return f"a list, each {_kind_name(inner[0])}"
    return "a table" if origin is dict else names[kind]


def to_toml(config: Any) -> str:
    """A file that `read_toml` turns into the same config."""
    lines: list[str] = []
    values = values_of(config)
    section = ""
    for setting in settings_of(type(config)):
        if setting.section != section:
            section = setting.section
            lines += [""] if lines else []
            lines.append(f"[{section}]")
        value = values[setting.name]
        if value is not None and value != {}:
            lines.append(f"{setting.name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(str(key))} = {toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return _toml_text(str(value))


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(text: str) -> str:
    # JSON's escapes are TOML's too, but for one character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
