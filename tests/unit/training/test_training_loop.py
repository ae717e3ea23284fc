"""TrainingLoop over a learner without weights: the order of its phases, and what counts as trained when one of them fails."""

import pytest

from ludic.training import CheckpointConfig, CheckpointManager, Learner, TrainerConfig, TrainingLoop, make_sft
from ludic.types import ConfigError, RequestsExhausted, SAWBatch
from tests.unit.training.samples import random_items


class Recorder(Learner):
    """Notes which of its methods were called."""

    def __init__(self, folder, *, fails_at=None, publishes=True, **settings):
        self.algo, self.cfg = make_sft(), TrainerConfig(**settings)
        self.calls, self.fails_at, self.publishes = [], fails_at, publishes
        self.checkpointer = CheckpointManager(CheckpointConfig(folder, every_n_steps=2)) if folder else None
        self.saved = {}

    def begin(self, step, *, is_resumed):
        self.calls.append(("begin", step, is_resumed))

    def check_servers(self, step):
        self.calls.append(("check_servers", step))

    def update(self, step, batch, on_step):
        if self.fails_at == "gradient":
            raise FloatingPointError("not finite")
        self.calls.append(("update", step, len(batch.items)))
        on_step()
        if self.fails_at == "check":
            raise FloatingPointError("not finite")
        return {"loss": 0.5}

    def publish(self, step, since):
        self.calls.append(("publish", step))
        return self.publishes

    def save(self, step, state, metrics, on_committed):
        self.calls.append(("save", step))
        self.saved = {**state, "metrics": dict(metrics)}
        on_committed(self.checkpointer.root / f"step_{step:06d}")

    def load(self, *, step=None, path=None):
        self.calls.append(("load", step, path))
        return self.saved


class Source:
    """Three batches of two samples; notes what it is told."""

    def __init__(self):
        self.position, self.told = 0, []

    async def next_batch(self):
        if self.position == 3:
            raise RequestsExhausted("no more batches")
        self.position += 1
        return SAWBatch(items=random_items([8, 9], seed=self.position))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def notify_version(self, version):
        self.told.append(("version", version))

    def notify_trained(self, step, num_items):
        self.told.append(("trained", step, num_items))

    def notify_saved(self, step):
        self.told.append(("saved", step))


async def test_a_step_checks_servers_updates_publishes_and_the_last_step_is_saved(tmp_path):
    learner, source = Recorder(tmp_path), Source()
    loop = TrainingLoop(learner, source)
    stats = await loop.train()
    steps = [(("check_servers", n), ("update", n, 2), ("publish", n + 1)) for n in range(3)]
    assert learner.calls == [
        ("begin", 0, False), *steps[0], *steps[1], ("save", 2), *steps[2], ("check_servers", 3), ("save", 3)
    ]  # fmt: skip
    assert source.told == [
        ("version", 0), ("trained", 1, 2), ("version", 1), ("trained", 2, 2), ("version", 2), ("saved", 2),
        ("trained", 3, 2), ("version", 3), ("saved", 3),
    ]  # fmt: skip
    assert loop.step == 3 and stats["train/loss"] == 0.5 and stats["train/num_samples"] == 2


async def test_source_is_not_notified_of_an_unpublished_version():
    source = Source()
    await TrainingLoop(Recorder(None, publishes=False), source).train(1)
    assert source.told == [("version", 0), ("trained", 1, 2)]


async def test_batch_of_a_failed_update_is_made_again_after_a_resume(tmp_path):
    learner, source = Recorder(tmp_path, fails_at="gradient"), Source()
    loop = TrainingLoop(learner, source)
    with pytest.raises(FloatingPointError):
        await loop.train()
    loop.save_checkpoint()
    assert source.position == 1 and loop.step == 0
    assert learner.saved["batch_source"] == {"position": 0} and learner.saved["step"] == 0


async def test_batch_counts_as_trained_once_the_weights_have_changed(tmp_path):
    learner, source = Recorder(tmp_path, fails_at="check"), Source()
    loop = TrainingLoop(learner, source)
    with pytest.raises(FloatingPointError):
        await loop.train()
    loop.save_checkpoint()
    assert source.told[1] == ("trained", 1, 2) and loop.step == 1
    assert learner.saved["batch_source"] == {"position": 1}


@pytest.mark.parametrize(
    ("where", "loaded"),
    [(1, (1, None)), ("1", (1, None)), ("latest", (None, None)), ("some/folder", (None, "some/folder"))],
)
async def test_resuming_restores_step_and_data_before_the_weights_are_published(tmp_path, where, loaded):
    first = Recorder(tmp_path)
    await TrainingLoop(first, Source()).train(1)
    learner, source = Recorder(tmp_path), Source()
    learner.saved = first.saved
    loop = TrainingLoop(learner, source, resume_from=where)
    assert learner.calls == [("load", *loaded), ("begin", 1, True)]
    assert loop.step == 1 and source.position == 1 and source.told == [("version", 1)]


def test_loop_refuses_settings_it_cannot_follow():
    with pytest.raises(ConfigError, match="no evaluator"):
        TrainingLoop(Recorder(None, eval_at_start=True), Source())
    with pytest.raises(ConfigError, match="needs a checkpointer"):
        TrainingLoop(Recorder(None), Source(), resume_from="latest")
    shared = Recorder(None, eval_in_background=True)
    shared.shares_weights = True
    with pytest.raises(ConfigError, match="would change in the middle of an evaluation"):
        TrainingLoop(shared, Source())
