"""Interruptions of the trainer, resumes, and state that outlives a step."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ludic.batch_gen import AsyncRolloutBatchSource
from ludic.distributed import SharedWeightsPublisher
from ludic.inference.local import LocalEngine
from ludic.models.forward import ModuleForward
from ludic.training import CheckpointConfig, CheckpointManager, Trainer, TrainerConfig, make_grpo
from ludic.training.checkpoint.manifest import read_json
from ludic.training.learner import torch_learner
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import CompositeLoss, LossTerm, TokenKLLoss
from ludic.types import ConfigError, NotFinite, OutOfGPUMemory
from ludic.util import stop as stopping
from ludic.util.stop import StopRequested, StopSignal
from tests.unit.training.bandit import ByteTokenizer, Given, bandit_trainer, hand_trainer, hide_nan_queries, tiny_llama
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow


def small_bandit(**settings):
    return bandit_trainer(make_grpo(group_size=4), group_size=4, num_prompts=4, **settings)


# --- event loops and stops ---


async def test_train_sync_works_inside_a_running_event_loop():
    """As in a notebook."""
    trainer = hand_trainer(*[random_items([12, 20])] * 4)
    assert trainer.train_sync(2)["train/step"] == 2
    assert trainer.train_step_sync()["train/step"] == 3
    with pytest.raises(ConfigError, match="no evaluator"):
        trainer.eval_sync()


@pytest.mark.parametrize(("same_request_s", "interrupts"), [(5.0, False), (0.0, True)])
async def test_signal_stops_train_sync_inside_a_running_event_loop(same_request_s, interrupts, monkeypatch, tmp_path):
    class Interrupting(Given):
        async def next_batch(self):
            if len(self.batches) == 2:
                for num_wishes, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
                    os.kill(os.getpid(), number)
                    while interrupts and trainer.stop._signals.num < num_wishes:
                        time.sleep(0.01)  # the main thread handles it; this one must not save before the second
                await asyncio.sleep(60)
            return await super().next_batch()

    monkeypatch.setattr(stopping, "SAME_REQUEST_S", same_request_s)
    before = signal.getsignal(signal.SIGINT)
    config = CheckpointConfig(output_dir=tmp_path)
    source = Interrupting(*[random_items([12, 20])] * 4)
    trainer = hand_trainer(batch_source=source, checkpoint_config=config)
    with pytest.raises(KeyboardInterrupt) if interrupts else contextlib.nullcontext():
        trainer.train_sync()
    assert trainer.step == 2 and trainer.stop.is_set and signal.getsignal(signal.SIGINT) is before
    if not interrupts:  # an interrupted run may or may not have saved what the first signal asked for
        assert CheckpointManager(config).steps() == [2]


def test_source_that_generates_ahead_continues_in_another_event_loop():
    trainer, engine = small_bandit(make_source=lambda source: AsyncRolloutBatchSource(source, max_lag=1))
    positions = []
    for _ in range(3):
        trainer.train_sync(2)
        positions.append(trainer.batch_source.state_dict()["source"]["num_batches"])
    engine.close()
    assert trainer.step == 6 and positions == [2, 4, 6], "what was made ahead when a loop ended is made again"


async def test_stop_can_be_set_from_another_thread():
    stop = StopSignal()
    threading.Timer(0.05, stop.set, args=("enough",)).start()
    with pytest.raises(StopRequested, match="enough"):
        await asyncio.wait_for(stop.unless(asyncio.sleep(60)), timeout=50)


async def test_error_of_cancelled_work_does_not_hide_the_stop():
    async def fails_when_cancelled():
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("could not clean up")

    stop = StopSignal()
    asyncio.get_running_loop().call_later(0.01, stop.set, "enough")
    with pytest.raises(StopRequested, match="enough"):
        await stop.unless(fails_when_cancelled())


async def test_earlier_signal_handlers_are_restored():
    seen = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        mine = signal.getsignal(signal.SIGTERM)
        with StopSignal().catch_signals():
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine and signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def test_repeated_signal_is_one_request_and_a_later_one_interrupts(monkeypatch):
    now = 100.0
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))  # and not the clock of asyncio
    stop = StopSignal()
    with stop.catch_signals():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            now += stopping.SAME_REQUEST_S / 3
        assert stop.is_set and stop.reason == "SIGTERM"
        now += 0.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


async def test_signal_after_stop_was_set_does_not_interrupt():
    stop = StopSignal()
    with stop.catch_signals():
        stop.set("enough")
        signal.raise_signal(signal.SIGINT)
    assert stop.is_set


async def test_signal_during_a_save_lets_it_finish(tmp_path, monkeypatch):
    save = CheckpointManager.save

    def interrupted(*args, **kwargs):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        time.sleep(0.05)  # until the main thread has handled them
        return save(*args, **kwargs)

    monkeypatch.setattr(CheckpointManager, "save", interrupted)
    config = CheckpointConfig(output_dir=tmp_path, every_n_steps=1)
    trainer = hand_trainer(*[random_items([12, 20])] * 3, checkpoint_config=config)
    await trainer.train()
    assert trainer.step == 1 and trainer.stop.is_set
    assert CheckpointManager(config).steps() == [1]


async def test_stop_does_not_wait_for_an_evaluation(tmp_path):
    class Endless:
        async def eval(self, **_):
            trainer.stop.set("enough")
            await asyncio.sleep(60)

    trainer = hand_trainer(
        *[random_items([12, 20])] * 2,
        evaluator=Endless(),
        cfg={"eval_every_n_steps": 1},
        checkpoint_config=CheckpointConfig(output_dir=tmp_path),
    )
    stats = await asyncio.wait_for(trainer.train(), timeout=20)
    assert trainer.step == 1 and stats["train/step"] == 1 and (tmp_path / "step_000001").is_dir()


async def test_signals_are_handled_while_the_last_checkpoint_is_written(tmp_path):
    heard = []
    before = signal.getsignal(signal.SIGTERM)  # not always the default: a test beside this one may have started Ray

    class Watched(Trainer):
        def _write(self, *args, **kwargs):
            heard.append(signal.getsignal(signal.SIGTERM) is not before)
            super()._write(*args, **kwargs)

    trainer = hand_trainer(
        *[random_items([12, 20])] * 9, kind=Watched, checkpoint_config=CheckpointConfig(output_dir=tmp_path)
    )
    training = asyncio.create_task(trainer.train())
    while trainer.step < 1:
        await asyncio.sleep(0.001)
    trainer.stop.set("enough")
    await training
    assert heard == [True]


# --- checkpoints ---


async def test_interrupted_batch_is_made_again_after_a_resume(tmp_path):
    config = CheckpointConfig(output_dir=tmp_path)
    trainer, engine = small_bandit(checkpoint_config=config)
    await trainer.train(2)
    position = trainer.batch_source.state_dict()
    engine.pause()  # the next batch cannot be finished
    training = asyncio.create_task(trainer.train(1))
    while trainer.batch_source.state_dict() == position:
        await asyncio.sleep(0.001)
    trainer.stop.set("enough")
    await training
    engine.resume()
    engine.close()
    resumed, engine = small_bandit(checkpoint_config=config, resume_from="latest")
    engine.close()
    assert resumed.step == 2 and resumed.batch_source.state_dict() == position


async def test_best_checkpoint_has_the_evaluated_weights(tmp_path):
    class Peaks:
        """Step 2 is the best."""

        async def eval(self, **_):
            return [], {"accuracy": {1: 0.1, 2: 0.9, 3: 0.3, 4: 0.2}[trainer.step]}

    trainer = hand_trainer(
        *[random_items([12, 20])] * 4,
        evaluator=Peaks(),
        cfg={"eval_every_n_steps": 1},
        checkpoint_config=CheckpointConfig(
            output_dir=tmp_path, every_n_steps=1, max_to_keep=None, best_metric="eval/accuracy"
        ),
    )
    await trainer.train()
    assert trainer.checkpointer.best().name == "step_000002"
    assert read_json(tmp_path / "step_000003" / "trainer_state.json")["metrics"]["eval/accuracy"] == 0.3


async def test_evaluation_of_older_weights_does_not_decide_the_best_checkpoint(tmp_path):
    class Always:
        async def eval(self, **_):
            return [], {"accuracy": 1.0}

    trainer = hand_trainer(
        *[random_items([12, 20])] * 3,
        evaluator=Always(),
        cfg={"eval_every_n_steps": 2},
        checkpoint_config=CheckpointConfig(output_dir=tmp_path, every_n_steps=3, best_metric="eval/accuracy"),
    )
    await trainer.train()
    assert "eval/accuracy" not in read_json(tmp_path / "step_000003" / "trainer_state.json")["metrics"]
    assert trainer.checkpointer.best() is None


async def test_state_is_taken_in_the_event_loop(tmp_path):
    """In another thread, what generates ahead could change them in the middle."""
    taken_in = []

    class Where(Given):
        def state_dict(self):
            taken_in.append(threading.current_thread())
            return {}

        def load_state_dict(self, state): ...

    trainer = hand_trainer(
        batch_source=Where(random_items([12, 20])),
        checkpoint_config=CheckpointConfig(output_dir=tmp_path, every_n_steps=1),
    )
    await trainer.train()
    assert (tmp_path / "step_000001").is_dir()
    assert set(taken_in) == {threading.current_thread()}


# --- what a step leaves behind ---


async def test_failed_update_leaves_no_gradient(monkeypatch):
    good, broken = random_items([12, 20]), random_items([30, 60], seed=5)
    sizes, whole = [], TrainedPolicy.batch

    def second_fails(self, items, *args, **settings):
        sizes.append(len(items))
        if len(sizes) == 2:
            raise IndexError("in the second micro-batch")
        return whole(self, items, *args, **settings)

    monkeypatch.setattr(TrainedPolicy, "batch", second_fails)
    trainer = hand_trainer(broken, good, cfg={"micro_token_budget": 64})
    with pytest.raises(IndexError, match="second micro-batch"):
        await trainer.train_step()
    await trainer.train_step()
    expected = hand_trainer(good, cfg={"micro_token_budget": 64})
    await expected.train_step()
    for a, b in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(a, b)


async def test_gpu_without_memory_is_named_with_what_needs_less(monkeypatch):
    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 558.00 MiB.")

    trainer = hand_trainer(random_items([12, 20]))
    monkeypatch.setattr(torch_learner, "accumulate_gradients", no_room)
    with pytest.raises(
        OutOfGPUMemory, match=r"Lower micro_token_budget \(now [0-9,]+ tokens.* set gradient_checkpointing"
    ):
        await trainer.train(1)


async def test_parameter_groups_keep_their_own_learning_rates():
    class TwoRates(Trainer):
        def initialize_optimizer(self):
            head, rest = self.model.lm_head.weight, [*self.model.model.parameters()]
            return torch.optim.SGD([{"params": rest}, {"params": [head], "lr": 0.5}], lr=self.cfg.lr)

    trainer = hand_trainer(*[random_items([12, 20])] * 2, kind=TwoRates, cfg={"lr_schedule": lambda step: 0.1})
    await trainer.train()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([1e-4, 0.05])


# --- versions ---


async def test_second_run_on_one_engine_begins_at_version_0():
    first, engine = small_bandit()
    await first.train(2)
    second = Trainer(
        model=first.model,
        algo=first.algo,
        batch_source=first.batch_source,
        cfg=TrainerConfig(max_seq_len=64, max_lag=0),
        publisher=first.publisher,
    )
    stats = await second.train_step()
    engine.close()
    assert stats["train/lag_mean"] == 0 and engine.version == 1


def test_engine_of_another_model_is_refused():
    engine = LocalEngine(tiny_llama(), ByteTokenizer(), max_model_len=64, kv_tokens=1024)
    with contextlib.closing(engine), pytest.raises(ConfigError, match="does not hold the trained model"):
        hand_trainer(model=tiny_llama(), publisher=SharedWeightsPublisher(engine))


def test_sync_every_steps_is_refused_with_shared_weights():
    model = tiny_llama()
    engine = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=1024)
    with contextlib.closing(engine), pytest.raises(ConfigError, match="sync_every_steps=4"):
        hand_trainer(model=model, publisher=SharedWeightsPublisher(engine), cfg={"sync_every_steps": 4})


async def test_engine_runs_again_after_it_refused_new_weights():
    class Broken:
        def weights_changed(self):
            raise MemoryError("no room")

        def leave(self, sequence): ...

    engine = LocalEngine(tiny_llama(), ByteTokenizer(), max_model_len=64, kv_tokens=1024)
    engine._worker.runner = Broken()
    with contextlib.closing(engine):
        with pytest.raises(MemoryError):
            engine.new_version()
        assert engine._worker.num_pauses == 0


# --- precision, references, settings ---


async def test_gradient_checkpointing_keeps_the_engines_fused_forward():
    trainer, engine = small_bandit(cfg=TrainerConfig(lr=1e-2, max_seq_len=64, gradient_checkpointing=True))
    await trainer.train_step()
    engine.close()
    assert not isinstance(engine._worker.runner._model, ModuleForward)


async def test_adapter_learns_under_gradient_checkpointing():
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    batch, weights = random_items([12, 20]), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        trainer = hand_trainer(batch, batch, model=model, cfg={"gradient_checkpointing": checkpointing})
        await trainer.train()
        weights.append({n: p.detach().clone() for n, p in model.named_parameters() if "lora_B" in n})
    assert all(value.abs().max() > 0 for value in weights[1].values())
    assert all(torch.allclose(weights[0][name], value, atol=1e-6) for name, value in weights[1].items())


async def test_reference_is_moved_to_the_policys_device():
    grpo = make_grpo(group_size=4)
    kl = LossTerm(name="kl", loss=TokenKLLoss(to="reference", coeff=0.1))
    algo = replace(grpo, loss=CompositeLoss([LossTerm(name="policy", loss=grpo.loss), kl]))
    reference, moves = tiny_llama(), []
    plain_to = reference.to
    reference.to = lambda *args: moves.append(args) or plain_to(*args)
    trainer = hand_trainer(random_items([12, 20]), algo=algo, reference=reference)
    assert moves == [(torch.device("cpu"),)]
    assert (await trainer.train_step())["train/kl/kl_mean"] == pytest.approx(0.0, abs=1e-6)


# --- weights that are not finite ---


def spoiling(trainer, name, at_step):
    """The optimizer step after `at_step` steps leaves a NaN in one weight; the gradient was finite."""

    def spoil(*_):
        if trainer.step == at_step:
            trainer.model.get_parameter(name).data.view(-1)[-1] = float("nan")

    trainer.optimizer.register_step_post_hook(spoil)


@pytest.mark.parametrize("part", ["trained", "frozen", "reference"])
def test_loaded_weights_must_be_finite(part, monkeypatch):
    hide_nan_queries(monkeypatch)
    model, reference = tiny_llama(), tiny_llama(seed=1)
    spoilt = reference if part == "reference" else model
    spoilt.model.layers[0].self_attn.q_proj.weight.data[3, 4] = float("nan")
    settings = {}
    if part == "reference":
        settings = {
            "algo": replace(make_grpo(group_size=4), loss=TokenKLLoss(to="reference", coeff=0.1)),
            "reference": reference,
        }
    if part == "frozen":
        peft = pytest.importorskip("peft", reason="the lora extra is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(NotFinite, match=r"weights to begin with.*layers\.0\.self_attn\.q_proj.*Load other weights"):
        hand_trainer(random_items([12, 20]), model=model, **settings)


def test_step_that_makes_weights_not_finite_ends_the_run_before_saving(tmp_path, monkeypatch):
    hide_nan_queries(monkeypatch)
    published = []

    class Recorder:
        def publish(self, state_dict, version=None):
            published.append(version)

    config = CheckpointConfig(output_dir=tmp_path, every_n_steps=1)
    batches = [random_items([12, 20])] * 4
    trainer = hand_trainer(*batches, checkpoint_config=config, publisher=Recorder())
    spoiling(trainer, "model.layers.1.self_attn.q_proj.weight", at_step=2)
    said = r"Step 3 has made.*not saved.*in model\.layers\.1\.self_attn\.q_proj\.weight\. Go on from step_000002.*lower lr \(now 0\.001\)"
    with pytest.raises(FloatingPointError, match=said):
        trainer.train_sync()
    assert CheckpointManager(config).latest().name == "step_000002" and published == [1, 2]


def test_very_large_weights_are_finite():
    trainer = hand_trainer(*[random_items([12, 20])] * 2, cfg={"lr": 1e-6})
    trainer.model.model.embed_tokens.weight.data[200] = 1e30  # its square is not; the token does not occur
    trainer.train_step_sync()
    assert trainer.step == 1


async def test_untrained_batch_is_made_again_after_a_resume(tmp_path):
    class Counting(Given):
        num_taken = 0

        async def next_batch(self):
            self.num_taken += 1
            return await super().next_batch()

        def state_dict(self):
            return {"num_taken": self.num_taken}

        def load_state_dict(self, state):
            self.num_taken = state["num_taken"]

    good, too_long = random_items([12, 20]), random_items([100])
    config = CheckpointConfig(output_dir=tmp_path)
    trainer = hand_trainer(batch_source=Counting(good, too_long), checkpoint_config=config)
    await trainer.train_step()
    with pytest.raises(ConfigError, match="100 tokens"):
        await trainer.train_step()
    trainer.save_checkpoint()
    resumed = hand_trainer(batch_source=Counting(), checkpoint_config=config, resume_from="latest")
    assert resumed.batch_source.num_taken == 1
