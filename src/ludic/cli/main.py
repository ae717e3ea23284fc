"""Entry point of the `ludic` command: the list of subcommands, and the one place where errors become exit codes."""

import sys
from typing import Annotated

import typer

from ludic import __version__
from ludic.cli.actor import actor
from ludic.cli.evaluate import evaluate
from ludic.cli.export import export
from ludic.cli.launch import launch
from ludic.cli.listing import envs, parts
from ludic.cli.plan import plan
from ludic.cli.play import play
from ludic.cli.serve import serve
from ludic.cli.train import train
from ludic.types import LudicError

app = typer.Typer(
    help="Reinforcement learning of LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


OWN_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Everything behind the name of the command is for the command to read."""


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"ludic {__version__}")
        raise typer.Exit


app.command()(play)
app.command()(envs)
app.command()(parts)
app.command()(serve)
app.command()(export)
app.command()(plan)
# Their flags are the run's settings, and so is their help.
app.command(context_settings=OWN_FLAGS)(train)
app.command(context_settings=OWN_FLAGS)(actor)
app.command(context_settings=OWN_FLAGS)(launch)
app.command("eval", context_settings=OWN_FLAGS)(evaluate)


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
