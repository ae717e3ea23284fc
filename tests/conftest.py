"""How `make test` divides the files between its workers."""

from typing import Any

import pytest

ONE_VLLM_SERVER = ("test_live_vllm_client.py", "test_vllm_server.py", "test_vllm_training.py", "test_vllm_weights.py")
"""These share a session's vLLM servers, which take half a minute of computing each to start: one worker takes all of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "one vLLM server" if file.endswith(ONE_VLLM_SERVER) else file

    return ByServer(config, log)
