"""Entry point of the `ludic` command, and the one place where errors become exit codes.

commands.py lists the subcommands. `ludic --help` loads none of them, and only the standard library.
"""

import atexit
import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from ludic import __version__
from ludic.cli import commands
from ludic.cli.terminal.colour import harmless, make_log_harmless
from ludic.cli.terminal.pages import HELP, HELP_ALL, greeting, overview
from ludic.util.lazy import is_plugin, missing

BASE = ("numpy", "msgspec", "rich", "tyro")
"""The packages of the base install."""


def find_command(args: Sequence[str]) -> Callable[[list[str]], int]:
    """The function for a command line, which takes the arguments after the command; LudicError if there is no such command."""
    if not args:
        return partial(_print_text, greeting(__version__, _what_training_needs()))
    if args[0] in HELP or args[0] == HELP_ALL:
        return partial(_print_text, overview(commands.commands(), all=args[0] == HELP_ALL))
    if args[0] == "--version":
        return partial(_print_text, f"ludic {__version__}")
    return commands.find(args[0]).load()


def _what_training_needs() -> str:
    if all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return ""
    from ludic.util.packages import install

    return f"First: {install(['train'])}"


def _print_text(text: str, _: list[str]) -> int:
    print(text)
    return 0


def main() -> None:
    """Run a subcommand. Python waits at its end for every thread that is no daemon; this process does so for a few seconds."""
    ending, code = threading.Event(), 1
    try:
        _run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        threading._register_atexit(ending.set)  # type: ignore[attr-defined]
        threading.Thread(target=_leave_threads, args=(ending, code), daemon=True).start()


def _leave_threads(ending: threading.Event, code: int) -> None:
    ending.wait()
    time.sleep(_THREADS_S)
    main_thread = threading.main_thread()
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main_thread]
    if left:
        print(
            f"ludic: ended without {harmless(', '.join(left)):.200}: threads that an env or a tool left running.",
            file=sys.stderr,
        )
        atexit._run_exitfuncs()  # as Python does once all threads have ended: end processes, remove folders
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or file
            sys.stdout.flush()
        os._exit(code)


_THREADS_S = 5.0


def _run() -> None:
    """Print a user's mistake as one line on stderr."""
    try:
        make_log_harmless()
        command = find_command(sys.argv[1:])
        code = command(sys.argv[2:])
        sys.stdout.flush()  # a closed pipe is noticed here
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `ludic envs | head`
        sys.stderr.close()
        sys.exit(141)
    except ModuleNotFoundError as error:
        if is_plugin(error.name):
            print(f"ludic: {missing(str(error.name), f'`ludic {sys.argv[1]}`')}", file=sys.stderr)
            sys.exit(2)
        if error.name not in BASE:
            raise
        print(f"ludic: the package {error.name!r} is missing; `ludic doctor` says how to install it.", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        from ludic.types.errors import LudicError, RunComplete, full_gpu

        text = str(error) if isinstance(error, LudicError) else full_gpu(error)
        if text is None:
            raise
        if isinstance(error, RunComplete):
            print(harmless(text))
            return
        print(f"ludic: {harmless(text)}", file=sys.stderr)
        sys.exit(2)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
