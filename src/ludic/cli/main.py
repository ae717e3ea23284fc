"""Entry point of the `ludic` command: the list of subcommands, and the one place where errors become exit codes."""

import sys
from typing import Annotated

import typer

from ludic import __version__
from ludic.cli.demo import demo
from ludic.cli.listing import envs, parts
from ludic.cli.play import play
from ludic.cli.serve import serve
from ludic.types import LudicError

app = typer.Typer(
    help="Reinforcement learning of LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"ludic {__version__}")
        raise typer.Exit


app.command()(play)
app.command()(envs)
app.command()(parts)
app.command()(demo)
app.command()(serve)


def main() -> None:
    """Run a subcommand; a mistake of the user's is one line on stderr, not a traceback."""
    try:
        app()
    except LudicError as error:
        print(f"ludic: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `ludic envs | head`
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
