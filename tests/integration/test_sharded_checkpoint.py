"""Checkpoints of several ranks, with real processes: four are started once, and do everything (see the worker).

The resume matrix (1, 2 and 4 ranks x LoRA or all weights x tied or untied embeddings) is in the phases there.
"""

import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="the lora extra is not installed")

from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from tests import forked
from tests.extended import cases, chosen_cases
from tests.integration.sharded_checkpoint_worker import PHASES

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TIMEOUT_S = 300
NEVER_PASSES = "waits to be killed"


EXPECTED = [
    (check, numbers if "bereft" not in name else numbers[:1])
    for name, numbers, checks in PHASES
    for check in checks
    if check != NEVER_PASSES
]
EXTENDED = [check for check, _ in EXPECTED if check.endswith("-untied")]
"""Half of the resume matrix."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    """Where four processes have done their work; two of them were killed in the middle of a save."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "results").mkdir()
    chosen = chosen_cases(request, "check")
    (folder / "left_out").write_text("\n".join(check for check in EXTENDED if check not in chosen))
    worker = ["-m", "tests.integration.sharded_checkpoint_worker"]
    workers = [forked.python(*worker, number, folder, cwd=forked.ROOT) for number in range(4)]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for marker, doomed in (("one-may-be-killed", workers[3:]), ("all-may-be-killed", workers[:2])):
            if not wait_for(folder / marker, workers, deadline):
                return folder
            for worker in doomed:
                worker.kill()
        for worker in workers:
            worker.wait(max(1.0, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return folder


def wait_for(marker: Path, workers: list[forked.Forked], deadline: float) -> bool:
    while not marker.exists():
        if time.monotonic() > deadline or any(worker.poll() not in (None, 0, -9) for worker in workers):
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("check", "numbers"),
    cases(EXPECTED, default=[case for case in EXPECTED if case[0] not in EXTENDED]),
    ids=[check for check, _ in EXPECTED],
)
def test_in_real_processes(folder: Path, check: str, numbers: tuple[int, ...]):
    for number in numbers:
        results = (folder / "results" / str(number)).read_text()
        assert f"ok {check}\n" in results, f"process {number}:\n{results}"


def test_kill_9_in_the_middle_of_a_save_leaves_the_one_before(folder: Path):
    root = folder / "killed"
    assert (root / ".unfinished-step_000002" / "ranks" / "00001-000.safetensors").exists(), (
        "the kill did not fall into the save"
    )
    module = torch.nn.Sequential(torch.nn.Linear(5, 40), torch.nn.Linear(40, 5))
    checkpoints = CheckpointManager(CheckpointConfig(root))
    assert checkpoints.load(model=module)["step"] == 1
    assert all((parameter == 1.0).all() for parameter in module.parameters())
    checkpoints.save(3, model=module)
    assert sorted(path.name for path in root.iterdir()) == ["latest.json", "step_000001", "step_000003"], "tidied up"
