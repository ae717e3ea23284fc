"""What `make test-fast` and `make test` leave out, and how `make test` divides the files between its workers.

The first and the last follow from tests/seconds.json: how long files and tests take on a quiet core. Make it again, on a quiet
machine, with `pytest -n 2 --dist loadfile --write-seconds tests`. A test that it does not know counts as quick. What only
`make test-all` runs is marked `extended` (tests/extended.py).
"""

import ast
import functools
import gc
import json
import os
import platform
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import pytest

from tests import extended, warm_python

TABLE = Path(__file__).with_name("seconds.json")
MEASURED = json.loads(TABLE.read_text())
SLOW_TESTS = frozenset(MEASURED["slow_tests"])
SLOW_FROM_S, SLOW_IN_ALL_FROM_S = 0.05, 2.0
"""A test whose cases take longer on average, or together, is slow, whether its file says so or not; four of five cases are
none of those."""
QUICK = ("tests/unit/", "tests/contract/", "tests/golden/")
"""The folders of `make test-fast`."""
SLOW_TO_IMPORT = ("adapters/test_verifiers.py", "adapters/test_reasoning_gym.py", "tools/test_mcp_tools.py")
"""Seconds in each worker, for the pydantic models of these packages and a hundred generators. `make test-fast` leaves them out."""
TOGETHER = {
    "one vLLM server": (
        "test_live_vllm_client.py", "test_vllm_adapter.py", "test_vllm_server.py", "test_vllm_training.py", "test_vllm_weights.py",
        "test_gateway_vllm.py",
    ),
    "one SmolLM2": ("test_local_engine_smollm2.py", "test_smollm2_template.py", "test_gateway_clients.py"),
}  # fmt: skip
"""These share what a session has once: one worker takes all of them."""
COMPUTING = (
    "tests/golden/", "tests/contract/", "tests/unit/training/", "tests/unit/models/", "tests/unit/scaling/", "tests/unit/minimal/",
    "tests/unit/envs/adapters/", "tests/unit/inference/test_real_templates.py", "tests/examples/test_folding_example.py",
    "tests/examples/test_opd_example.py", "tests/examples/test_rft_example.py", "one SmolLM2",
)  # fmt: skip
HURRIED = (
    "training/test_checkpoint.py", "training/test_loggers.py", "training/test_tinker_trainer.py", "training/test_trainer.py",
    "training/test_trainer_faults.py",
)  # fmt: skip
"""These compute as well, but hold a process or a coroutine to a limit."""
WAITING = (
    "one vLLM server", "test_two_hosts.py", "test_fsdp_endings.py", "test_pipeline_faults.py", "test_launch_process.py",
    "test_gateway_faults.py", "test_sandbox_lifetime.py", "test_sandbox_hostile.py", "test_vllm_process.py", "test_supervisor.py",
    "test_containers.py", "test_remote_sandbox.py", "test_sandbox.py", "test_env_workers.py",
)  # fmt: skip
"""These wait most of their time: for servers that start, limits that pass, processes that end."""
ORDERS = {"gw2": ("waits", "other"), "gw3": ("computes",)}
"""What a worker takes, by preference; those that are not here: other, waits, computes. Four share two cores: the third takes what
waits, the fourth only what computes, and leaves the cores to the others whenever they want them, so what is held to a limit has
a core."""
FILLS_IN = "gw3"
UNKNOWN_S = {"tests/integration/": 20.0, "tests/examples/": 5.0}
"""What a file that is not in the table weighs: it must not begin last."""

hypothesis.settings.register_profile(  # a busy machine is no failure
    "ludic", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ludic")
if sys.version_info < (
    3,
    11,
    5,
):  # there, two threads that parse at once raise SystemError, and showing a traceback parses
    _parse, _parsing = ast.parse, threading.RLock()

    @functools.wraps(_parse)
    def _parse_alone(*args: Any, **kwargs: Any) -> Any:
        with _parsing:
            return _parse(*args, **kwargs)

    ast.parse = _parse_alone
gc.disable()  # until everything is imported: nothing is garbage yet, and going through it takes seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help=f"measure all tests and write {TABLE.name}")
    parser.addoption("--fuzz-seed", type=int, default=0, help="the seed of every fuzzer (default 0)")
    parser.addoption(
        "--fuzz-cases",
        type=int,
        help="how many cases each fuzzer tries (default: what fits `make test-all`, a third in `make test`)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(extended.LeftOut())
    if config.getoption("--write-seconds"):
        config.pluginmanager.register(Stopwatch())
    if config.getvalue("dist") == "loadfile" and not hasattr(config, "workerinput"):
        program = warm_python.start_collected("-m", config.option.markexpr, *config.args)
        os.environ[warm_python.COLLECTED] = program
        config.option.tx = [f"popen//python={program}" for _ in config.option.tx]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    unwanted = "not slow" in config.option.markexpr and collection_path.as_posix().endswith(SLOW_TO_IMPORT)
    return True if unwanted else None


@dataclass(frozen=True)
class Fuzz:
    """How many cases a fuzzer tries, and from which seed. A failing case is repeated with the flags that `at` prints."""

    seed: int
    wanted_cases: int | None
    is_default_tier: bool = False
    """Then a third is enough: another run has the rest."""

    def cases(self, default: int, *, least: int = 1) -> int:
        if self.wanted_cases is not None:
            return self.wanted_cases
        return max(least, default // 3) if self.is_default_tier else default

    def rng(self, case: int) -> Random:
        return Random(f"{self.seed} {case}")

    def at(self, case: int) -> str:
        return f"fuzz case {case}: run again with --fuzz-seed {self.seed} --fuzz-cases {case + 1}"


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    seed, wanted_cases = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-cases")
    return Fuzz(seed, wanted_cases, is_default_tier=extended.are_left_out(request.config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, so that the workers end together."""
    for item in items:
        if item.nodeid.split("[", 1)[0] in SLOW_TESTS and not config.getoption("--write-seconds"):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):  # xdist tells its workers that there is no --dist
        further = {} if extended.are_left_out(config) else MEASURED["extended"]
        weights: dict[str, float] = defaultdict(float)
        for file in {file_of(item.nodeid) for item in items}:
            unknown = next((seconds for folder, seconds in UNKNOWN_S.items() if file.startswith(folder)), 0.0)
            weights[scope_of(file)] += MEASURED["files"].get(file, unknown) + further.get(file, 0.0)
        items.sort(key=lambda item: -weights[scope_of(file_of(item.nodeid))])


def pytest_collection_finish() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") == FILLS_IN:
        os.nice(10)
    gc.freeze()  # what was imported stays; tests are searched for their own garbage alone
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Bitwise mode refuses a machine whose math library rounds a row by its place. aarch64 holds it, so there a refusal fails."""
    try:
        return (yield)
    except Exception as error:
        refuses = type(error).__name__ == "NotBitwise" and "cannot hold here" in str(error)
        if refuses and platform.machine() != "aarch64":
            pytest.skip(str(error))
        raise


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def scope_of(file: str) -> str:
    """What stays together on one worker."""
    return next((what for what, files in TOGETHER.items() if file.endswith(files)), file)


def kind_of(scope: str) -> str:
    if scope.startswith(COMPUTING) and not scope.endswith(HURRIED):
        return "computes"
    return "waits" if scope.endswith(WAITING) else "other"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

        def _suitable(self, node: Any) -> str | None:
            """The next scope for a worker; None if it takes none of those that are left."""
            for kind in ORDERS.get(node.gateway.id, ("other", "waits", "computes")):
                if found := next((scope for scope in self.workqueue if kind_of(scope) == kind), None):
                    return found
            return None

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(self._suitable(node) or next(iter(self.workqueue)), last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if self.workqueue and self._suitable(node) is None and not node.shutting_down:
                node.shutdown()
            super()._reschedule(node)

    return ByServer(config, log)


class Stopwatch:
    """Adds up what the tests take."""

    def __init__(self) -> None:
        self.tests: dict[str, float] = defaultdict(float)
        self.marked: set[str] = set()
        self.extended: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += report.duration
        if "extended" in report.keywords:
            self.extended.add(report.nodeid)
        if {"slow", "integration"} & report.keywords.keys():
            self.marked.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # a worker sees its own tests alone
            return
        files: dict[str, float] = defaultdict(float)
        further: dict[str, float] = defaultdict(float)
        for test, seconds in self.tests.items():
            (further if test in self.extended else files)[file_of(test)] += seconds
        cases: dict[str, list[float]] = defaultdict(list)
        for test, seconds in self.tests.items():
            if test.startswith(QUICK) and test not in self.marked | self.extended:
                cases[test.split("[", 1)[0]].append(seconds)
        slow = [test for test, s in cases.items() if sum(s) / len(s) >= SLOW_FROM_S or sum(s) >= SLOW_IN_ALL_FROM_S]
        table = {
            "files": {file: round(seconds, 1) for file, seconds in sorted(files.items()) if seconds >= 1.0},
            "extended": {file: round(seconds, 1) for file, seconds in sorted(further.items()) if seconds >= 1.0},
            "slow_tests": sorted(slow),
        }
        TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
