"""A command line in this process: what it prints, its exit code, and the error that `main` would show in one line."""

import contextlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

from ludic.cli.main import find_command


@dataclass(frozen=True)
class Result:
    exit_code: int
    output: str
    """Of stdout and stderr."""
    exception: Exception | None = None


def invoke(args: Sequence[str], input: str = "") -> Result:
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.object(sys, "stdin", io.StringIO(input)),
    ):
        try:
            return Result(find_command(args)(list(args[1:])), printed.getvalue())
        except SystemExit as ended:
            return Result(int(ended.code or 0), printed.getvalue())
        except Exception as error:  # noqa: BLE001 - a test asks which it was
            return Result(1, printed.getvalue(), error)
