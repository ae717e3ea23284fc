"""Two hosts, with a network namespace each: a Ray cluster that loses one, FSDP over both, and runs of one that use the env server
and the sandbox server of the other. See scripts/two_hosts.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ludic_sandbox import is_bubblewrap_available
from scripts import two_hosts as script
from tests.integration.fsdp_worker import done
from tests.integration.test_fsdp import assert_same_run

SCRIPT = Path(__file__).parents[3] / "scripts" / "two_hosts.py"
PATIENCE_S = 240


def why_not() -> str:
    """What is missing for network namespaces; empty if nothing is."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "two hosts need root on Linux"
    if missing := [tool for tool in script.TOOLS if shutil.which(tool) is None]:
        return f"two hosts need {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "two hosts need the right to make namespaces" if tried.returncode else ""


pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.extended(
    covered_by="plugins/pipeline/tests/test_launch_process.py::test_the_roles_of_a_pipeline_run_on_ray"
)
def test_a_pipeline_on_ray_survives_the_loss_of_the_host_of_its_actor():
    """The script checks where the roles run, that all updates are done, and the account."""
    pytest.importorskip("ray")
    fast = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
    before = namespaces()
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "actors"],
        capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **fast},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "actor-0 was lost with its machine" in ended.stdout and "the account balances" in ended.stdout
    assert namespaces() <= before, "a namespace was left behind"


@pytest.mark.extended(
    covered_by="plugins/envs/tests/test_env_workers.py::test_kill_9_of_the_server_fails_episodes_and_a_new_one_is_found"
)
@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
def test_runs_use_envs_and_sandboxes_of_another_host_and_survive_their_kill_9():
    """The script checks that all updates are done, that the task is learned, and that no process is left."""
    before = namespaces()
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "servers"], capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("refuses: the token is wrong") == 2
    assert "wants a token" in ended.stdout and "refuses the token" in ended.stdout
    assert "no process is left on b" in ended.stdout
    assert namespaces() <= before, "a namespace was left behind"


@pytest.mark.extended(covered_by="tests/integration/test_fsdp.py::test_two_processes_train_as_one")
def test_fsdp_on_two_hosts_trains_what_one_process_trains():
    with script.two_hosts() as (a, b):
        # As torchrun would start them, without its own two processes: `scripts/two_hosts.py fsdp` has torchrun.
        worker = [str(script.BIN / "python"), "-m", "tests.integration.fsdp_worker", "/mnt", "run:full"]
        meeting = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": a.address, "MASTER_PORT": "29500"}
        ranks = [host.popen(*worker, RANK=str(rank), **meeting) for rank, host in enumerate((a, b))]
        for rank in ranks:
            said, _ = rank.communicate(timeout=PATIENCE_S)
            assert rank.returncode == 0, said
        found = torch.load(a.disk / "run-full.pt", weights_only=True)
    assert_same_run(found, done("run:full", None))
