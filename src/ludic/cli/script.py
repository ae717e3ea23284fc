"""The command line of a script: `run_script` calls its main, `parse_script` gives it the flags of `ludic train`.

    def main(args):
        flags, config = parse_script(__doc__, args, steps=100)     # every flag of `ludic train`; this script's own defaults
        return train_script(build(config, env=MyEnv), flags)

    if __name__ == "__main__":
        run_script(main)

All of examples/ begin like this.
"""

import asyncio
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ludic.cli.args import USUAL, parse_with_settings
from ludic.cli.terminal.colour import harmless, make_log_harmless
from ludic.cli.train import ScriptFlags, reported, show_plan
from ludic.run.config.run_config import RunConfig
from ludic.run.settings import with_values
from ludic.types import LudicError
from ludic.types.errors import RunComplete, full_gpu

if TYPE_CHECKING:
    from ludic.run import Run  # loads torch

F = TypeVar("F")


def parse_script(
    description: str | None,
    args: Sequence[str],
    flags: type[F] = ScriptFlags,  # type: ignore[assignment]
    **defaults: Any,
) -> tuple[F, RunConfig]:
    """The script's own flags, and the settings of a run: flags over `defaults` over those of `ludic train`."""
    default = with_values(RunConfig(), defaults)
    prog = f"python {sys.argv[0]}"
    return parse_with_settings(flags, default, args, prog=prog, description=description or "", usual=USUAL)


def train_script(run: "Run", flags: ScriptFlags) -> int:
    """Train like `ludic train`; messages name this script where they say how to resume."""
    again = shlex.join(["python", *(arg for arg in sys.argv if arg != "--resume")])
    run.resolved = replace(run.resolved, parts=replace(run.resolved.parts, command=again))
    if flags.dry_run:
        return show_plan(run, resume=flags.resume)
    with reported(run, resume=flags.resume) as report:
        run.prepare(resume=flags.resume)
        report.result = asyncio.run(run.train_async())
    return report.code


def run_script(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Call `main` with the arguments of the command line; a mistake of the user's is one line on stderr."""
    try:
        make_log_harmless()
        sys.exit(main(sys.argv[1:]) or 0)
    except RunComplete as done:
        print(harmless(str(done)))
        sys.exit(0)
    except LudicError as mistake:
        sys.exit(f"{Path(sys.argv[0]).stem}: {harmless(str(mistake))}")
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        if text := full_gpu(error):
            sys.exit(f"{Path(sys.argv[0]).stem}: {text}")
        raise
