"""`ludic completion bash|zsh|fish`: a completion script for the shell, written to stdout. See docs/install.md.

The script is plain shell and holds all names: completing starts no Python. Flags and their values come from the dataclasses that
the commands give to `ludic.cli.args.parse`; ids of envs and other parts from the registry.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from ludic import __version__, registry
from ludic.catalog import BUILTINS
from ludic.cli.args import parse
from ludic.cli.main import COMMANDS, find_command
from ludic.cli.terminal.flags import Flag, flags_of_command
from ludic.models import SMOLLM2, TINY

SHARED = (
    ("-h", "The flags that are used most"),
    ("--help", "The flags that are used most"),
    ("--help-all", "All flags"),
)
"""Flags that every command has."""
Commands = Mapping[str, tuple[Flag, ...]]


@dataclass(frozen=True)
class CompletionArgs:
    """Write the completion of a shell to stdout: commands, flags, their values, ids of envs and other parts."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """For which shell. Write it again after an update of Ludic, or after a package with envs was installed."""


def completion(args: list[str]) -> int:
    given = parse(CompletionArgs, args, prog="ludic completion")
    commands = {name: flags_of_command(find_command([name])) for name in COMMANDS}
    print({"bash": bash, "zsh": zsh, "fish": fish}[given.shell](commands), end="")
    return 0


def words_of(flag: Flag) -> tuple[str, ...]:
    """The values that are offered for a flag; a file or a folder may be one, too, unless it has `choices`."""
    if flag.choices:
        return flag.choices
    if flag.parts:
        return tuple(registry.list(flag.parts))
    if flag.name == "kind":
        return tuple(BUILTINS)
    return (SMOLLM2, TINY) if flag.name in _MODELS else ()


_MODELS = ("model", "reference", "teacher", "judge")


def takes_file(flag: Flag) -> bool:
    """Whether a path can be its value; parts and models may also be the user's files."""
    return flag.is_path or bool(flag.parts) or flag.name in _MODELS


def _told(flag: Flag) -> str:
    """Its first sentence, for the shells that show one."""
    return re.split(r"(?<=[.;]) ", flag.help)[0].rstrip(".;")


# --- bash ---


def bash(commands: Commands) -> str:
    """Works with bash 3.2 and later, without the package bash-completion."""
    flags, switches, places, values = [], [], [], dict[tuple[str, str], list[str]]()
    for name, all_flags in commands.items():
        options = [flag for flag in all_flags if not flag.is_positional]
        spelled = [spelling for flag in options for spelling in flag.spellings]
        flags.append(f"        {name}) flags='{' '.join([*spelled, '--help', '--help-all'])}' ;;")
        without_value = [spelling for flag in options if not flag.takes_value for spelling in flag.spellings]
        switches.append(f"        {name}) switches=' {' '.join([*without_value, '--help', '--help-all'])} ' ;;")
        for flag in options:
            if flag.takes_value:
                values.setdefault((_bash_values(flag), flag.flag), []).append(name)
        positional = [flag for flag in all_flags if flag.is_positional]
        for number, flag in enumerate(positional):
            place = f"{name}:*" if flag.is_repeated else f"{name}:{number}"
            places.append(f"        {place}) {_bash_values(flag)} ;;")
    cases = [
        f"        {'|'.join(f'{name}:{flag}' for name in names)}) {value} ;;" for (value, flag), names in values.items()
    ]
    return _BASH.format(
        version=__version__,
        commands=" ".join(commands),
        flags="\n".join(flags),
        switches="\n".join(switches),
        values="\n".join(cases),
        places="\n".join(places),
    )


def _bash_values(flag: Flag) -> str:
    return f"words='{' '.join(words_of(flag))}' files={'yes' if takes_file(flag) else ''}"


_BASH = """\
# Completion of `ludic` {version} for bash, written by `ludic completion bash`.
_ludic() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    local flags='' switches='' words='' files='' asked='' number=0 index word
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{commands} --help --help-all --version' -- "$cur"))
        _ludic_no_files
        return
    fi
    case "$command" in
{flags}
        *) return ;;
    esac
    case "$command" in
{switches}
    esac
    # readline splits `--flag=value` into three words
    if [ "$cur" = '=' ]; then cur='' asked="$before"
    elif [ "$before" = '=' ]; then asked="${{COMP_WORDS[COMP_CWORD-2]}}"
    elif [[ "$before" == --* && "$switches" != *" $before "* ]]; then asked="$before"
    fi
    if [ -n "$asked" ]; then
        case "$command:${{asked//_/-}}" in
{values}
        esac
    elif [[ "$cur" == -* ]]; then
        words="$flags"
    else
        for ((index = 2; index < COMP_CWORD; index++)); do
            word="${{COMP_WORDS[index]}}"
            if [[ "$word" == --* ]]; then
                [ "${{COMP_WORDS[index+1]}}" = '=' ] && ((index++))
                [[ "$switches" == *" $word "* ]] || ((index++))
            else
                ((number++))
            fi
        done
        case "$command:$number" in
{places}
            *) words="$flags" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    [ -n "$files" ] || _ludic_no_files
}}
_ludic_no_files() {{
    type compopt > /dev/null 2>&1 && compopt +o default 2> /dev/null
}}
complete -o default -F _ludic ludic
"""


# --- zsh ---


def zsh(commands: Commands) -> str:
    branches = []
    for name, flags in commands.items():
        specs = [spec for flag in flags for spec in _zsh_specs(flag)]
        specs += [f"{_quoted(f'{flag}[{told}]')}" for flag, told in SHARED]
        branches.append(
            f"        {name})\n            _arguments -s \\\n                " + " \\\n                ".join(specs)
        )
        branches[-1] += " ;;"
    told = "\n".join(f"        {_quoted(f'{name}:{COMMANDS[name][1]}')}" for name in commands)
    return _ZSH.format(version=__version__, commands=told, branches="\n".join(branches))


def _zsh_specs(flag: Flag) -> list[str]:
    told = re.sub(r"([\[\]:\\])", r"\\\1", _told(flag))
    action = _zsh_action(flag)
    if flag.is_positional:
        return [_quoted(f"{'*' if flag.is_repeated else ''}:{flag.name}:{action}")]
    if not flag.takes_value:
        return [_quoted(f"{spelling}[{told}]") for spelling in flag.spellings]
    return [_quoted(f"{'*' if flag.is_repeated else ''}{flag.flag}=[{told}]:{flag.name}:{action}")]


def _zsh_action(flag: Flag) -> str:
    words = " ".join(words_of(flag))
    if words and takes_file(flag):
        return f" _ludic_name_or_file {words}"
    return f"({words})" if words else "_files" if takes_file(flag) else " "


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_ZSH = """\
#compdef ludic
# Completion of `ludic` {version} for zsh, written by `ludic completion zsh`.
_ludic() {{
    local curcontext="$curcontext" state line
    local -a commands
    commands=(
{commands}
    )
    _arguments -C '--version[Show the version]' '--help[List the commands]' '--help-all[List all commands]' \\
        '1: :->command' '*:: :->rest'
    case "$state" in
        command) _describe -t commands 'command' commands ;;
        rest) _ludic_rest ;;
    esac
}}
_ludic_rest() {{
    case "$words[1]" in
{branches}
    esac
}}
_ludic_name_or_file() {{
    _alternative "names:name:($*)" 'files:file:_files'
}}
if [ "$funcstack[1]" = _ludic ]; then _ludic "$@"; else compdef _ludic ludic; fi
"""


# --- fish ---


def fish(commands: Commands) -> str:
    lines = [_FISH.format(version=__version__)]
    for name in commands:
        lines.append(f"complete -c ludic -f -n __ludic_no_command -a {name} -d {_fish_quoted(COMMANDS[name][1])}")
    lines += [f"complete -c ludic -f -n __ludic_no_command -l {name}" for name in ("version", "help", "help-all")]
    for name, flags in commands.items():
        head = f"complete -c ludic -n '__ludic_is {name}'"
        lines += [f"{head} -l {flag[2:]} -d {_fish_quoted(told)}" for flag, told in SHARED if flag.startswith("--")]
        positional = [flag for flag in flags if flag.is_positional]
        files = "" if any(map(takes_file, positional)) else " -f"
        words = [word for flag in positional for word in words_of(flag)]
        if words or files:
            lines.append(f"{head}{files}" + (f" -a {_fish_quoted(' '.join(words))}" if words else ""))
        lines += [f"{head} {line}" for flag in flags if not flag.is_positional for line in _fish_flag(flag)]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> Sequence[str]:
    told = f"-d {_fish_quoted(_told(flag))}"
    if not flag.takes_value:
        return [f"-l {spelling[2:]} {told}" for spelling in flag.spellings]
    words = words_of(flag)
    values = f" -a {_fish_quoted(' '.join(words))}" if words else ""
    return [f"-l {flag.flag[2:]} {'-r -F' if takes_file(flag) else '-x'}{values} {told}"]


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_FISH = """\
# Completion of `ludic` {version} for fish, written by `ludic completion fish`.
function __ludic_no_command
    test (count (commandline -opc)) -eq 1
end
function __ludic_is
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test $words[2] = $argv[1]
end"""
