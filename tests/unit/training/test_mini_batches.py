"""Several optimizer steps on one batch: which samples each trains on, what is published and told when, and exact resuming."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from ludic.training import CheckpointConfig, TrainerConfig, TrainingLoop, make_grpo, make_ppo
from ludic.training.checkpoint.rank_files import encoded
from ludic.training.config import LRSchedule
from ludic.training.learner.mini_batches import BatchInProgress, groups_of, items_of_state, items_state
from ludic.training.multi_policy import train_policies
from ludic.types import (
    CandidateSets,
    ConfigError,
    Image,
    ImageSpan,
    MessageSpan,
    SampleAttachments,
    StopReason,
    VersionRun,
)
from tests.extended import cases
from tests.unit.training.bandit import Given, hand_trainer
from tests.unit.training.samples import random_items
from tests.unit.training.test_training_loop import Recorder, Source

pytestmark = pytest.mark.slow


def grouped(num_groups, seed=0):
    """Groups of two samples, one after the other."""
    items = random_items([8 + n for n in range(2 * num_groups)], seed=seed)
    return [item.with_origin(group_id=f"g{number // 2}") for number, item in enumerate(items)]


def batch_of(items, **settings):
    return BatchInProgress.begin(items, {}, 0, TrainerConfig(**settings), len(groups_of(items)))


def parts_of(batch):
    found = []
    while not batch.is_finished:
        found.append([item.origin.rollout_id for item in batch.part()])
        batch.num_done += 1
    return found


# --- which samples ---


def test_every_pass_has_every_group_in_exactly_one_part():
    items = grouped(7)
    parts = parts_of(batch_of(items, updates_per_batch=3, mini_batches=3))
    assert len(parts) == 9
    for own in (parts[:3], parts[3:6], parts[6:]):
        assert sorted(name for part in own for name in part) == sorted(item.origin.rollout_id for item in items)
    for part in parts:
        numbers = [int(name[1:]) for name in part]
        assert numbers == sorted(numbers) and all(number ^ 1 in numbers for number in numbers)


def test_passes_deal_groups_out_again_from_the_seed():
    items = grouped(8)
    first = parts_of(batch_of(items, updates_per_batch=2, mini_batches=2))
    assert first == parts_of(batch_of(items, updates_per_batch=2, mini_batches=2))
    assert first[:2] != first[2:]
    assert first != parts_of(batch_of(items, updates_per_batch=2, mini_batches=2, seed=1))


def test_one_part_is_the_whole_batch_in_its_order():
    items = grouped(3)
    assert batch_of(items, updates_per_batch=2).part() is items


def test_batch_with_fewer_groups_has_fewer_parts():
    assert batch_of(grouped(2), updates_per_batch=2, mini_batches=5).num_steps == 4
    assert batch_of(grouped(1), mini_batches=5).num_steps == 1


def test_samples_without_a_group_stay_together_by_episode():
    items = [item.with_origin(episode=f"e{n % 2}") for n, item in enumerate(random_items([8] * 4))]
    assert groups_of(items) == [[0, 2], [1, 3]]
    assert groups_of([item.with_origin(rollout_id=None) for item in random_items([8, 9])]) == [[0], [1]]


# --- the loop ---


class ManyItems(Source):
    async def next_batch(self):
        batch = await super().next_batch()
        return type(batch)(items=grouped(4, seed=self.position))


async def test_batch_is_published_once_and_the_source_told_with_its_first_step(tmp_path):
    learner, source = Recorder(None, updates_per_batch=2, mini_batches=2), ManyItems()
    loop = TrainingLoop(learner, source)
    history = [await loop.train_step() for _ in range(5)]
    updates = [("update", n, 4) for n in range(4)]
    assert learner.calls == [
        ("begin", 0, False), ("check_servers", 0), *updates, ("publish", 4), ("check_servers", 4), ("update", 4, 4),
    ]  # fmt: skip
    assert source.told == [
        ("version", 0), ("trained", 1, 8), ("trained", 2, 0), ("trained", 3, 0), ("trained", 4, 0), ("version", 4),
        ("trained", 5, 8),
    ]  # fmt: skip
    assert [stats["train/update_of_batch"] for stats in history] == [1, 2, 3, 4, 1]
    assert [stats["train/num_samples"] for stats in history] == [8] * 5
    assert [stats.get("train/batch_mean/loss") for stats in history] == [None, None, None, 0.5, None]


async def test_checkpoint_between_two_steps_holds_the_batch_and_the_position_after_it(tmp_path):
    learner, source = Recorder(tmp_path, mini_batches=4), ManyItems()
    loop = TrainingLoop(learner, source)
    await loop.train(2)  # saves every second step
    assert learner.saved["batch_source"] == {"position": 1} and learner.saved["unfinished_batch"]["num_done"] == 2
    other, again = Recorder(tmp_path, mini_batches=4), ManyItems()
    other.saved = learner.saved
    resumed = TrainingLoop(other, again, resume_from="latest")
    await resumed.train(3)
    assert again.position == 2 and resumed.step == 5
    assert [call for call in other.calls if call[0] in ("check_servers", "publish")] == [
        ("publish", 4),
        ("check_servers", 4),
    ]


async def test_finished_batch_is_not_saved_again(tmp_path):
    learner = Recorder(tmp_path, mini_batches=2)
    await TrainingLoop(learner, ManyItems()).train(2)
    assert "unfinished_batch" not in learner.saved


@pytest.mark.parametrize(("every", "published"), [(None, [3, 6, 9]), (3, [3, 6, 9]), (4, [6, 9]), (9, [9]), (0, [])])
async def test_weights_are_published_after_the_batch_with_the_step_that_is_due(every, published):
    class Publisher:
        def __init__(self):
            self.versions = []

        def publish(self, state_dict, version=None):
            self.versions.append(version)

    publisher = Publisher()
    cfg = {"mini_batches": 3, "sync_every_steps": every}
    trainer = hand_trainer(*[grouped(3, seed=n) for n in range(3)], publisher=publisher, cfg=cfg)
    await trainer.train()
    assert publisher.versions == published


async def test_learning_rate_follows_optimizer_steps():
    schedule = LRSchedule("linear", total_steps=4)
    trainer = hand_trainer(grouped(4), cfg={"mini_batches": 4, "lr": 1.0, "lr_schedule": schedule})
    rates = [(await trainer.train_step())["train/lr"] for _ in range(4)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


# --- weights ---


def weights_of(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


async def test_each_step_is_that_of_a_batch_of_its_samples_alone():
    """Everything that a loss divides by, and its baseline, are of the mini-batch."""
    items = grouped(6)
    algo = make_grpo(group_size=2, reduction="token_mean")
    whole = hand_trainer(items, algo=algo, cfg={"mini_batches": 3})
    batch, parts = batch_of(items, mini_batches=3), []
    while not batch.is_finished:
        parts.append(batch.part())
        batch.num_done += 1
    alone = hand_trainer(*parts, algo=algo)
    for _ in range(3):
        await whole.train_step()
        await alone.train_step()
        assert torch.equal(weights_of(whole), weights_of(alone))


async def test_second_pass_is_another_step_on_the_same_samples():
    items = grouped(3)
    twice, repeated = hand_trainer(items, cfg={"updates_per_batch": 2}), hand_trainer(items, items)
    await twice.train(2)
    await repeated.train(2)
    assert torch.equal(weights_of(twice), weights_of(repeated))


ALGORITHMS = {
    "grpo": lambda: make_grpo(group_size=2),
    "decoupled": lambda: make_grpo(group_size=2, behavior_cap=2.0),
    "critic": lambda: make_ppo(behavior_cap=2.0),
}


class Counted(Given):
    """Remembers its position."""

    def __init__(self, *batches):
        super().__init__(*batches)
        self._all = list(batches)

    def state_dict(self):
        return {"left": len(self.batches)}

    def load_state_dict(self, state):
        self.batches = self._all[len(self._all) - state["left"] :]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("saved", cases([1, 3, 4, 6], default=[3]))
async def test_run_resumed_between_two_steps_of_a_batch_has_the_same_weights_and_metrics(tmp_path, name, saved):
    def trainer(**settings):
        batches = [rewarded(grouped(4, seed=n)) for n in range(3)]
        cfg = {"updates_per_batch": 2, "mini_batches": 2, "lr": 1e-2}
        return hand_trainer(
            batch_source=Counted(*batches), algo=ALGORITHMS[name](), cfg=cfg,
            checkpoint_config=CheckpointConfig(tmp_path, every_n_steps=saved, max_to_keep=None), **settings,
        )  # fmt: skip

    whole = trainer()
    history = [await whole.train_step() for _ in range(9)]
    resumed = trainer(resume_from=saved)
    assert resumed.step == saved
    for expected in history[saved:]:
        found = await resumed.train_step()
        assert plain(found) == plain(expected)
    assert torch.equal(weights_of(whole), weights_of(resumed))


def rewarded(items):
    found = []
    for number, item in enumerate(items):
        rewards = np.zeros(item.num_action_tokens, dtype=np.float32)
        rewards[-1] = number % 3
        found.append(replace(item, attachments=replace(item.attachments, token_rewards=rewards)))
    return found


def plain(stats):
    return {name: value for name, value in stats.items() if not name.startswith("perf/")}


async def test_proximal_log_probs_are_those_before_the_first_step_of_the_batch():
    trainer = hand_trainer(grouped(4), algo=ALGORITHMS["decoupled"](), cfg={"updates_per_batch": 3, "lr": 1e-2})
    history = [await trainer.train_step() for _ in range(3)]
    assert history[0]["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert abs(history[1]["train/ratio_mean"] - 1) > 1e-4
    means = [stats["train/behavior_weight_mean"] for stats in history]
    assert means == pytest.approx([means[0]] * 3, rel=1e-5), "sampler and proximal policy do not move"
    alone = hand_trainer(grouped(4), algo=ALGORITHMS["decoupled"](), cfg={"lr": 1e-2})
    only = await alone.train_step()
    assert only["train/ratio_mean"] == 1 and only["train/behavior_weight_mean"] == pytest.approx(means[0], rel=1e-5)


async def test_samples_come_out_of_a_checkpoint_as_they_went_in():
    first, second, third = random_items([9, 6, 12])
    runs = (VersionRun(3, second.num_action_tokens - 1), VersionRun(4, 1))
    attached = replace(second.attachments, version_runs=runs, temperature=0.7, untrainable_sampling="top_p=0.5")
    second = replace(second, attachments=attached).with_origin(
        stop=StopReason.TERMINATED, group_id="g", env_seed=np.int64(7)
    )
    ids = third.input_ids[third.action_mask]
    candidates = CandidateSets.of([[int(one), 5] for one in ids])
    some = np.arange(len(ids), dtype=np.float32)
    names = ("token_rewards", "token_values", "token_returns", "teacher_logps", "token_turns", "proximal_logps")
    third = replace(
        third,
        attachments=replace(third.attachments, actor_logps=None, candidates=candidates, **dict.fromkeys(names, some)),
    )
    first = replace(
        first,
        attachments=replace(
            first.attachments,
            images=(ImageSpan(Image.of(np.zeros((2, 2), dtype=np.uint8)), 1, 2),),
            experts=np.ones((9, 2, 1), dtype=np.int16),
            message_spans=(MessageSpan(0, "user", 0, 3, 1, 2),),
            observed_roles=("tool",),
        ),
    )
    items = [first, second, third]
    state = items_state(items)
    encoded({"own": state})  # all of it can be stored
    assert {f.name for f in fields(SampleAttachments)} <= state.keys() | {"candidates"}, "a new one would be lost"
    found = items_of_state(state)
    for ours, theirs in zip(found, items, strict=True):
        assert ours.origin == theirs.origin and ours.weight == theirs.weight
        for name in ("input_ids", "attention_mask", "action_mask", "actor_logps"):
            assert same(getattr(ours, name), getattr(theirs, name)), name
        for f in fields(ours.attachments):
            if f.name not in ("actor_logps", "candidates"):
                assert same(getattr(ours.attachments, f.name), getattr(theirs.attachments, f.name)), f.name
    assert same(found[2].attachments.candidates.ids, candidates.ids)
    assert same(found[2].attachments.candidates.ends, candidates.ends)


def same(ours, theirs):
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    return ours == theirs


async def test_several_policies_refuse_several_steps_per_batch():
    with pytest.raises(ConfigError, match="4 optimizer steps per batch"):
        await train_policies({"one": hand_trainer(grouped(4), cfg={"mini_batches": 4})})
