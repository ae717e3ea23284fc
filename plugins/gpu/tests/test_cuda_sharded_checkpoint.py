"""Sharded checkpoints on a GPU: parts on the device, or waiting in CPU memory, are saved while training goes on."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("peft", reason="the lora extra is not installed")

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from ludic.training.checkpoint.rng import rng_state
from tests.integration.sharded_checkpoint_worker import (
    VARIANTS,
    adamw,
    assert_close,
    assert_same,
    make,
    manager,
    sharded,
    train,
    values,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    """The trainer's backend; the checkpoint's group is its own."""
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy()], ids=["on the GPU", "in CPU memory"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_was_saved_from_a_gpu_comes_back(tmp_path: Path, variant: str, policy: OffloadPolicy):
    model = sharded(make(variant), offload_policy=policy)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    saved = values(model, optimizer)
    checkpoints = manager(tmp_path)
    checkpoints.save(2, model=model, optimizer=optimizer, state={"rng": rng_state()})
    train(model, optimizer, range(2, 4))

    other = sharded(make(variant, seed=7), offload_policy=policy)
    fresh = adamw(other)
    assert checkpoints.load(model=other, optimizer=fresh)["step"] == 2
    assert_same(values(other, fresh), saved)
    train(other, fresh, range(2, 4))
    assert_close(values(other, fresh), values(model, optimizer))


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process_and_a_sharded_gpu_exchange_checkpoints(tmp_path: Path, variant: str):
    alone = make(variant).cuda()
    optimizer = adamw(alone)
    train(alone, optimizer, range(2))
    CheckpointManager(CheckpointConfig(tmp_path / "one")).save(2, model=alone, optimizer=optimizer)
    saved = values(alone, optimizer)

    model = sharded(make(variant, seed=7))
    moments = adamw(model)
    manager(tmp_path / "one").load(model=model, optimizer=moments)
    assert_same(values(model, moments), saved)
    checkpoints = manager(tmp_path / "many")
    checkpoints.save(2, model=model, optimizer=moments)
    checkpoints.finish()

    back = make(variant, seed=8).cuda()
    own = adamw(back)
    CheckpointManager(CheckpointConfig(tmp_path / "many")).load(model=back, optimizer=own)
    assert_same(values(back, own), saved)
