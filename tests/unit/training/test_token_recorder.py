"""TokenRecorder: what is written is what the loss was given, token by token; and nothing that goes wrong ends a run."""

import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ludic.run.config.rollouts import RolloutSettings
from ludic.training import Trainer, TrainerConfig, make_grpo
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.packing import PADDING_ITEM
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.learner.token_recorder import StepRecord, TokenRecorder
from ludic.training.losses import CorrectedLoss, TokenClippedSurrogateLoss, TokenMask, as_loss
from ludic.types import ConfigError, SAWBatch
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.bandit import tiny_llama
from tests.unit.training.samples import random_items, with_prefix

pytestmark = pytest.mark.slow

LENGTHS = [5, 9, 9, 17, 30, 2, 12, 7]


class Watched:
    """A loss that keeps its inputs."""

    def __init__(self, loss) -> None:
        self.loss, self.needs, self.seen = loss, loss.needs, []

    def __call__(self, tokens):
        self.seen.append(tokens)
        return self.loss(tokens)


class SeedLoss:
    """A loss in the seeds' form, on whole padded logits."""

    def compute(self, logits, batch):
        logps = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        value = -(logps * batch["token_weight"][:, 1:] * batch["action_mask"][:, 1:]).sum() / len(logits)
        return value, {"loss": value.detach()}


def recorded(items, *, loss=None, packed=True, share_prefixes=False, budget=40):
    model = new_model("llama", seed=0, initializer_range=0.1).requires_grad_(True)
    policy = TrainedPolicy(model, packed=packed, share_prefixes=share_prefixes)
    watched, record = Watched(loss or TokenClippedSurrogateLoss()), StepRecord()
    accumulate_gradients(policy, watched, items, micro_token_budget=budget, watch_entropy=True, record=record)
    return record, watched.seen


def by_rollout(arrays):
    """Rollout -> its columns."""
    ends, weight_ends = np.cumsum(arrays["num_tokens"]), np.cumsum(arrays["num_weights"])
    found = {}
    for n, id in enumerate(arrays["rollout_id"].tolist()):
        own = slice(ends[n] - arrays["num_tokens"][n], ends[n])
        columns = {name: arrays[name][own] for name in ("logp", "entropy", "gradient") if name in arrays}
        weight = arrays["weight"][weight_ends[n] - arrays["num_weights"][n] : weight_ends[n]]
        found[id.decode()] = columns | {"weight": np.broadcast_to(weight, len(columns["logp"]))}
    return found


@pytest.mark.parametrize("way", ["packed", "prefix_shared", "padded", "whole_logits"])
def test_record_holds_the_inputs_of_the_loss_token_by_token(way):
    items = random_items(LENGTHS)
    if way == "prefix_shared":
        items = [with_prefix(item, np.arange(7, dtype=np.int32)) for item in items]
    loss = as_loss(SeedLoss()) if way == "whole_logits" else None
    record, seen = recorded(items, loss=loss, packed=way != "padded", share_prefixes=way == "prefix_shared", budget=70)
    arrays = record.arrays()
    assert len(seen) > 1, "several micro-batches"
    for name, values in (("logp", "logps"), ("entropy", "entropy")):
        given = torch.cat([getattr(tokens, values).detach() for tokens in seen]).numpy()
        np.testing.assert_allclose(arrays[name], given, rtol=0 if name == "logp" else 1e-3)
    found = by_rollout(arrays)
    assert found.keys() == {item.origin.rollout_id for item in items}
    for item in items:
        np.testing.assert_array_equal(found[item.origin.rollout_id]["weight"], item.token_weights)
        assert len(found[item.origin.rollout_id]["logp"]) == item.num_action_tokens
    assert ("gradient" in arrays) == (way != "whole_logits"), "such a loss does not use the log-probs"


def test_gradient_is_ratio_times_advantage_and_zero_where_the_loss_clips():
    items = random_items(LENGTHS)
    loss = TokenClippedSurrogateLoss(clip_eps_low=0.05, clip_eps_high=0.05, reduction="token_mean")
    found = by_rollout(recorded(items, loss=loss)[0].arrays())
    num_clipped = 0
    for item in items:
        own = found[item.origin.rollout_id]
        ratio, weight = np.exp(own["logp"] - item.actor_logps), own["weight"]
        is_clipped = ((ratio > 1.05) & (weight > 0)) | ((ratio < 0.95) & (weight < 0))
        np.testing.assert_allclose(own["gradient"], np.where(is_clipped, 0, ratio * weight), rtol=2e-3, atol=1e-4)
        num_clipped += is_clipped.sum()
    assert num_clipped


def test_gradient_is_zero_where_a_correction_masks():
    items = random_items(LENGTHS)
    loss = CorrectedLoss(TokenClippedSurrogateLoss(clip_eps_low=9, clip_eps_high=9), [TokenMask(0.9, 1.1)])
    found = by_rollout(recorded(items, loss=loss)[0].arrays())
    for item in items:
        own = found[item.origin.rollout_id]
        ratio = np.exp(own["logp"] - item.actor_logps)
        np.testing.assert_array_equal(own["gradient"] == 0, (ratio < 0.9) | (ratio > 1.1))


def test_recording_changes_no_gradient():
    items = random_items(LENGTHS)
    grads = []
    for record in (None, StepRecord()):
        model = new_model("llama", seed=0, initializer_range=0.1).requires_grad_(True)
        accumulate_gradients(
            TrainedPolicy(model), TokenClippedSurrogateLoss(), items, micro_token_budget=40, record=record
        )
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# --- files --------------------------------------------------------------------------------------------------------


class Batches:
    """The same batch again and again, under new rollout ids."""

    def __init__(self) -> None:
        self._number = 0

    async def next_batch(self) -> SAWBatch:
        self._number += 1
        items = random_items([12, 9, 7], vocab=64, seed=self._number)
        return SAWBatch(items=[i.with_origin(rollout_id=f"{self._number}-{i.origin.rollout_id}") for i in items])

    def state_dict(self):
        return {"number": self._number}

    def load_state_dict(self, state):
        self._number = state["number"]


def trainer(recorder, **settings) -> Trainer:
    config = TrainerConfig(max_seq_len=64, micro_token_budget=64)
    return Trainer(
        model=tiny_llama(), algo=make_grpo(group_size=2), batch_source=Batches(), cfg=config,
        token_recorder=recorder, **settings,
    )  # fmt: skip


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_named_after_the_metrics_step(tmp_path):
    recorder = TokenRecorder(tmp_path / "trained")
    trainer(recorder).train_sync(3)
    recorder.close()
    assert names(tmp_path / "trained") == [f"step_00000{n}.rank0.npz" for n in (1, 2, 3)]
    with np.load(tmp_path / "trained" / "step_000002.rank0.npz", allow_pickle=False) as record:
        assert set(record["rollout_id"].tolist()) == {b"2-r0", b"2-r1", b"2-r2"}
    assert recorder.num_written == 3 and recorder.num_dropped == recorder.num_failed == 0


def test_every_nth_update_and_the_first_are_recorded(tmp_path):
    recorder = TokenRecorder(tmp_path / "trained", every=2)
    trainer(recorder).train_sync(5)
    recorder.close()
    assert names(tmp_path / "trained") == [f"step_00000{n}.rank0.npz" for n in (1, 2, 4)]


def test_resumed_run_replaces_the_records_after_its_checkpoint_and_no_others(tmp_path):
    from ludic.training import CheckpointConfig

    folder, saved = tmp_path / "trained", CheckpointConfig(tmp_path / "checkpoints", every_n_steps=2)
    recorder = TokenRecorder(folder)
    trainer(recorder, checkpoint_config=saved).train_sync(2)
    recorder.flush()
    first = (folder / "step_000001.rank0.npz").stat().st_mtime_ns
    shutil.copy(folder / "step_000002.rank0.npz", folder / "step_000003.rank1.npz")  # of an interrupted start
    shutil.copy(folder / "step_000002.rank0.npz", folder / "step_000009.rank0.npz")
    (folder / "notes.txt").write_text("mine")
    resumed = TokenRecorder(folder)
    trainer(resumed, checkpoint_config=saved, resume_from="latest").train_sync(1)
    resumed.close()
    recorder.close()
    assert names(folder) == ["notes.txt", *(f"step_00000{n}.rank0.npz" for n in (1, 2, 3))]
    assert (folder / "step_000001.rank0.npz").stat().st_mtime_ns == first
    with np.load(folder / "step_000003.rank0.npz") as record:
        assert set(record["rollout_id"].tolist()) == {b"3-r0", b"3-r1", b"3-r2"}


def test_record_is_dropped_and_counted_while_the_disk_is_slow(tmp_path, caplog):
    recorder = TokenRecorder(tmp_path, max_waiting=1)
    is_free = threading.Event()
    recorder._save, save = lambda *given: (is_free.wait(10), save(*given)), recorder._save
    record, _ = recorded(random_items([5, 9]))
    for step in (1, 2, 3):
        recorder.write(step, record)
    is_free.set()
    recorder.close()
    assert (recorder.num_written, recorder.num_dropped) == (1, 2)
    assert len([r for r in caplog.records if "slower than training" in r.message]) == 1


def test_failed_write_is_one_warning_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "trained").write_text("a file where the folder should be")
    recorder = TokenRecorder(tmp_path / "trained")
    run = trainer(recorder)
    for _ in range(3):
        run.train_step_sync()
        recorder.flush()
    recorder.close()
    assert run.step == 3 and recorder.num_failed == 3
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1


def test_file_size_limit_leaves_no_partial_record(tmp_path):
    record, _ = recorded(random_items(LENGTHS))
    recorder = TokenRecorder(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        recorder.write(1, record)
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorder.num_failed == 1 and names(tmp_path) == []


FULL_DISK = """
import sys, pathlib
from ludic.training.learner.token_recorder import TokenRecorder
from tests.unit.training.test_token_recorder import trainer
disk = pathlib.Path(sys.argv[1])
(disk / "trained").mkdir()
try:
    with (disk / "rest").open("wb", buffering=0) as rest:
        while True:
            rest.write(b"x" * 1024)
except OSError:
    pass
recorder = TokenRecorder(disk / "trained")
run = trainer(recorder)
run.train_sync(2)
recorder.close()
print(run.step, recorder.num_failed, [p.name for p in (disk / "trained").iterdir()])
"""


@pytest.mark.extended(covered_by="test_out_of_memory_in_the_record_is_a_warning")
@pytest.mark.slow
def test_full_disk_does_not_end_a_run(tmp_path):
    small_disk = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1M tmpfs "$1" && exec "$2" -c "$3" "$1"', "sh"]
    is_allowed = shutil.which("unshare") and not subprocess.run([*small_disk, tmp_path, "true"]).returncode
    if not is_allowed:
        pytest.skip("no right to mount a small disk here")
    done = subprocess.run([*small_disk, tmp_path, sys.executable, FULL_DISK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 2 []", done.stderr


def test_out_of_memory_in_the_record_is_a_warning(tmp_path, monkeypatch, caplog):
    def no_memory(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("ludic.training.learner.token_recorder._columns", no_memory)
    recorder = TokenRecorder(tmp_path)
    run = trainer(recorder)
    run.train_sync(2)
    recorder.close()
    assert run.step == 2 and names(tmp_path) == []
    assert "no room" in caplog.text


# --- the setting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "none", "every", "every=0", "every=-1", "every=1.5", "every=x", "5"])
def test_save_tokens_refuses_what_it_does_not_know(text):
    with pytest.raises(ConfigError, match="every=N"):
        RolloutSettings(save_tokens=text)


def test_padding_items_of_other_ranks_are_not_recorded():
    record, _ = recorded([PADDING_ITEM])
    assert not record.items


def test_rows_of_a_rollout_are_those_of_its_tokens_in_every_form():
    items = [with_prefix(item, np.arange(7, dtype=np.int32)) for item in random_items(LENGTHS)]
    ways = [{"packed": True}, {"packed": False}, {"packed": True, "share_prefixes": True}]
    first, *others = [by_rollout(recorded(items, budget=90, **way)[0].arrays()) for way in ways]
    for other in others:
        for id, columns in first.items():
            for name in ("logp", "entropy", "gradient"):
                np.testing.assert_allclose(other[id][name], columns[name], rtol=2e-3, atol=2e-3, err_msg=f"{id} {name}")
