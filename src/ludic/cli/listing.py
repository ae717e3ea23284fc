"""`ludic envs`, `ludic parts`: what is registered, and the metrics, with one line each. `ludic export`: a checkpoint for others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.markup import escape
from rich.table import Table

from ludic import registry
from ludic.cli.args import Switch, need_extras, parse
from ludic.cli.terminal.colour import make_console
from ludic.types import ConfigError, MissingExtra
from ludic.types.errors import how_to_install


@dataclass(frozen=True)
class _NoArgs:
    """List the environments."""


@dataclass(frozen=True)
class _PartsArgs:
    """List the registered parts of one kind, or the metrics."""

    kind: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="KIND")]
    """env, agent, context, protocol, parser, tool, reward, filter, curriculum, logger or algorithm; metric lists what runs log"""


@dataclass(frozen=True)
class _ExportArgs:
    """Write a trained model in the format of Hugging Face. See docs/checkpoints.md."""

    run: tyro.conf.Positional[Path]
    """A run folder, or one of its checkpoints."""
    target: tyro.conf.Positional[Path]
    """The folder to make."""
    step: int | None = None
    """Checkpoint of the run; without it, the newest."""
    adapter: Switch = False
    """The adapter of a LoRA run alone, for peft. Without it, base and adapter merged."""
    base: str | None = None
    """The base that the adapter was trained on, where no run folder says it: a folder, a hub id, a .gguf file."""
    with_optimizer: Switch = False
    """Also what a run of one process needs to go on from it; an adapter stays one."""


def envs(args: list[str]) -> int:
    parse(_NoArgs, args, prog="ludic envs")
    return _show("env")


def parts(args: list[str]) -> int:
    kind = parse(_PartsArgs, args, prog="ludic parts").kind
    return _show_metrics() if kind == "metric" else _show(kind)


def export(args: list[str]) -> int:
    given = parse(_ExportArgs, args, prog="ludic export")
    need_extras("train", "ludic export")
    from ludic.run.export import export_run

    print(*export_run(**vars(given)), sep="\n")
    return 0


def _show_metrics() -> int:
    from ludic.eval.report import METRICS as EVAL_METRICS
    from ludic.training.metric_names import METRICS

    table = Table("metric", "what it is", box=None, pad_edge=False)
    for name, meaning in (METRICS | {f"eval/{name}": meaning for name, meaning in EVAL_METRICS.items()}).items():
        table.add_row(name, escape(meaning))
    make_console(soft_wrap=False).print(table)
    return 0


def _show(kind: str) -> int:
    table = Table("id", "what it is", box=None, pad_edge=False)
    advice = ""
    for id in registry.list(kind):
        try:
            table.add_row(id, registry.spec(kind, id).summary)
        except MissingExtra as error:
            table.add_row(id, f"[dim]needs the {error.extras!r} extra[/dim]")
            advice = how_to_install(error.extras)
        except ConfigError as error:  # one broken plugin must not hide the other parts
            table.add_row(id, f"[red]{escape(str(error))}[/red]")
    make_console(soft_wrap=False).print(table if table.row_count else f"No {kind} is registered.")
    if advice:
        make_console().print(escape(f"\n{advice}"))
    return 0
