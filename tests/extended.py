"""The second tier: tests that `make test` leaves out and `make test-all` runs.

A test belongs there if a cheaper one in the default tier covers the same part, and its mark names that one:
`@pytest.mark.extended(covered_by="tests/integration/test_x.py::test_y")`. Without a file, `test_y` is in the file of the mark.
Further cases of a parametrized test are marked by `cases`. tests/contract/test_extended.py checks that what covers a test exists
and is in the default tier. `python -m tests.extended OUTPUT FILE…` lists the tests of both tiers for it.
"""

import json
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

WITHOUT = "not extended"
"""What a marker expression says that leaves the tier out."""


def are_left_out(config: pytest.Config) -> bool:
    return WITHOUT in config.option.markexpr


def cases(values: Iterable[Any], *, default: Collection[Any]) -> list[Any]:
    """Cases of a parametrized test: all but the `default` ones are extended, and those cover them."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    extended = pytest.mark.extended
    return [value if value in default else pytest.param(*row, marks=extended) for value, row in rows]


def chosen_cases(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The cases of the tests that are about to run with this fixture, for one that computes what all of them look at."""
    tests = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    given = [
        test.callspec.params for test in tests if request.fixturename in test.fixturenames and hasattr(test, "callspec")
    ]
    return list(dict.fromkeys(parameters[parameter] for parameters in given if parameter in parameters))


class LeftOut:
    """A plugin that counts the extended tests that a run leaves out, and says so at its end."""

    def __init__(self) -> None:
        self.num = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.num += sum(item.get_closest_marker("extended") is not None for item in items)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["num_left_out"] = self.num

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects all tests; one that crashed says nothing."""
        self.num = max(self.num, getattr(node, "workeroutput", {}).get("num_left_out", 0))

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if self.num and are_left_out(config):
            said = (
                "extended tests were left out: they did not run and do not count as passed. `make test-all` runs them."
            )
            terminalreporter.write_line(f"{self.num} {said}")


class Tiers:
    """A plugin that lists the tests of the default tier, and those of the second with what covers them."""

    def __init__(self) -> None:
        self.default: list[str] = []
        self.extended: list[tuple[str, str]] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            marks = list(item.iter_markers("extended"))
            file, test = item.nodeid.split("[", 1)[0].split("::", 1)
            named = [mark.kwargs["covered_by"] for mark in marks if mark.kwargs] or [test]
            self.extended += [(item.nodeid, name if "::" in name else f"{file}::{name}") for name in named if marks]
            if not marks:
                self.default.append(item.nodeid)


def main(output: str, *files: str) -> int:
    tiers = Tiers()
    code = pytest.main(["--collect-only", "-p", "no:cacheprovider", *files], plugins=[tiers])
    Path(output).write_text(json.dumps({"default": tiers.default, "extended": tiers.extended}))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
