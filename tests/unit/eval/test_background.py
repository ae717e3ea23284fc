"""Evaluation in the background of training: one version at a time, logged under its step, errors raised."""

import asyncio
import json
import os
import signal

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ludic.eval import EngineEvaluator, SnapshotEvaluator
from ludic.inference import ByteTemplate
from ludic.inference.local import LocalEngine
from ludic.inference.local.snapshot import EngineSnapshot
from ludic.training import CheckpointConfig, JSONLLogger, TrainerConfig, make_grpo
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError, ReturnSpec, SamplingParams, TokenCompletionRequest
from tests import forked
from tests.unit.training.bandit import BanditRequests, ByteTokenizer, bandit_trainer, rollout_engine, tiny_llama

pytestmark = pytest.mark.slow


def config(**settings) -> TrainerConfig:
    usual = {"lr": 1e-2, "max_seq_len": 64, "weight_decay": 0.0, "eval_in_background": True, "eval_every_n_steps": 2}
    return TrainerConfig(**{**usual, **settings})


class Gate:
    """An evaluator that waits until it is let through, and says which version it was told of."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.versions: list[int] = []
        self.num_running = self.most_running = self.num_finished = 0
        self.error: Exception | None = None

    def take_snapshot(self, version: int) -> None:
        self.versions.append(version)

    async def eval(self, **_):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        version = self.versions[-1]
        try:
            await self.opened.wait()
            if self.error is not None:
                raise self.error
            self.num_finished += 1
            return [], {"version": float(version)}
        finally:
            self.num_running -= 1


class Memory:
    """Keeps the logged metrics; opens the gate when a step is logged."""

    def __init__(self, gate: Gate | None = None, at_step: int = -1) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.loop = asyncio.get_running_loop()
        self.gate, self.at_step = gate, at_step

    def log(self, step, stats):
        self.lines.append((step, dict(stats)))
        if self.gate is not None and step >= self.at_step and "train/step" in stats:
            self.loop.call_soon_threadsafe(self.gate.opened.set)

    @property
    def evals(self) -> list[tuple[int, dict[str, float]]]:
        return [(step, stats) for step, stats in self.lines if "eval/step" in stats]


def trainer_with(evaluator, **settings):
    return bandit_trainer(make_grpo(group_size=4), group_size=4, num_prompts=2, evaluator=evaluator, **settings)


async def test_training_continues_during_an_evaluation():
    gate = Gate()
    memory = Memory(gate, at_step=3)  # the evaluation of step 2 can only end after step 3 was trained
    trainer, engine = trainer_with(gate, cfg=config(), train_logger=memory)
    await trainer.train(3)
    engine.close()
    ((step, stats),) = memory.evals
    assert (step, stats) == (2, {"eval/version": 2.0, "eval/step": 2.0})
    order = ["eval" if "eval/step" in stats else step for step, stats in memory.lines]
    assert order == [1, 2, 3, "eval"], "logged under its own step, after a later one"


async def test_only_one_evaluation_runs_at_a_time_and_the_last_is_waited_for():
    gate = Gate()
    memory = Memory(gate, at_step=2)
    trainer, engine = trainer_with(gate, cfg=config(eval_every_n_steps=1, eval_at_start=True), train_logger=memory)
    await asyncio.wait_for(asyncio.gather(trainer.train(3), open_later(gate)), timeout=60)
    engine.close()
    assert gate.versions == [0, 1, 2, 3] and gate.most_running == 1 and gate.num_finished == 4
    assert [step for step, _ in memory.evals] == [0, 1, 2, 3]


async def open_later(gate: Gate) -> None:
    """The second evaluation waits for the first, and with it training: no other task would open."""
    while len(gate.versions) < 1 or not gate.num_running:
        await asyncio.sleep(0.01)
    gate.opened.set()


async def test_an_error_in_the_evaluation_ends_the_run():
    gate = Gate()
    gate.error = RuntimeError("the judge is ill")
    gate.opened.set()
    trainer, engine = trainer_with(gate, cfg=config(eval_at_start=True))
    with pytest.raises(RuntimeError, match="the judge is ill"):
        await trainer.train(50)
    engine.close()
    assert trainer.step < 3, "it is not kept until the end"


async def test_an_error_in_the_last_evaluation_is_raised():
    gate = Gate()
    gate.error = RuntimeError("the judge is ill")
    trainer, engine = trainer_with(gate, cfg=config(), train_logger=Memory(gate, at_step=2))
    with pytest.raises(RuntimeError, match="the judge is ill"):
        await trainer.train(2)
    engine.close()


async def test_an_orderly_stop_waits_for_the_evaluation():
    gate = Gate()
    memory = Memory()
    trainer, engine = trainer_with(gate, cfg=config(), train_logger=memory)

    async def stop_then_open() -> None:
        while not gate.num_running:
            await asyncio.sleep(0.01)
        trainer.stop.set("enough")
        await asyncio.sleep(0.05)
        gate.opened.set()

    await asyncio.gather(trainer.train(1000), stop_then_open())
    engine.close()
    assert [step for step, _ in memory.evals] == [2]


async def test_a_failing_training_cancels_its_evaluation():
    gate = Gate()
    trainer, engine = trainer_with(gate, cfg=config(eval_every_n_steps=1))
    failing = trainer.batch_source.next_batch

    async def next_batch():
        if trainer.step == 1:
            raise OSError("no more data")
        return await failing()

    trainer.batch_source.next_batch = next_batch
    with pytest.raises(OSError, match="no more data"):
        await trainer.train(5)
    engine.close()
    assert gate.versions == [1] and gate.num_running == 0 and gate.num_finished == 0


async def test_a_best_checkpoint_waits_for_its_evaluation(tmp_path):
    class Peaks(Gate):
        async def eval(self, **_):
            await asyncio.sleep(0.05)
            return [], {"score": {2: 0.9, 4: 0.1}[self.versions[-1]]}

    checkpoints = CheckpointConfig(output_dir=tmp_path, every_n_steps=2, max_to_keep=None, best_metric="eval/score")
    trainer, engine = trainer_with(Peaks(), cfg=config(), checkpoint_config=checkpoints)
    await trainer.train(4)
    engine.close()
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["step"], best["value"]) == (2, 0.9)


# --- an evaluation that was ended before it had a result ---


def resumed_trainer(folder, evaluator, *, save_every: int = 2, **settings):
    return trainer_with(
        evaluator,
        cfg=config(**settings),
        train_logger=JSONLLogger(folder / "metrics.jsonl"),
        checkpoint_config=CheckpointConfig(output_dir=folder, every_n_steps=save_every, max_to_keep=None),
        resume_from="latest" if any(folder.glob("step_*")) else None,
    )


def evaluated_steps(folder) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "eval/step" in row]


class Killer(Gate):
    """Its evaluation of step 4 ends the process, as kill -9 does, once this checkpoint is on disk."""

    def __init__(self, checkpoint) -> None:
        super().__init__()
        self.opened.set()
        self._checkpoint = checkpoint

    async def eval(self, **settings):
        while self.versions[-1] == 4:
            if self._checkpoint.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(0.01)
        return await super().eval(**settings)


def train_until_killed(folder, save_every: int, num_steps: int) -> None:
    checkpoint = folder / f"step_{max(save_every, 4):06d}" / "manifest.json"
    trainer, _ = resumed_trainer(folder, Killer(checkpoint), save_every=save_every)
    trainer.train_sync(num_steps)


@pytest.mark.parametrize(
    ("save_every", "num_steps", "evaluated"), [(5, 7, [2, 5, 6]), (2, 4, [2, 4])]
)  # the checkpoint is of a later step than the lost evaluation; of the same, which is the last
@pytest.mark.slow
async def test_an_evaluation_lost_by_a_kill_is_made_again_once(tmp_path, save_every, num_steps, evaluated):
    killed = forked.call(train_until_killed, tmp_path, save_every, num_steps)
    await asyncio.to_thread(killed.join)
    assert killed.exitcode == -signal.SIGKILL and evaluated_steps(tmp_path) == [2]
    gate = Gate()
    gate.opened.set()
    trainer, engine = resumed_trainer(tmp_path, gate, save_every=save_every)
    await trainer.train(num_steps - trainer.step)
    engine.close()
    assert evaluated_steps(tmp_path) == evaluated and gate.versions == evaluated[1:]
    again = Gate()
    trainer, engine = resumed_trainer(tmp_path, again, save_every=save_every)
    await trainer.train(0)
    engine.close()
    assert again.versions == [] and evaluated_steps(tmp_path) == evaluated, "it has a result now"


async def test_an_evaluation_that_a_stop_ended_is_made_when_the_run_goes_on(tmp_path):
    class Stopping(Gate):
        async def eval(self, **_):
            trainer.stop.set("enough")
            await asyncio.Event().wait()

    gate = Stopping()
    trainer, engine = resumed_trainer(tmp_path, gate, eval_in_background=False)
    await trainer.train(3)
    engine.close()
    assert gate.versions == [2] and not evaluated_steps(tmp_path)
    gate = Gate()
    gate.opened.set()
    trainer, engine = resumed_trainer(tmp_path, gate, eval_in_background=False)
    await trainer.train(1)
    engine.close()
    assert evaluated_steps(tmp_path) == gate.versions == [2]


async def test_an_evaluation_that_is_missing_in_the_middle_of_a_batch_is_made_behind_it(tmp_path):
    settings = {"updates_per_batch": 2, "eval_at_start": True, "eval_every_n_steps": None, "save_every": 3}
    trainer, engine = resumed_trainer(tmp_path, Gate(), **{**settings, "eval_at_start": False})
    await trainer.train(3)
    engine.close()
    gate = Gate()
    gate.opened.set()
    trainer, engine = resumed_trainer(tmp_path, gate, **settings)
    await trainer.train(2)
    engine.close()
    assert evaluated_steps(tmp_path) == gate.versions == [4]


def test_only_a_record_without_the_newest_evaluation_lacks_one():
    every, both, none = config(), config(eval_at_start=True), config(eval_every_n_steps=None)
    assert every.lacks_evaluation(5, -1) and every.lacks_evaluation(5, 2) and not every.lacks_evaluation(5, 4)
    assert not every.lacks_evaluation(1, -1) and both.lacks_evaluation(1, -1) and not both.lacks_evaluation(1, 0)
    assert not none.lacks_evaluation(5, -1) and not every.lacks_evaluation(5, None)


async def test_shared_weights_need_a_snapshot():
    class Plain:
        async def eval(self, **_):
            return [], {}

    with pytest.raises(ConfigError, match="SnapshotEvaluator"):
        trainer_with(Plain(), cfg=config())


# --- the snapshot ---


def bandit_evaluator(live: LocalEngine, count: int = 32) -> tuple[SnapshotEvaluator, EngineSnapshot]:
    snapshot = EngineSnapshot(live, kv_tokens=4096)
    evaluator = EngineEvaluator(rollout_engine(snapshot), BanditRequestsAgain(count))
    return SnapshotEvaluator(evaluator, snapshot), snapshot


class BanditRequestsAgain(BanditRequests):
    """The same questions every time."""

    def __call__(self):
        self._position = 0
        return super().__call__()


async def test_an_evaluation_uses_exactly_one_version(tmp_path):
    model = tiny_llama()
    live = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=8192)
    evaluator, snapshot = bandit_evaluator(live)
    seen: dict[int, set[int]] = {}

    class Watching:
        """Passes on, and notes which versions sampled the tokens of each evaluation."""

        take_snapshot = evaluator.take_snapshot

        async def eval(self, **settings):
            await asyncio.sleep(0.05)  # training is ahead by now
            records, metrics = await evaluator.eval(**settings)
            return records, metrics

    inner = snapshot.complete_tokens

    async def noting(request):
        response, info = await inner(request)
        seen.setdefault(snapshot.version, set()).update(run.version for run in response.version_runs)
        return response, info

    snapshot.complete_tokens = noting
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    trainer, engine = trainer_with(Watching(), cfg=config(), train_logger=logger, model=model)
    await trainer.train(6)
    for closing in (engine, live, snapshot, logger):
        closing.close()
    assert seen == {2: {2}, 4: {4}, 6: {6}}
    evals = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "eval/accuracy" in line]
    assert [line["step"] for line in evals] == [2, 4, 6] == [line["eval/step"] for line in evals]


async def weights_after(num_steps: int, *, with_evaluation: bool) -> list[torch.Tensor]:
    model = tiny_llama()
    live = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=8192)
    evaluator, snapshot = bandit_evaluator(live)
    every = 1 if with_evaluation else None
    trainer, engine = trainer_with(evaluator, cfg=config(eval_every_n_steps=every), model=model)
    await trainer.train(num_steps)
    for closing in (engine, live, snapshot):
        closing.close()
    return list(model.parameters())


async def test_a_background_evaluation_does_not_change_training():
    watched = await weights_after(4, with_evaluation=True)
    alone = await weights_after(4, with_evaluation=False)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))


async def sampled(client, text: str = "x") -> list[int]:
    template = ByteTemplate()
    request = TokenCompletionRequest(
        model="tiny",
        prompt_token_ids=template.apply([{"role": "user", "content": text}]).prompt_token_ids,
        sampling=SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True),
        return_=ReturnSpec.for_rl(),
        seed=1,
    )
    response, _ = await client.complete_tokens(request)
    return [*response.completion_token_ids.tolist(), *(round(float(p), 4) for p in response.completion_logprobs)]


def shake(model) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)


@pytest.mark.parametrize("kind", ["full", "lora", "tied"])
async def test_a_snapshot_keeps_the_weights_of_its_time(kind):
    model = tiny_llama(tie_word_embeddings=kind == "tied")
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        shake(model)
    live = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=4096)
    snapshot = EngineSnapshot(live, kv_tokens=4096)
    before = await sampled(live)
    assert await sampled(snapshot) == before
    with live.updating(7):
        shake(model)
    assert await sampled(snapshot) == before != await sampled(live)
    snapshot.take_snapshot(7)
    assert await sampled(snapshot) == await sampled(live)
    assert await snapshot.get_policy_version() == 7
    live.close()
    snapshot.close()


def test_a_snapshot_of_an_adapter_shares_the_frozen_base():
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))
    live = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=4096)
    snapshot = EngineSnapshot(live, kv_tokens=4096)
    for (name, own), held in zip(model.named_parameters(), snapshot.engine.model.parameters(), strict=True):
        assert (own is held) == (not own.requires_grad), name
    live.close()
    snapshot.close()
