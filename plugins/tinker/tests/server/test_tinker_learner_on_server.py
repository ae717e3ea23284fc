"""Ludic's client of the protocol against Ludic's server: the updates of the local Trainer, rollouts, and resuming."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

from ludic.distributed import TinkerPolicy
from ludic.inference import TinkerConfig
from ludic.training import CheckpointConfig, TinkerTrainer, Trainer, make_cispo, make_grpo, make_gspo, make_sft
from ludic.training.config import LRSchedule
from plugins.tinker.tests.server.running import KEY, NAME, RunningServer
from plugins.tinker.tests.test_tinker_trainer import Repeated, bandit_trainer, settings, some_items
from tests.tinker_fake.lora_model import LoraSettings, with_lora
from tests.unit.training.bandit import ByteTokenizer, tiny_llama

pytestmark = pytest.mark.slow

SEED = 7
ALGORITHMS = {
    "ppo": make_grpo(clip_eps_high=0.1),
    "cispo": make_cispo(),
    "cross_entropy": make_sft(length_normalize=True),
    "custom": make_gspo(clip_eps_low=0.2, clip_eps_high=0.2),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        with RunningServer() as running:
            yield running


@pytest.fixture
def policy(server: RunningServer) -> Iterator[TinkerPolicy]:
    config = TinkerConfig(base_model=NAME, lora_rank=8, lora_seed=SEED, base_url=server.url, api_key=KEY)
    made = TinkerPolicy(config, tokenizer=ByteTokenizer())
    yield made
    made.close()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_steps_leave_the_weights_that_the_local_trainer_leaves(server, policy, name):
    algo, items = ALGORITHMS[name], some_items()
    cfg = settings(lr_schedule=LRSchedule(warmup_steps=4), max_grad_norm=0.5, eps=1e-3)
    there = TinkerTrainer(model=policy, algo=algo, batch_source=Repeated(items), cfg=cfg)
    model = with_lora(tiny_llama(), LoraSettings(rank=8, seed=SEED))
    here = Trainer(model=model, algo=algo, batch_source=Repeated(items), cfg=cfg)
    [run] = [run for run in server.service._runs.values() if run.training is not None]
    before = {name: value.clone() for name, value in run.trained().adapter.named().items()}
    own = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == before.keys() and all(torch.equal(before[n], p) for n, p in own.items())
    for _ in range(2):  # the second with the first one's moments, and off-policy
        theirs, ours = there.train_step_sync(), here.train_step_sync()
        assert theirs["train/tinker_loss_sum"] == pytest.approx(ours["train/loss"], rel=1e-4, abs=1e-5)
        assert theirs["train/tinker_unclipped_grad_l2_mean"] == pytest.approx(ours["train/grad_norm"], rel=1e-4)
    after = run.trained().adapter.named()
    assert max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-3
    for n, p in own.items():
        assert torch.allclose(after[n], p, atol=1e-5), (n, float((after[n] - p).abs().max()))


def test_training_resumes_from_a_checkpoint_of_the_server(policy, tmp_path: Path):
    policy.publish(0)
    checkpoints = CheckpointConfig(tmp_path, every_n_steps=1, max_to_keep=1)
    first = bandit_trainer(policy, checkpoint_config=checkpoints)
    assert first.train_step_sync()["train/logp_difference_abs"] < 1e-4, "what is trained is what was sampled"
    first.train_sync(1)
    resumed = bandit_trainer(policy, checkpoint_config=checkpoints, resume_from="latest")
    assert (resumed.step, policy.client.version) == (2, 2)
    resumed.train_sync(1)
    assert resumed.step == 3
