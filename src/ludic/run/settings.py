"""Settings as a flat list of keys: of a nested config object, from and to a TOML file, compared with each other.

A config is a frozen dataclass of sections, which are dataclasses themselves. Each field of a section is a key of that section
in the file, and a flag on the command line; key names are unique. A config class may add keys for fields that live elsewhere,
such as those of the library's own dataclasses, by a class attribute `KEYS`: section -> key -> dotted path in the config.
None means "not set" and is left out of a file, so it has to be the default wherever it is allowed. A field that is a tuple of
dataclasses is a list of tables in the file (`[[envs]]`), a dict of them has a table for each name (`[policies.ann]`); neither is a
flag. A field of type `Sections` holds further sections by name, which the class's `added_sections` lists.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ludic.types import ConfigError
from ludic.util.files import parse_json, parse_toml

T = TypeVar("T")


class Sections(dict[str, Any]):
    """Sections of a config that are not fields of its class, such as those of plug-ins: name -> dataclass."""


class MayChange(str):
    """A path in `KEYS` to a setting that a resumed run may have different from the run in the folder."""


def refuse(problems: Iterable[str]) -> None:
    """ConfigError with the first of the sentences that say what is wrong; nothing if there is none."""
    for problem in problems:
        raise ConfigError(problem)


def require_kind(made: Any, kind: type[Any] | Sequence[str], what: str, must: str) -> None:
    """ConfigError unless what a part of the settings has made is of this class, or has these methods."""
    is_one = (
        isinstance(made, kind) if isinstance(kind, type) else all(callable(getattr(made, each, None)) for each in kind)
    )
    if not is_one:
        raise ConfigError(f"{what} makes a {type(made).__name__}; it must {must}.")


def may_change(default: Any) -> Any:
    """A field, of a section's dataclass, that a resumed run may have different from the run in the folder."""
    return dataclasses.field(default=default, metadata={"may_change": True})


def one_of(default: str, choices: Callable[[], Sequence[str]]) -> Any:
    """A field, of a section's dataclass, whose values are those that `choices` finds among what is installed."""
    return dataclasses.field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a config."""

    section: str
    name: str
    path: tuple[str, ...]
    """Path of its value in the config object."""
    kind: Any
    """Its type."""
    help: str
    """The docstring under the field."""
    may_change: bool = False
    """A run with another value is still the same run, so a resume may change it."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_section(self) -> bool:
        """True if it is a whole section of the file: tables with names or in a list, or pairs such as `[teachers]`."""
        return self.path == (self.section,)

    @property
    def holds_arguments(self) -> bool:
        """True if it holds the keyword arguments of a part, `name=value` again and again on the command line."""
        return typing.get_origin(self.kind) is dict and not self.is_section

    @property
    def has_names(self) -> bool:
        """True if its tables have names, `[policies.ann]`; those of a list have none, `[[envs]]`."""
        return self.entry is not None and typing.get_origin(self.kind) is dict

    @property
    def entry(self) -> Any:
        """The dataclass of its entries, if it is a list of tables or has a table for each name; else None."""
        place = {tuple: 0, dict: 1}.get(typing.get_origin(self.kind))
        inner = None if place is None else typing.get_args(self.kind)[place]
        return inner if dataclasses.is_dataclass(inner) else None

    def value_in(self, config: Any) -> Any:
        return functools.reduce(_inside, self.path, config)


def _inside(part: Any, name: str) -> Any:
    return part[name] if isinstance(part, Sections) else getattr(part, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retired:
    """A setting of earlier versions. A config class lists its own by name, in `RETIRED`."""

    section: str
    off: Any
    """The value that changed nothing: a stored file may still have it."""
    reason: str
    """Why the setting is gone, and what takes its place."""


def retired_of(cls: Any) -> Mapping[str, Retired]:
    found: Mapping[str, Retired] = getattr(cls, "RETIRED", {})
    return found


def _settings_of(cls: Any) -> tuple[Setting, ...]:
    """All settings of a config class, section by section."""
    added: Mapping[str, Mapping[str, str]] = getattr(cls, "KEYS", {})
    only_by_key = {path.split(".")[0] for paths in added.values() for path in paths.values()}
    found = []
    for section, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind) and section not in only_by_key:
            found += [_of_field(kind, section, field, (section, field.name)) for field in dataclasses.fields(kind)]
            for name, path in added.get(section, {}).items():
                found.append(_setting(cls, section, name, path))
        elif kind is Sections:
            for name, owner in _sections_of(cls).items():
                found += [
                    _of_field(owner, name, each, (section, name, each.name)) for each in dataclasses.fields(owner)
                ]
        elif typing.get_origin(kind) in (tuple, dict):
            made = Setting(section, section, (section,), kind, docs_of(cls).get(section, ""))
            found.append(made if made.entry is None else dataclasses.replace(made, help=made.entry.__doc__))
    return tuple(found)


def _sections_of(cls: Any) -> dict[str, Any]:
    """The added sections whose package is installed."""
    return {name: owner for name, owner in cls.added_sections().items() if owner is not None}


def _of_field(owner: Any, section: str, field: dataclasses.Field[Any], path: tuple[str, ...]) -> Setting:
    """The setting that a field of a section is."""
    kind, help = typing.get_type_hints(owner)[field.name], docs_of(owner).get(field.name, "")
    if choices := field.metadata.get("choices"):
        kind = Literal[tuple(choices())]
    return Setting(section, field.name, path, kind, help, bool(field.metadata.get("may_change")))


def _setting(cls: type, section: str, name: str, place: str) -> Setting:
    """The setting of a name in `KEYS`."""
    path = tuple(place.split("."))
    owner: Any = cls
    for step in path[:-1]:
        kind = typing.get_type_hints(owner)[step]
        owner = next(k for k in (typing.get_args(kind) or (kind,)) if dataclasses.is_dataclass(k))
    kind, docs = typing.get_type_hints(owner)[path[-1]], docs_of(owner)
    return Setting(section, name, path, kind, docs.get(name) or docs.get(path[-1], ""), isinstance(place, MayChange))


def doc_of_section(cls: Any, section: str) -> str | None:
    """The text of the help page about a section."""
    owner: Any = typing.get_type_hints(cls).get(section)
    for kind in typing.get_type_hints(cls).values():
        if kind is Sections:
            owner = _sections_of(cls).get(section, owner)
    return owner.__doc__ if owner is not None else None


def _docs_of(cls: Any) -> Mapping[str, str]:
    """The docstring under each field of a dataclass."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        body = typing.cast(ast.ClassDef, tree).body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


settings_of: Callable[[Any], tuple[Setting, ...]] = functools.cache(_settings_of)
docs_of: Callable[[Any], Mapping[str, str]] = functools.cache(_docs_of)


def values_of(config: Any) -> dict[str, Any]:
    """Key -> value, over all sections."""
    return {setting.name: setting.value_in(config) for setting in settings_of(type(config))}


def with_values(config: T, values: Mapping[str, Any]) -> T:
    """The config with some settings replaced; every section checks itself again."""
    by_name = {setting.name: setting for setting in settings_of(type(config))}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in by_name:
            old = retired_of(type(config)).get(name)
            raise ConfigError(old.reason if old else f"There is no setting {name!r}.{_nearest(name, by_name)}")
        inside = changes
        for step in by_name[name].path[:-1]:
            inside = inside.setdefault(step, {})
        inside[by_name[name].path[-1]] = value
    return typing.cast(T, _replaced(config, changes))


def with_given(config: T, values: Mapping[str, Any]) -> T:
    """`with_values` for a caller's values, which are converted to the types of their settings and checked."""
    kinds = {setting.name: setting.kind for setting in settings_of(type(config))}
    checked = {name: converted(value, kinds[name], name) if name in kinds else value for name, value in values.items()}
    check_numbers(checked)
    return with_values(config, checked)


def _replaced(part: Any, changes: Mapping[str, Any]) -> Any:
    """The dataclass with some fields replaced; a dict changes the dataclass in that field in the same way."""
    new = dict(changes)
    for name, change in changes.items():
        before = _inside(part, name)
        if isinstance(change, dict) and (dataclasses.is_dataclass(before) or isinstance(before, Sections)):
            new[name] = _replaced(before, change)
    if isinstance(part, Sections):
        return Sections(part | new)
    return dataclasses.replace(part, **new) if new else part


def check_numbers(values: Mapping[str, Any], where: str = "") -> None:
    """ConfigError unless all numbers are finite and all whole numbers fit 64 bits, which is what TOML and torch take.

    An argument of a part may be infinite (`--algo-set clip_high=Infinity`): the part itself decides.
    """
    for name, value in values.items():
        numbers = list(_numbers_in(value))
        is_long = any(isinstance(number, int) and not -(2**63) <= number < 2**63 for number in numbers)
        if is_long or any(number != number for number in numbers) or value in (math.inf, -math.inf):
            must = "a whole number lies between -2^63 and 2^63 - 1" if is_long else "it must be a finite number"
            raise ConfigError(f"{where}{name} = {value}; {must}.")


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, (int, float)):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from _numbers_in(vars(value))
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_in(inner)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that two configs do not share."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        there, now = ("not set" if value is None else _toml_value(value) for value in (self.before, self.now))
        return f"{self.name}: {there} there, {now} now"


def differences(before: Any, now: Any) -> list[Difference]:
    old, new = values_of(before), values_of(now)
    return [Difference(name, old[name], new[name]) for name in old if old[name] != new[name]]


# --- TOML -----------------------------------------------------------------------------------------------------


def read_toml(cls: type[T], path: Path) -> T:
    """The config in a file; what the file does not mention keeps its default."""
    try:
        content = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    return from_table(cls, content, str(path))


def from_table(cls: type[T], content: Mapping[str, Any], where: str) -> T:
    by_section: dict[str, dict[str, Setting]] = {}
    for setting in settings_of(cls):
        by_section.setdefault(setting.section, {})[setting.name] = setting
    values: dict[str, Any] = {}
    absent = {name for name, owner in getattr(cls, "added_sections", dict)().items() if owner is None}
    for section, table in content.items():
        if section in absent:  # its plug-in is not installed; what needs it says so
            continue
        only = next(iter(by_section.get(section, {}).values()), None)
        if only is not None and only.is_section:
            shown = f"[[{section}]]" if typing.get_origin(only.kind) is tuple else section
            values[section] = converted(table, only.kind, f"{where}: {shown}")
            continue
        if section not in by_section or not isinstance(table, dict):
            raise ConfigError(f"{where}: {_unknown(section, None, by_section)}")
        for name, value in table.items():
            old = retired_of(cls).get(name)
            if old is not None and section == old.section:
                refuse([f"{where}: {old.reason}"] if value != old.off else [])
                continue
            if name not in by_section[section]:
                raise ConfigError(f"{where}: {_unknown(name, section, by_section)}")
            values[name] = converted(value, by_section[section][name].kind, f"{where}: {name}")
    check_numbers(values, f"{where}: ")
    return with_values(cls(), values)


def _entry_of(cls: type[T], table: Any, where: str) -> T:
    """The entry that a table is."""
    if isinstance(table, cls):
        return table
    hints = typing.get_type_hints(cls)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, cls))}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} = {table!r}: expected a table with {', '.join(kinds)}.")
    has = f"It has: {', '.join(kinds)}."
    refuse(f"{where}: there is no setting {n!r}.{_nearest(n, kinds)} {has}" for n in table if n not in kinds)
    values = {name: converted(value, kinds[name], f"{where}: {name}") for name, value in table.items()}
    check_numbers(values, f"{where}: ")
    return cls(**values)


def _unknown(name: str, section: str | None, by_section: Mapping[str, Mapping[str, Setting]]) -> str:
    """The problem with a key of a section; or, if `section` is None, with the name of a section."""
    owner = next((other for other, known in by_section.items() if name in known), None)
    if owner is not None and section is None:
        return f"{name} stands outside its section. Put it under [{owner}]."
    if owner is not None:
        return f"{name} belongs under [{owner}], not under [{section}]."
    if section is None:
        return f"there is no section [{name}].{_nearest(name, by_section)} Sections: {', '.join(by_section)}."
    near = _nearest(name, by_section[section]) or _nearest(name, [k for known in by_section.values() for k in known])
    return f"there is no setting {name!r} in [{section}].{near} It has: {', '.join(by_section[section])}."


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def converted(value: Any, kind: Any, where: str) -> Any:
    """A value as the type of its setting; ConfigError if it is none."""
    setting = Setting("", "", (), kind, "")
    if setting.has_names:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {value!r}: expected a table for each name.")
        return {str(name): _entry_of(setting.entry, table, f"{where}.{name}") for name, table in value.items()}
    if setting.entry is not None:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} is a list: write two brackets around its name, once for each entry.")
        return tuple(_entry_of(setting.entry, table, where) for table in value)
    try:
        return msgspec.convert(value, kind, dec_hook=lambda wanted, given: wanted(given))
    except (msgspec.ValidationError, TypeError):
        raise ConfigError(f"{where} = {value!r}: expected {_kind_name(kind)}.") from None


def _kind_name(kind: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind_name(member) for member in inner if member is not type(None))
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is tuple:
        return f"a list, each {_kind_name(inner[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path, as text"}
    if origin is dict:
        return "a table" if inner[1] is Any else f"a table whose values are {_kind_name(inner[1])}"
    return names[kind]


def to_toml(config: Any) -> str:
    """A file that `read_toml` turns into the same config."""
    lines: list[str] = []
    section = ""
    for setting in settings_of(type(config)):
        if setting.is_section and setting.entry is None:
            pairs = setting.value_in(config).items()
            lines += (
                ["", f"[{setting.name}]", *(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in pairs)] if pairs else []
            )
            section = ""
            continue
        if setting.entry is not None:
            found = setting.value_in(config)
            named = found.items() if setting.has_names else [("", each) for each in found]
            for name, each in named:
                head = f"[{setting.name}.{_toml_key(name)}]" if setting.has_names else f"[[{setting.name}]]"
                lines += ["", head, *(f"{k} = {_toml_value(v)}" for k, v in _stated(each).items())]
            section = ""
            continue
        if setting.section != section:
            section = setting.section
            lines += [""] if lines else []
            lines.append(f"[{section}]")
        value = setting.value_in(config)
        if value is not None and value != {}:
            lines.append(f"{setting.name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _stated(entry: Any) -> dict[str, Any]:
    """The fields of an entry that a file has to name."""
    return {name: value for name, value in vars(entry).items() if value is not None and value != {} and value != ()}


def _toml_value(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return _toml_value(_stated(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(str(key))} = {_toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return _toml_text(str(value))


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(text: str) -> str:
    # JSON's escapes are valid in TOML; JSON leaves one character unescaped that TOML does not allow.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- pairs -----------------------------------------------------------------------------------------------------


def read_pair(pair: str, flag: str = "--set") -> tuple[str, Any]:
    """`name=value`; the value is JSON or a Python literal (`True`, `(1, 2)`) where it is one, else text."""
    name, equals, text = pair.partition("=")
    if not equals or not name:
        raise ConfigError(f"{flag} {pair!r} is not of the form name=value.")
    for read in (parse_json, ast.literal_eval):
        try:
            return name, read(text)
        except (ValueError, SyntaxError):
            continue
    return name, text


def storable(value: Any, where: str) -> Any:
    """The value as a TOML file gives it back: lists instead of tuples. ConfigError where a file cannot hold it, such as null."""
    if isinstance(value, (list, tuple)):
        return [storable(inner, where) for inner in value]
    if isinstance(value, dict):
        return {str(key): storable(inner, where) for key, inner in value.items()}
    if not isinstance(value, (bool, int, float, str)):
        raise ConfigError(f"{where}={value!r} cannot be kept in a config file; give text, numbers, true/false, lists.")
    return value
