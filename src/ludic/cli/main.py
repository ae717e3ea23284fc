"""Entry point of the `ludic` command: the list of subcommands, and the one place where errors become exit codes."""

import sys

import typer

from ludic.cli.demo import demo
from ludic.cli.listing import envs, parts
from ludic.cli.play import play
from ludic.types import LudicError

app = typer.Typer(
    help="Reinforcement learning of LLM agents: try environments, look at rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(play)
app.command()(envs)
app.command()(parts)
app.command()(demo)


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
