"""The memory formulae against what each of two ranks really holds."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")
pytest.importorskip("transformers", reason="the train extra is not installed")

from ludic_ops.scaling import TrainingSetup, shape_from_config, training_memory
from plugins.ops.tests.scaling_worker import CONFIG
from tests import forked

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SHAPE = shape_from_config(CONFIG.to_dict(), name="tiny")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("held")
    finished = forked.ranks(2, "plugins.ops.tests.scaling_worker", str(folder), timeout_s=150)
    assert finished.code == 0, finished.output[-4000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("sync", ["last", "every"])
def test_each_rank_keeps_its_half_to_the_byte(ranks, sync):
    predicted = training_memory(SHAPE, TrainingSetup(ranks=2, micro_batches=2, sync_gradients=sync))
    for rank in ranks:
        held = rank[sync]
        assert (held["weights"], held["gradients"], held["optimizer"]) == (
            predicted.weights,
            predicted.gradients,
            predicted.optimizer,
        )


def test_gradients_stay_whole_in_fp32_until_they_are_summed(ranks):
    def buffers(sync: str) -> int:
        return training_memory(SHAPE, TrainingSetup(ranks=2, micro_batches=2, sync_gradients=sync)).gradient_buffers

    for rank in ranks:
        assert rank["last"]["whole_gradients"] == buffers("last") - buffers("every") == 4 * SHAPE.params
        assert rank["every"]["whole_gradients"] == 0
