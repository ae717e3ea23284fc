"""Entry point of the `ludic` command: the list of subcommands, and the one place where errors become exit codes.

A subcommand is a function from its arguments to an exit code, imported when it is called: `ludic --help` loads none of them, and
nothing beside the standard library.
"""

import atexit
import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from ludic import __version__
from ludic.cli.terminal.colour import harmless, make_log_harmless
from ludic.cli.terminal.pages import HELP, HELP_ALL, greeting, overview

COMMANDS = {
    "train": ("ludic.cli.train:train", "Train a model on an environment."),
    "eval": ("ludic.cli.eval.run:evaluate", "Measure how well a model plays an environment."),
    "play": ("ludic.cli.play:play", "Play an environment yourself, or watch it being played."),
    "serve": ("ludic.cli.servers.serve:serve", "Serve a model over HTTP, in the way of OpenAI's API."),
    "gateway": ("ludic.cli.servers.gateway:gateway", "Serve a model to agents and record their sessions."),
    "sandbox-server": ("ludic.cli.servers.sandbox_server:sandbox_server", "Run untrusted programs for other machines."),
    "env-server": ("ludic.cli.servers.env_server:env_server", "Hold environments for runs on other machines."),
    "export": ("ludic.cli.listing:export", "Write a trained model in the format of Hugging Face."),
    "optimize-prompt": (
        "ludic.cli.prompts.command:optimize_prompt",
        "Search for a better system prompt; no weights are changed.",
    ),
    "rescore": ("ludic.cli.rescore:rescore_run", "Score saved rollouts with another reward or judge."),
    "launch": ("ludic.cli.pipeline.command:launch", "Train with actors and a learner in separate processes."),
    "actor": ("ludic.cli.pipeline.command:actor", "Play for the learner of a pipeline."),
    "view": ("ludic.cli.view:view", "Look at runs in a browser: metrics, groups, rollouts, tokens."),
    "show": ("ludic.cli.view:show", "Show a run's rollouts in the terminal."),
    "plot": ("ludic.cli.plot:plot", "Draw the curves of runs, in the terminal or as a picture."),
    "plan": ("ludic.cli.plan:plan", "Say what fits on how many GPUs."),
    "envs": ("ludic.cli.listing:envs", "List the environments."),
    "new": ("ludic.cli.new:new", "Make the package of a new environment."),
    "doctor": ("ludic.cli.doctor.command:doctor", "Check what works on this machine, and how to repair the rest."),
    "parts": ("ludic.cli.listing:parts", "List the registered parts of one kind."),
}


BASE = ("numpy", "msgspec", "rich", "tyro")
"""The packages of the base install."""

USUAL = ("train", "eval", "play", "view", "show", "plot", "envs", "new", "export", "serve", "gateway", "doctor")
"""The commands that `ludic --help` has a line for; it names the others."""


def find_command(args: Sequence[str]) -> Callable[[list[str]], int]:
    """The function for a command line, which takes the arguments after the command; LudicError if there is no such command."""
    if not args:
        return partial(_print_text, greeting(__version__, _what_training_needs()))
    if args[0] in HELP or args[0] == HELP_ALL:
        return partial(_print_text, overview(COMMANDS, USUAL, all=args[0] == HELP_ALL))
    if args[0] == "--version":
        return partial(_print_text, f"ludic {__version__}")
    if args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "`ludic --help` lists them."
        from ludic.types.errors import LudicError

        raise LudicError(f"there is no command {args[0]!r}. {hint}")
    module, _, function = COMMANDS[args[0]][0].partition(":")
    found: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return found


def _what_training_needs() -> str:
    if all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return ""
    from ludic.cli.doctor.packages import install

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
