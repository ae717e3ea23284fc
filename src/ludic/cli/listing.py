"""`ludic envs` and `ludic parts`: what is registered, with one line each."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ludic import registry


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
    for id in registry.list(kind):
        table.add_row(id, registry.spec(kind, id).summary)
    Console().print(table if table.row_count else f"No {kind} is registered.")
