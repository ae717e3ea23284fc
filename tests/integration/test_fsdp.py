"""Training on two and four processes is training on one: same losses, gradients and weights, whatever is switched on."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.extended import cases, chosen_cases
from tests.integration.fsdp_scenarios import LENGTHS, LOSSES, RUNS
from tests.integration.fsdp_worker import done

pytestmark = [pytest.mark.integration, pytest.mark.slow]
RUN_JOBS = [f"run:{name}" for name in RUNS if name != "full"]
GRADIENT_JOBS = [*(f"gradients:{name}:frozen" for name in LOSSES), "gradients:with_entropy_and_kl:adapter_off"]
PREFIX_JOB = "prefixes:token_clipped:frozen"
CONTEXT_JOBS = [
    "context:token_clipped:frozen",
    "context:clipped:frozen",
    "context:supervised:frozen",
    "context:with_entropy_and_kl:adapter_off",
]
CONTEXT_RUNS = {"run:context": "run:full", "run:context_checkpointing_lora": "run:checkpointing_lora"}
FEW_RUNS = ["run:lora_tied_from_meta", "run:checkpointing_lora", "run:source_per_rank", "run:critic", "run:mixture"]
FEW_GRADIENTS = [
    f"gradients:{name}"
    for name in ("token_clipped:frozen", "gmpo:frozen", "batch_normalized:frozen", "with_entropy_and_kl:adapter_off")
]
FOUR_JOBS = ["run:full", "run:lora_tied_from_meta", "run:critic", "gradients:with_entropy_and_kl:adapter_off"]


def recorded(folder: Path, num: int, *jobs: str) -> Path:
    finished = forked.ranks(num, "tests.integration.fsdp_worker", str(folder), *jobs, timeout_s=240)
    assert finished.code == 0, finished.output[-6000:]
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory, request) -> Path:
    others = ["run:half_precision", "resumed", PREFIX_JOB, "tokens"]
    return recorded(tmp_path_factory.mktemp("two"), 2, *chosen_cases(request, "job"), *others)


@pytest.fixture(scope="module")
def four(tmp_path_factory, request) -> Path:
    others = ["run:replicas", "run:context"]
    return recorded(tmp_path_factory.mktemp("four"), 4, *chosen_cases(request, "job"), *others)


def record(folder: Path, job: str) -> Any:
    return torch.load(folder / f"{job.replace(':', '-')}.pt", weights_only=True)


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.shape == expected.shape, what
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5), f"{what}: {(found - expected).abs().max()}"


def assert_same_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    assert found["grads"].keys() == expected["grads"].keys()
    assert any(float(grad.abs().max()) > 1e-3 for grad in expected["grads"].values())
    for name, grad in expected["grads"].items():
        assert_close(found["grads"][name], grad, name)


TIMES = {"perf/tokens_per_s", "train/num_micro_batches", "train/policy_drift"}
"""And what is measured on a micro-batch of each rank."""


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for step, (ours, theirs) in enumerate(zip(found["history"], expected["history"], strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name not in TIMES and not name.endswith("_s"):
                assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5), f"{name} of step {step}"
    assert found["base_stays"] and expected["base_stays"]
    assert [version for version, _ in found["published"]] == [version for version, _ in expected["published"]]
    assert len(expected["published"]) == len(LENGTHS) // 2
    for (version, ours), (_, theirs) in zip(found["published"], expected["published"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, weight in theirs.items():
            assert_close(ours[name], weight, f"{name}, version {version}")
    for name, weight in found["weights"].items():
        assert torch.equal(weight, found["published"][-1][1][name]), "what is published is what is trained"


def assert_learned(run: dict[str, Any]) -> None:
    moved = [(a - b).abs().max() for a, b in zip(*(w.values() for _, w in run["published"]), strict=True)]
    assert max(moved) > 1e-3, "nothing was learned"


@functools.cache
def alone(job: str) -> Any:
    """What one process finds."""
    return done(job, None)


@pytest.mark.parametrize("job", cases(RUN_JOBS, default=FEW_RUNS))
def test_two_processes_train_as_one(two, job):
    assert_learned(alone(job))
    assert_same_run(record(two, job), alone(job))


@pytest.mark.parametrize("job", cases(GRADIENT_JOBS, default=FEW_GRADIENTS))
def test_two_processes_have_the_gradient_of_one(two, job):
    found = record(two, job)
    assert found["micro_batches"] > 2, "the ranks were meant to have several, and not as many each"
    assert_same_gradients(found, alone(job))


def test_two_processes_that_compute_prefixes_once_have_the_gradient_of_one_that_does_not(two):
    found = record(two, PREFIX_JOB)
    (tokens, computed), (of_one, same) = found["computed"], alone(PREFIX_JOB)["computed"]
    assert tokens > computed and of_one == same, "shared on each rank, and not in one process"
    assert_same_gradients(found, alone(PREFIX_JOB))


@pytest.mark.parametrize(
    "job",
    cases(CONTEXT_JOBS, default=CONTEXT_JOBS[1::2]),
)
def test_two_processes_that_share_every_row_have_the_gradient_of_one(two, job):
    """Samples of 3 to 60 tokens in rows of up to 64: their borders are not where the rows are cut."""
    assert_same_gradients(record(two, job), done(job.replace("context", "gradients"), None))


@pytest.mark.parametrize(
    "job",
    cases(CONTEXT_RUNS, default=["run:context_checkpointing_lora"]),
)
def test_two_processes_that_share_every_row_train_as_one(two, job):
    assert_same_run(record(two, job), done(CONTEXT_RUNS[job], None))


@pytest.mark.extended(covered_by="test_two_processes_that_share_every_row_train_as_one")
def test_two_pairs_that_share_their_rows_train_as_one(four):
    assert_same_run(record(four, "run:context"), done("run:full", None))


def test_two_processes_resume_in_the_middle_of_a_batch_bit_for_bit(two):
    assert record(two, "resumed") == {"num_different": 0, "num": 21}


@pytest.mark.extended(covered_by="test_two_processes_train_as_one")
@pytest.mark.parametrize("job", FOUR_JOBS)
def test_four_processes_are_one_too(four, job):
    compare = assert_same_run if job.startswith("run") else assert_same_gradients
    compare(record(four, job), alone(job))


@pytest.mark.extended(
    covered_by="tests/integration/test_sharded_checkpoint.py::test_in_real_processes[replicas of shards go on]"
)
def test_two_replicas_of_two_halves_are_one(four):
    assert_same_run(record(four, "run:replicas"), alone("tokens")["run"])


def test_weights_in_half_precision_are_trained_with_copies_in_full(two):
    found, expected = record(two, "run:half_precision"), alone("run:half_precision")
    for ours, theirs in zip(found["history"], expected["history"], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.02)
    for name, weight in expected["weights"].items():
        assert found["weights"][name].dtype is torch.bfloat16
        assert torch.allclose(found["weights"][name].float(), weight.float(), atol=0.02), name


def test_two_processes_train_as_one_and_record_its_tokens(two):
    found, expected = record(two, "tokens"), alone("tokens")
    assert_learned(expected["run"])
    assert_same_run(found["run"], expected["run"])
    steps = range(1, len(LENGTHS) + 1)
    assert found["files"] == sorted(f"step_{step:06d}.rank{rank}.npz" for step in steps for rank in (0, 1))
    assert found["samples"].keys() == expected["samples"].keys()
    for key, logps in expected["samples"].items():
        assert found["samples"][key] == pytest.approx(logps, rel=1e-4, abs=1e-4), key
