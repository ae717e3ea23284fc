"""FSDP2 with a single rank, where nothing is copied that several ranks would copy."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("peft", reason="the lora extra is not installed")

from ludic.distributed.ranks import ProcessRanks
from tests.extended import cases
from tests.integration.fsdp_scenarios import RUNS, train


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield ProcessRanks(timeout_s=60)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", cases(["full", "lora", "lora_tied_from_meta"], default=["full"]))
def test_one_fsdp_rank_trains_and_publishes_like_the_plain_trainer(name: str, alone: ProcessRanks):
    ours, plain = train(RUNS[name], alone), train(RUNS[name], None)
    assert ours["base_stays"], "publishing has merged an adapter into the frozen weights"
    assert [version for version, _ in ours["published"]] == [version for version, _ in plain["published"]] == [2, 4]
    for weights, expected in [(ours["weights"], plain["weights"]), (ours["published"][0][1], plain["published"][0][1])]:
        assert weights.keys() == expected.keys()
        for weight_name, weight in weights.items():
            torch.testing.assert_close(weight, expected[weight_name], rtol=0, atol=1e-5)
