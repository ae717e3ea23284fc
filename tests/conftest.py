"""What `make test-fast` leaves out, and how `make test` divides the files between its workers.

Both follow from tests/seconds.json: the seconds that each file takes on a quiet core, where they are more than one. Make it
again with `pytest -n 2 --dist loadfile --write-seconds tests` when files have become faster or slower.
"""

import gc
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test

TESTS = Path(__file__).parent
TABLE = TESTS / "seconds.json"
SECONDS: dict[str, float] = json.loads(TABLE.read_text())
SLOW_FROM_S = 3.0
"""A file that takes longer is slow, whatever its tests say; and so is a test of Hypothesis, which is a hundred tests."""
SLOW_TO_IMPORT = ("adapters/test_verifiers.py", "tools/test_mcp_tools.py")
"""Five seconds and one, in each worker: these packages define hundreds of pydantic models."""
VLLM = "one vLLM server"
USE_VLLM = (
    "test_live_vllm_client.py", "test_vllm_adapter.py", "test_vllm_server.py", "test_vllm_training.py", "test_vllm_weights.py",
)  # fmt: skip
"""These share a session's vLLM servers, which take half a minute of computing each to start: one worker takes all of them."""

gc.disable()  # until everything is imported: nothing is garbage yet, and going through it takes seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help=f"measure the files and write {TABLE.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-seconds"):
        config.pluginmanager.register(Stopwatch())


def seconds(file: str) -> float:
    """`file` is a path, or a node's id up to its first colon."""
    return SECONDS.get(file.rsplit("tests/", 1)[-1], 0.0)


def is_slow(path: Path) -> bool:
    return seconds(path.as_posix()) >= SLOW_FROM_S or path.as_posix().endswith(SLOW_TO_IMPORT)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are not wanted, their files are not even imported."""
    return True if "not slow" in config.option.markexpr and is_slow(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, so that the workers end together."""
    for item in items:
        if is_slow(item.path) or is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.slow)
    if config.getvalue("dist") == "loadfile":
        weights: dict[str, float] = defaultdict(float)
        for file in {item.nodeid.split("::")[0] for item in items}:
            weights[scope_of(file)] += seconds(file)
        items.sort(key=lambda item: -weights[scope_of(item.nodeid.split("::")[0])])


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays; tests are searched for their own garbage alone
    gc.enable()


def scope_of(file: str) -> str:
    """What stays together on one worker."""
    return VLLM if file.endswith(USE_VLLM) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

    return ByServer(config, log)


class Stopwatch:
    """Adds up what the tests of each file take."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.taken[report.nodeid.split("::")[0].removeprefix("tests/")] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):  # a worker sees its own files alone
            table = {file: round(taken, 1) for file, taken in sorted(self.taken.items()) if taken >= 1.0}
            TABLE.write_text(json.dumps(table, indent=1) + "\n")
