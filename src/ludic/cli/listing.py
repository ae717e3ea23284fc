"""`ludic envs` and `ludic parts`: what is registered, with one line each."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ludic import registry
from ludic.types import ConfigError, MissingExtra
from ludic.types.errors import how_to_install


def envs() -> None:
    """List the environments."""
    _show("env")


def parts(
    kind: Annotated[str, typer.Argument(help="env, agent, context, protocol, parser, tool or algorithm")],
) -> None:
    """List the registered parts of one kind."""
    _show(kind)


def _show(kind: str) -> None:
    table = Table("id", "what it is", box=None, pad_edge=False)
    advice = ""
    for id in registry.list(kind):
        try:
            table.add_row(id, registry.spec(kind, id).summary)
        except MissingExtra as error:
            table.add_row(id, f"[dim]needs the {error.extras!r} extra[/dim]")
            advice = how_to_install(error.extras)
        except ConfigError as error:  # one broken plugin must not hide everybody else's parts
            table.add_row(id, f"[red]{escape(str(error))}[/red]")
    Console().print(table if table.row_count else f"No {kind} is registered.")
    if advice:
        Console(soft_wrap=True).print(escape(f"\n{advice}"))
