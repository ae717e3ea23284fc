"""The subcommands of `ludic`: those of the core, and those that plug-ins add by the entry-point group `ludic.commands`.

A command is a function from its arguments to an exit code, imported when it is called. Standard library only.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ludic import plugins


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand, as the object that an entry point names."""

    target: str
    """module:function"""
    summary: str
    """A sentence for `ludic --help`."""
    example: str = ""
    """A command line that its help shows."""
    is_usual: bool = False
    """`ludic --help` has a line for it, and not only its name."""

    def load(self) -> Callable[[list[str]], int]:
        module, _, function = self.target.partition(":")
        found: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
        return found


CORE: Mapping[str, Command] = {
    "train": Command(
        "ludic.cli.train:train",
        "Train a model on an environment.",
        "ludic train tic_tac_toe --model smollm2-135m --lora-rank 16 --name ttt",
        is_usual=True,
    ),
    "eval": Command(
        "ludic.cli.eval.run:evaluate",
        "Measure how well a model plays an environment.",
        "ludic eval tic_tac_toe --model tiny --num-tasks 50",
        is_usual=True,
    ),
    "play": Command(
        "ludic.cli.play:play",
        "Play an environment yourself, or watch it being played.",
        "ludic play tic_tac_toe --seed 3",
        is_usual=True,
    ),
    "envs": Command("ludic.cli.listing:envs", "List the environments.", is_usual=True),
    "new": Command(
        "ludic.cli.new:new", "Make the package of a new environment.", "ludic new env my_env", is_usual=True
    ),
    "export": Command(
        "ludic.cli.listing:export",
        "Write a trained model in the format of Hugging Face.",
        "ludic export runs/ttt my-model",
        is_usual=True,
    ),
    "parts": Command("ludic.cli.listing:parts", "List the registered parts of one kind.", "ludic parts algorithm"),
}


@functools.cache
def commands() -> dict[str, Command]:
    """Name -> command. A plug-in whose package is gone has none."""
    found = dict(CORE)
    for point in plugins.points("commands"):
        try:
            found.setdefault(point.name, point.load())
        except ImportError:
            continue
    return found


def find(name: str) -> Command:
    """The command of that name; LudicError if there is none, with what to install if a plug-in has it."""
    if name in CORE:
        return CORE[name]
    point = plugins.find("commands", name)
    if point is not None:
        found: Command = point.load()
        return found
    import difflib

    from ludic.types.errors import LudicError

    if plugins.is_stale("commands", name):
        raise LudicError(f"there is no command {name!r} yet. {plugins.STALE}")
    near = difflib.get_close_matches(name, commands(), n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "`ludic --help` lists them."
    raise LudicError(f"there is no command {name!r}. {hint}")
