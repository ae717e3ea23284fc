"""SPO in the trainer: learning, resume, policy drift, and a gradient with less variance than GRPO's."""

import pytest
import torch

from ludic import registry
from ludic.batch_gen import AsyncRolloutBatchSource, PrioritisedCurriculum, RolloutBatchSource
from ludic.distributed import SharedWeightsPublisher
from ludic.inference.local import LocalEngine
from ludic.training import (
    BetaValueTracker,
    CheckpointConfig,
    Trainer,
    TrainerConfig,
    make_spo,
)
from ludic.training.learner.batches import load_data_states
from ludic.training.learner.gradients import DriftProbe
from ludic.training.learner.packing import PADDING_ITEM
from ludic.training.learner.policy import TrainedPolicy
from tests.unit.training.bandit import (
    BanditRequests,
    ByteTokenizer,
    rollout_engine,
    tiny_llama,
)
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow


def spo_trainer(*, num_tasks=64, batch_size=32, make_source=lambda source: source, **settings):
    """SPO on the bandit: one sample of each chosen task."""
    algo, tracker = make_spo()
    model = tiny_llama()
    engine = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=8192)
    curriculum = PrioritisedCurriculum(BanditRequests(num_tasks)(), tracker, batch_size=batch_size)
    source = RolloutBatchSource(
        rollout_engine(engine), curriculum=curriculum, algorithm=algo, max_steps=1, concurrency=64
    )
    trainer = Trainer(
        model=model,
        algo=algo,
        batch_source=make_source(source),
        cfg=TrainerConfig(lr=1e-2, max_seq_len=64, weight_decay=0.0),
        publisher=SharedWeightsPublisher(engine),
        **settings,
    )
    return trainer, engine, tracker


# --- in the loop ----------------------------------------------------------------------------------------------


async def test_each_step_reports_policy_drift_to_the_tracker():
    trainer, engine, tracker = spo_trainer()
    history = [await trainer.train_step() for _ in range(3)]
    engine.close()
    moved = [stats["train/policy_drift"] for stats in history]
    assert all(kl > 0 for kl in moved)
    assert all(stats["train/kl_actor_policy"] < kl / 10 for stats, kl in zip(history, moved, strict=True))
    assert tracker.drift == pytest.approx(sum(moved))


def test_the_drift_is_the_kl_of_the_tokens_under_both_weights():
    model, items = tiny_llama(), random_items([12, 20, 9])
    policy = TrainedPolicy(model)
    with torch.no_grad():
        before = policy.logps(policy.batch(items))[0]
        probe = DriftProbe(policy, items)
        for parameter in model.parameters():
            parameter.mul_(1.05)
        after = policy.logps(policy.batch(items))[0]
    total, count = probe.measure()["policy_drift"]
    expected = sum(float(torch.exp(a - b)) - 1 - float(a - b) for a, b in zip(after, before, strict=True))
    assert float(total) == pytest.approx(expected, rel=1e-4) and count == len(before) and expected > 0
    assert DriftProbe(policy, [PADDING_ITEM]).measure() == {}


async def test_resume_restores_tracked_values_and_prompts(tmp_path):
    saved = CheckpointConfig(output_dir=str(tmp_path / "a"), every_n_steps=2)
    trainer, engine, tracker = spo_trainer(checkpoint_config=saved)
    for _ in range(4):
        await trainer.train_step()
    engine.close()
    resumed, engine, again = spo_trainer(checkpoint_config=saved, resume_from=2)
    assert resumed.step == 2 and 0 < again.drift < tracker.drift
    for _ in range(2):
        await resumed.train_step()
    engine.close()
    assert again.state_dict() == tracker.state_dict()
    for one, other in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


async def test_batches_made_ahead_are_not_counted_twice_after_a_resume():
    def ahead(source):
        return AsyncRolloutBatchSource(source, max_lag=2, max_batches=2)

    trainer, engine, tracker = spo_trainer(num_tasks=32, batch_size=32, make_source=ahead)
    async with trainer.batch_source as source:
        await source.next_batch()
        while len(source._ready) < 2:  # two more were credited, but not handed out
            await source._filled.wait()
            source._filled.clear()
        state, credit = source.state_dict(), trainer.algo.credit_assigner.state_dict()
    engine.close()
    resumed, engine, again = spo_trainer(num_tasks=32, batch_size=32, make_source=ahead)
    load_data_states(resumed.algo, resumed.batch_source, {"credit_assigner": credit, "batch_source": state})
    engine.close()
    # One visit each: 0.96 (1 + 1) + 1. Three visits would be 0.96² · 2.92 + 0.96 + 1.
    totals = {round(wins + losses, 6) for wins, losses, _ in again.state_dict()["beliefs"].values()}
    assert totals == {2.92} and len(again) == 32
    assert tracker.state_dict() == credit


# --- by name --------------------------------------------------------------------------------------------------


def test_the_registry_makes_it_from_plain_settings():
    made = registry.make("algorithm", "spo", d_half=0.2, low=-1.0, clip_eps_high=0.28)
    tracker = made.credit_assigner.tracker
    assert (made.name, tracker.d_half, tracker.low, made.loss.loss.clip_eps_high) == ("spo", 0.2, -1.0, 0.28)
    mine = BetaValueTracker()
    assert make_spo(tracker=mine)[1] is mine and make_spo()[0].credit_assigner.tracker is not mine
