"""Parses the command lines: flags come from a dataclass of arguments and, for runs and evaluations, from their settings."""

import dataclasses
import difflib
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import tyro

from ludic.cli.terminal.colour import is_coloured
from ludic.cli.terminal.flags import ASK, FlagsAsked, flags_of
from ludic.cli.terminal.pages import HELP, HELP_ALL, help_page
from ludic.run.config.run_config import FILE_SECTIONS, RunConfig
from ludic.run.settings import (
    Setting,
    check_numbers,
    doc_of_section,
    docs_of,
    read_pair,
    read_toml,
    retired_of,
    settings_of,
    storable,
    values_of,
    with_values,
)
from ludic.types import ConfigError, MissingExtra

T = TypeVar("T")
A = TypeVar("A", bound=Any)
"""The dataclass of a command's arguments."""

Target: TypeAlias = Annotated[str, tyro.conf.arg(metavar="TARGET", help_behavior_hint=""), tyro.conf.Positional]
EnvId: TypeAlias = Annotated[str, tyro.conf.arg(metavar="ENV"), tyro.conf.Positional]
Switch: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""An on-switch of a command; it is not a setting, so there is no --no-… flag."""

TRY_AGAIN = 75
"""Exit code of a role that lost what it needs (the policy, Redis, its lease): a retry may succeed (EX_TEMPFAIL)."""

USUAL = (
    "target",
    "model",
    "lora_rank",
    "algo",
    "group_size",
    "steps",
    "lr",
    "max_tokens",
    "data",
    "name",
    "resume",
    "dry_run",
)
"""The settings of a run that most runs set: `--help` shows them."""

MODULES_OF = {
    "train": ("torch", "transformers", "jinja2", "safetensors"),
    "local": ("torch", "transformers", "jinja2"),
    "serve": ("torch", "transformers", "jinja2", "aiohttp"),
    "tinker": ("tinker",),
    "pipeline": ("redis",),
    "endpoint": ("aiohttp",),
}
"""Extra -> modules without which a command that needs it cannot be imported."""


def need_extras(extras: str, needed_for: str) -> None:
    """Raise MissingExtra for those of the comma-separated extras that are not installed."""
    missing = [extra for extra in extras.split(",") if not all(map(_is_installed, MODULES_OF[extra]))]
    if missing:
        raise MissingExtra(",".join(missing), needed_for)


def _is_installed(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None


def parse(arguments: type[A], args: Sequence[str], *, prog: str, description: str = "", usual: Sequence[str] = ()) -> A:
    """The arguments of a command without settings. A wrong value ends the process with code 2, --help and --help-all with code 0.

    `usual`: the flags that --help shows first; without it, in the order of the dataclass, as many as fit one screen.
    """
    if ASK in args:
        raise FlagsAsked(flags_of(arguments))
    description = description or typing.cast(str, arguments.__doc__)
    if HELP_ALL in args:
        args = ["--help"]
    elif not HELP.isdisjoint(args):
        print(help_page(prog, description, flags_of(arguments), usual))
        sys.exit(0)
    tyro._experimental_options["ansi_codes"] = is_coloured()
    parsed, unknown = tyro.cli(
        _with_metavars(arguments),
        args=args,
        prog=prog,
        description=description,
        return_unknown_args=True,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
        compact_help=False,
    )
    if unknown:
        _refuse_unknown(unknown[0].partition("=")[0], arguments, prog)
    return parsed


def _refuse_unknown(given: str, arguments: type, prog: str) -> NoReturn:
    flags = [spelling for flag in flags_of(arguments) if not flag.is_positional for spelling in flag.spellings]
    near = difflib.get_close_matches(given, flags, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    what = "flag" if given.startswith("-") else "further argument"
    raise ConfigError(f"{prog} has no {what} {given}.{hint} `{prog} --help-all` lists its flags.")


def parse_with_settings(
    arguments: type[A], default: T, args: Sequence[str], *, prog: str, description: str, usual: Sequence[str] = ()
) -> tuple[A, T]:
    """The arguments of a command (a target, switches such as --dry-run), and the settings, over those of `default`."""
    rest, pairs = _take_pairs(type(default), args)
    _refuse_retired(type(default), rest)
    for setting in settings_of(type(default)):
        if _is_in_a_file_only(setting):
            _refuse_flag(setting, rest)
    flags = [setting for setting in settings_of(type(default)) if not _is_in_a_file_only(setting)]
    sections: dict[str, list[Setting]] = {}
    for setting in _given(flags, arguments, rest):
        sections.setdefault(setting.section, []).append(setting)
    fields: list[Any] = [("command", _with_metavars(arguments))]
    for section, settings in sections.items():
        made = dataclasses.make_dataclass(section, [_field(s, s.value_in(default)) for s in settings], frozen=True)
        made.__doc__ = doc_of_section(type(default), section)
        fields.append((section, made, dataclasses.field(default_factory=made)))
    typed: Any = parse(
        dataclasses.make_dataclass("typed", fields, frozen=True), rest, prog=prog, description=description, usual=usual
    )
    shown = [setting for settings in sections.values() for setting in settings if _is_flag(setting)]
    values = {setting.name: getattr(getattr(typed, setting.section), setting.name) for setting in shown}
    check_numbers(values)
    config = with_values(default, values)
    config = with_values(config, _merged_pairs(config, default, pairs))
    check_numbers(values_of(config))
    return typed.command, config


def _given(settings: list[Setting], arguments: type, args: Sequence[str]) -> list[Setting]:
    """The settings that tyro needs: it takes milliseconds for each, so those that the command line names. All of them for --help,
    and where a flag is unknown: tyro then suggests similar ones."""
    asked = {arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("-") and not _is_number(arg)}
    by_flag = {flag: setting for setting in settings for flag in (setting.flag, f"--no-{setting.flag[2:]}")}
    switches = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(arguments)}
    if asked - switches - by_flag.keys():
        return settings
    named = {by_flag[flag].name for flag in asked - switches}
    return [setting for setting in settings if setting.name in named]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_in_a_file_only(setting: Setting) -> bool:
    return setting.is_section or setting.section in FILE_SECTIONS


def _refuse_retired(cls: type, args: Sequence[str]) -> None:
    given = {arg.partition("=")[0].replace("_", "-") for arg in args}
    for name, old in retired_of(cls).items():
        flag = name.replace("_", "-")
        if not given.isdisjoint((f"--{flag}", f"--no-{flag}")):
            raise ConfigError(old.reason)


def _refuse_flag(setting: Setting, args: Sequence[str]) -> None:
    if any(arg.partition("=")[0].replace("_", "-") == setting.flag for arg in args):
        if setting.is_section and setting.entry is None:
            where = f"[{setting.name}]"
        elif setting.has_names:
            where = f"[{setting.name}.NAME]"
        elif setting.is_section:
            where = f"[[{setting.name}]]"
        else:
            where = f"{setting.name} = … under [{setting.section}]"
        raise ConfigError(f"{setting.flag} is no flag; write {where} in a file, and give the file as TARGET.")


def _is_flag(setting: Setting) -> bool:
    return setting.path != ("env", "id") and not _is_in_a_file_only(setting)  # the id is the target


def _field(setting: Setting, value: Any) -> tuple[str, Any, Any]:
    """A field of the dataclass for tyro."""
    kind, choices = setting.kind, typing.get_args(setting.kind)
    if not _is_flag(setting):
        return setting.name, Annotated[kind, tyro.conf.Suppress], dataclasses.field(default=value)
    default: Any = dataclasses.field(default_factory=lambda: value)
    shown: dict[str, Any] = {"help": setting.help}
    if setting.holds_arguments:
        return setting.name, Annotated[kind, _PAIRS, tyro.conf.arg(**shown, help_behavior_hint="")], default
    if _may_be_none(kind):
        shown |= _of_optional(kind, value)
    elif typing.get_origin(kind) is tuple and typing.get_args(choices[0]) == ():
        one = _SINGULAR.get(setting.name, setting.name.upper())
        shown |= {"metavar": f"{one}…", "help_behavior_hint": ""}
        if setting.name in _REPEATED:  # `--model a --model b` instead of a list
            shown["metavar"], kind = one, Annotated[kind, tyro.conf.UseAppendAction]
            if setting.name in _REPLACED:
                default = dataclasses.field(default=())
    elif typing.get_origin(kind) is tuple:
        shown["metavar"] = "NAME…"
    return setting.name, Annotated[kind, tyro.conf.arg(**shown)], default


def _may_be_none(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType) and type(None) in typing.get_args(kind)


def _of_optional(kind: Any, value: Any) -> dict[str, Any]:
    """The form in which a help text shows a value that may be left out: INT, and not {None}|INT."""
    inner = next(choice for choice in typing.get_args(kind) if choice is not type(None))
    names, usual = typing.get_args(inner), {str: "TEXT", Path: "PATH"}.get(inner, "")
    metavar = "{" + ",".join(names) + "}" if names else usual or inner.__name__.upper()
    return {"metavar": metavar} | ({"help_behavior_hint": ""} if value is None else {})


def _with_metavars(arguments: type[A]) -> type[A]:
    """The dataclass of arguments for tyro: a subclass that says how the optional ones are shown."""
    kinds = typing.get_type_hints(arguments, include_extras=True)
    fields = [
        (field.name, Annotated[kind, tyro.conf.arg(help=docs_of(arguments).get(field.name), **shown)], field.default)
        for field in dataclasses.fields(arguments)
        if _may_be_none(kind := kinds[field.name])
        for shown in [_of_optional(kind, field.default)]
    ]
    if not fields:
        return arguments
    made = dataclasses.make_dataclass(arguments.__name__, fields, bases=(arguments,), frozen=True)
    made.__doc__ = arguments.__doc__
    return typing.cast(type[A], made)


_SINGULAR = {"tools": "TOOL", "server": "URL", "model": "MODEL", "reward": "REWARD", "correction": "CORRECTION"}
_REPEATED = ("model", "reward", "correction")
_REPLACED = ("correction",)
"""Repeated flags that replace what the file has; tyro appends to it."""

_PAIRS = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="NAME=VALUE",
    instance_from_str=lambda pairs: dict(map(read_pair, pairs)),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda arguments: [f"{name}={value}" for name, value in arguments.items()],
)


def _take_pairs(cls: type, args: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Split into other arguments and NAME=VALUE pairs, which may be repeated and add to those of the file; tyro cannot do that."""
    by_flag = {setting.flag: setting.name for setting in settings_of(cls) if setting.holds_arguments}
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    remaining = iter(args)
    for arg in remaining:
        flag, equals, value = arg.partition("=")
        flag = flag.replace("_", "-")  # --algo_set is --algo-set, as tyro has it for every other flag
        if flag not in by_flag:
            rest.append(arg)
            continue
        name, given = read_pair(value if equals else next(remaining, ""), flag)
        found.setdefault(by_flag[flag], {})[name] = storable(given, f"{flag} {name}")
    return rest, found


def _merged_pairs(config: Any, default: Any, given: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pairs add to those of the file, unless the flags choose another part: parser_set of the file is for the file's parser."""
    values, before = values_of(config), values_of(default)
    merged = {}
    for setting in settings_of(type(config)):
        if setting.holds_arguments:
            part = setting.name.removesuffix("_set")
            is_for_another = values[part] != before[part]
            merged[setting.name] = ({} if is_for_another else before[setting.name]) | given.get(setting.name, {})
    return merged


def flags_for(config: T, default: T) -> list[str]:
    """The flags that make `config` of `default`: `parse_with_settings` the other way round."""
    now, before = values_of(config), values_of(default)
    found: list[str] = []
    for setting in filter(_is_flag, settings_of(type(config))):
        value, part = now[setting.name], setting.name.removesuffix("_set")
        if setting.holds_arguments:
            usual = {} if part != setting.name and now[part] != before[part] else before[setting.name]
            for name, one in value.items():
                if name not in usual or usual[name] != one:
                    found += [setting.flag, _as_pair(name, one)]
        elif value == before[setting.name] or value is None:
            continue
        elif isinstance(value, bool):
            found.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        elif isinstance(value, tuple) and setting.name in _REPEATED:
            found += [text for one in value for text in (setting.flag, str(one))]
        else:
            found += [setting.flag, *map(str, value if isinstance(value, tuple) else [value])]
    return found


def _as_pair(name: str, value: Any) -> str:
    plain = f"{name}={value}"
    return plain if read_pair(plain) == (name, value) else f"{name}={json.dumps(value)}"


def parse_run(
    arguments: type[A], args: Sequence[str], *, prog: str, description: str, usual: Sequence[str] = USUAL
) -> tuple[A, RunConfig]:
    """The arguments of the command, with a `target`, and the run's settings: flags over the target's file over the defaults."""
    command, config = parse_with_settings(arguments, RunConfig(), args, prog=prog, description=description, usual=usual)
    if not command.target and config.stored is None:
        raise ConfigError(
            "TARGET is missing: name an env (`ludic envs` lists them), file.py:Class of your own, a TOML file or the folder of a "
            "run; or give --preferences FILE for dpo, ipo and kto, or --data FILE for sft."
        )
    path = config_file(command.target) if command.target else None
    if path is None:
        return command, replace(config, env=replace(config.env, id=command.target))
    defaults = read_toml(RunConfig, path)
    command, config = parse_with_settings(arguments, defaults, args, prog=prog, description=description)
    if not config.env_ids and config.stored is None:
        raise ConfigError(f'{path} names no env; write id = "…" under [env].')
    return command, config


def config_file(target: str) -> Path | None:
    """The TOML file of a target: itself, or that of a run folder; None for an env."""
    path = Path(target)
    if path.suffix == ".toml":
        return path
    return path / "config.toml" if path.is_dir() and (path / "config.toml").is_file() else None
