"""Command-line options and fixtures of all tests, and what shares a worker.

`make test-fast` leaves out what is marked `slow`, `make test` what is marked `extended` (tests/extended.py).
"""

import ast
import functools
import sys
import threading
from typing import Any

import hypothesis
import pytest

from tests import extended
from tests.fuzz import Fuzz

SHARED = {
    "one vLLM server": (
        "test_live_vllm_client.py", "test_vllm_adapter.py", "test_vllm_server.py", "test_vllm_training.py", "test_vllm_weights.py",
        "test_gateway_vllm.py",
    ),
    "one SmolLM2": ("test_local_engine_smollm2.py", "test_smollm2_template.py", "test_gateway_clients.py"),
}  # fmt: skip
"""These files share what a session has once, so one worker takes all of them."""
SLOW_TO_IMPORT = ("adapters/test_verifiers.py", "adapters/test_reasoning_gym.py", "envs/tests/test_mcp_tools.py")
"""Seconds in each worker, for the pydantic models of these packages and a hundred generators. `make test-fast` leaves them out."""

hypothesis.settings.register_profile(  # a busy machine is no failure
    "ludic", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ludic")
if sys.version_info < (3, 11, 5):
    # There, two threads that parse at once raise SystemError, and showing a traceback parses.
    _parse, _parsing = ast.parse, threading.RLock()

    @functools.wraps(_parse)
    def _parse_alone(*args: Any, **kwargs: Any) -> Any:
        with _parsing:
            return _parse(*args, **kwargs)

    ast.parse = _parse_alone


pytest_plugins = ["tests.smollm2"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seed", type=int, default=0, help="the seed of every fuzzer (default 0)")
    parser.addoption(
        "--fuzz-cases",
        type=int,
        help="how many cases each fuzzer tries (default: what fits `make test-all`, a third in `make test`)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(extended.LeftOut())


def pytest_ignore_collect(collection_path: Any, config: pytest.Config) -> bool | None:
    unwanted = "not slow" in config.option.markexpr and collection_path.as_posix().endswith(SLOW_TO_IMPORT)
    return True if unwanted else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((what for what, files in SHARED.items() if file.endswith(files)), file)

    return Scheduling(config, log)


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    seed, wanted_cases = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-cases")
    return Fuzz(seed, wanted_cases, is_default_tier=extended.are_left_out(request.config))
