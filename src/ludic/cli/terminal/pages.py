"""The pages that `ludic` prints about itself: the greeting, the list of commands, and the short help of one command.

Each fits a terminal of 24 lines with the prompt under it. Standard library only: `ludic` and `ludic --help` load nothing else.
"""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ludic.cli.terminal.colour import paint

if TYPE_CHECKING:
    from ludic.cli.commands import Command
    from ludic.cli.terminal.flags import Flag

HELP = frozenset({"-h", "--help"})
HELP_ALL = "--help-all"
HEIGHT = 23
"""Lines of a page: a terminal has 24, and the prompt needs one."""
_WIDEST = 100

FIRST_STEPS = (
    ("ludic doctor", "Check what works on this machine."),
    ("ludic play tic_tac_toe", "Play an environment yourself; --watch shows a scripted game."),
    ("ludic new env my", "Make an environment: a small game to replace by yours, with its tests."),
    (
        "ludic train my/src/my/env.py:MyEnv --model tiny --max-tokens 1 --lr 0.003",
        "Train a small model on it from random weights, on the CPU.",
    ),
    ("ludic view", "Look at the run in a browser: rewards, episodes, tokens."),
)
"""Five things to do, in an order in which all of them work."""


def width() -> int:
    """Columns of a page: those of the terminal, at most 100."""
    return max(40, min(shutil.get_terminal_size().columns, _WIDEST))


def wrapped(text: str, indent: int) -> list[str]:
    """The lines of a text that stands in a column; at least one."""
    return textwrap.wrap(text, max(width() - indent, 24), break_on_hyphens=False, break_long_words=False) or [""]


def greeting(version: str, missing: str) -> str:
    """The page that `ludic` prints without arguments. `missing`: a sentence about what training needs and this machine lacks."""
    title, *more = textwrap.wrap(f"Ludic {version}: reinforcement learning of LLM agents. Five things to do:", width())
    lines = [title.replace("Ludic", paint("Ludic", "bold"), 1), *more, ""]
    for number, (command, what) in enumerate(FIRST_STEPS, start=1):
        first, *rest = wrapped(what, 5)
        lines += [f"  {number}  {first}", *(f"     {line}" for line in rest), f"     {paint(command, 'command')}"]
        if missing and command.startswith("ludic train"):
            lines.append(f"     {missing}")
    return "\n".join([*lines, "", "`ludic --help` lists all commands."])


def overview(commands: Mapping[str, "Command"], *, all: bool) -> str:
    """`ludic --help`: the usual commands with a line each, the others by name; with `all`, a line for each of them."""
    shown = [name for name, command in commands.items() if all or command.is_usual]
    column = max(map(len, shown))
    lines = ["usage: ludic [--version] [--help] COMMAND …", "", "Reinforcement learning of LLM agents.", ""]
    for name in shown:
        summary = _cut(commands[name].summary, width() - column - 4)
        lines.append(f"  {paint(name.ljust(column), 'command')}  {summary}")
    others = [name for name in commands if name not in shown]
    if others:
        more = f"More (`ludic {HELP_ALL}`): {', '.join(others)}."
        lines += ["", *textwrap.wrap(more, width(), break_on_hyphens=False)]
    return "\n".join([*lines, "", "`ludic COMMAND --help` shows the flags of a command."])


def help_page(prog: str, description: str, flags: Sequence["Flag"], usual: Sequence[str]) -> str:
    """The short help of a command: as many flags as fit one screen, the usual ones first, and where the rest is."""
    columns = width()
    names = {flag.name: flag for flag in flags}
    order = [names[name] for name in usual if name in names]
    order += [] if usual else [flag for flag in flags if flag.is_positional or flag.is_required]
    order += [] if usual else [flag for flag in flags if flag not in order]
    head = [*_usage(prog, flags, columns), "", *_first_sentences(description, columns), ""]
    from ludic.cli.commands import commands

    command = commands().get(prog.removeprefix("ludic "))
    example = "" if command is None else command.example
    if example:
        head += [f"example: {paint(example, 'command')}", ""]
    foot = textwrap.wrap(f"`{prog} {HELP_ALL}` has the other flags, {len(flags)} in all, and the whole texts.", columns)
    room = HEIGHT - len(head) - (len(f"example: {example}") > columns) - len(foot) - 1
    fit = order[:room]
    rows, is_whole = _rows(fit, columns, room - len(fit))
    if not rows:
        return "\n".join(head[:-1])
    if len(fit) == len(flags):
        foot = [] if is_whole else [f"`{prog} {HELP_ALL}` has the whole texts."]
    return "\n".join([*head, *rows, *([""] if foot else []), *foot])


def _usage(prog: str, flags: Sequence["Flag"], columns: int) -> list[str]:
    positional = [flag.metavar if flag.is_required else f"[{flag.metavar}]" for flag in flags if flag.is_positional]
    required = [f"{flag.flag} {flag.metavar}" for flag in flags if flag.is_required and not flag.is_positional]
    others = ["[flags]"] if any(not flag.is_positional for flag in flags) else []
    return textwrap.wrap(" ".join(["usage:", prog, *required, *positional, *others]), columns, subsequent_indent="    ")


def _first_sentences(description: str, columns: int) -> list[str]:
    """The sentences of the first paragraph that fit two lines, at least one."""
    paragraph = " ".join(re.split(r"\n\s*\n", description.strip())[0].split())
    sentences = re.split(r"(?<=\.) (?=[A-Z])", paragraph)
    while len(sentences) > 1 and len(textwrap.wrap(" ".join(sentences), columns)) > 2:
        sentences.pop()
    return textwrap.wrap(" ".join(sentences), columns)


def _rows(flags: Sequence["Flag"], columns: int, spare: int) -> tuple[list[str], bool]:
    """A line for each flag, the whole text of some while there are spare lines; and whether every text is whole."""
    labels = [flag.metavar if flag.is_positional else f"{flag.flag} {_short(flag.metavar)}".strip() for flag in flags]
    column = min(max(map(len, labels), default=0), columns // 2 - 2)
    rooms = [columns - max(column, len(label)) - 4 for label in labels]
    texts = [
        textwrap.wrap(_with_default(flag.help, flag.default), room, break_on_hyphens=False) or [""]
        for flag, room in zip(flags, rooms, strict=True)
    ]
    is_whole = True
    for index in sorted(range(len(flags)), key=lambda i: (not flags[i].is_positional, len(texts[i]))):
        spare -= len(texts[index]) - 1
        if spare < 0:
            spare += len(texts[index]) - 1
            texts[index], is_whole = [_brief(flags[index].help, flags[index].default, rooms[index])], False
    rows = []
    for label, lines, room in zip(labels, texts, rooms, strict=True):
        rows.append(f"  {paint(label.ljust(column), 'command')}  {lines[0]}".rstrip())
        rows += [" " * (columns - room) + line for line in lines[1:]]
    return rows, is_whole


def _short(metavar: str) -> str:
    return metavar if len(metavar) <= 24 else "NAME"


def _brief(text: str, default: str, room: int) -> str:
    """The text of a flag in one line: its first sentence, cut where that is too long, with the default if there is room."""
    sentence = re.split(r"(?<=[.;]) ", text)[0].rstrip(";.")
    found, with_default = _cut(sentence, room), _with_default(sentence, default)
    return with_default if len(with_default) <= room else found


def _with_default(text: str, default: str) -> str:
    return f"{text} (default: {default})" if default and "efault" not in text else text


def _cut(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    return text[: max(room - 1, 1)].rsplit(" ", 1)[0].rstrip(" ,;:") + "…"
