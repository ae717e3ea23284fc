"""FSDP2 on one GPU: every way of holding the weights trains what the plain trainer trains."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("peft", reason="the lora extra is not installed")

from ludic.distributed.fsdp import FSDPSettings
from ludic.distributed.ranks import ProcessRanks
from tests.integration.fsdp_scenarios import RUNS, Run, llama, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IN_FULL = FSDPSettings(param_dtype="fp32")


def in_full(name: str, **settings: Any) -> Run:
    """A scenario without half precision, with or without ranks."""
    run = RUNS[name]
    cfg = {**run.cfg, "mixed_precision_dtype": None}
    return replace(run, cfg=cfg, settings=replace(IN_FULL, **settings))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield ProcessRanks(timeout_s=120)
    dist.destroy_process_group()


def plain(run: Run) -> dict[str, torch.Tensor]:
    model = llama(tied=run.tied, lora=run.lora, dtype=run.dtype).cuda()
    return train(run, None, model=model)["weights"]


def assert_alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(
            weight.cpu(), theirs[name].cpu(), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ["full", "tied", "lora", "from_meta", "critic"])
@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "in CPU memory"])
def test_a_sharded_gpu_trains_what_a_plain_one_trains(name: str, offload: bool, ranks: ProcessRanks):
    run = in_full(name, cpu_offload=offload)
    found = train(run, ranks)
    assert_alike(found["weights"], plain(run))
    assert found["base_stays"] and found["published"][-1][0] == run.steps


@pytest.mark.parametrize("name", ["full", "lora"])
def test_compiled_blocks_train_the_same(name: str, ranks: ProcessRanks):
    assert_alike(train(in_full(name, compile=True), ranks)["weights"], plain(in_full(name)), 1e-4)


def test_in_half_precision_it_follows_the_same_path(ranks: ProcessRanks):
    """bf16 has three digits: the loss goes the same way, and weights are kept in fp32."""
    found, expected = train(Run(), ranks), train(Run(), None, model=llama().cuda())
    for ours, theirs in zip(found["history"], expected["history"], strict=True):
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=0.1)
    assert all(weight.dtype == torch.float32 for weight in found["weights"].values())
