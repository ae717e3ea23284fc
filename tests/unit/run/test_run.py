"""`ludic.run`: a run from Python, with names or objects, from scripts, async code and notebooks."""

import asyncio
import json
import math
import os
import signal
import threading
import time
import traceback

import pytest
import torch

from ludic.agents import Agent
from ludic.envs import SingleAgentEnv
from ludic.models.loading import make_tiny
from ludic.parsers import ParseResult
from ludic.run import Run, RunConfig, RunFailed, build, load
from ludic.run.config.env_and_agent import EnvSettings
from ludic.run.folder import CONFIG, FAILURE
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import read_toml
from ludic.training import CheckpointConfig, TrainerConfig, make_grpo
from ludic.training.loggers import read_metrics
from ludic.training.losses import ReinforceLoss
from ludic.types import ConfigError, StepOutcome

pytestmark = pytest.mark.slow


class Letter(SingleAgentEnv):
    """A capital letter earns 1."""

    blocking = False

    def env_reset(self, *, seed=None):
        return "?", {}

    def env_step(self, action):
        return StepOutcome("", reward=float(action.isupper()), terminated=True)


class Question(Letter):
    """The reply to a sample's question earns 1 if it is the answer."""

    def __init__(self, sample):
        super().__init__()
        self.sample = sample

    def env_reset(self, *, seed=None):
        return self.sample["question"], {}


SMALL = {"model": "tiny", "max_tokens": 1, "group_size": 4, "rollouts_per_update": 8, "lr": 1e-2, "logger": "none"}


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rewards(folder) -> list[float]:
    return [row["train/avg_total_reward"] for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row]


def test_names_and_objects_give_the_same_run(tmp_path):
    curves = []
    (tmp_path / "letters.py").write_text("from tests.unit.run.test_run import Letter\n")
    given = [
        {"env": Letter, "algo": make_grpo(group_size=4, reduction="token_mean"), "model": make_tiny(seed=0)},
        {"env": "letters.py:Letter", "algo": "grpo"},
        {"config": RunConfig(env=EnvSettings(id="letters.py:Letter"), trainer=TrainerConfig(lr=1e-2))},
    ]
    for number, parts in enumerate(given):
        with build(**{**SMALL, **parts}, name=f"run-{number}", steps=2) as run:
            run.train()
        curves.append([row["train/loss"] for row in read_metrics(run.folder / "metrics.jsonl") if "train/loss" in row])
    assert curves[0] == curves[1] == curves[2] and len(curves[0]) == 2


def test_every_kind_of_part_can_be_an_object():
    shown, logged = [], []

    class Shouting(Agent):
        def __init__(self, **parts):
            super().__init__(**parts)
            shown.append(self)

    class Logger:
        def log(self, step, stats):
            logged.append(step)

    def parser(text):
        return ParseResult(action=text, reward=0.0, obs=None)

    with build(
        env=Letter, **{**SMALL, "logger": [Logger()]}, agent=Shouting, parser=parser, loss=ReinforceLoss()
    ) as run:
        run.train(steps=1)
        assert run.trainer is not None and isinstance(run.trainer.algo.loss, ReinforceLoss)
    assert shown and logged == [1] and shown[0].parser is parser


def test_a_model_needs_its_tokenizer_and_takes_an_adapter():
    tiny = make_tiny(seed=0)
    with pytest.raises(ConfigError, match="give its tokenizer"):
        build(env=Letter, **{**SMALL, "model": tiny.model})
    with build(env=Letter, **{**SMALL, "model": tiny.model}, tokenizer=tiny.tokenizer, lora_rank=2) as run:
        run.train(steps=1)
        trained = [name for name, weight in run.trainer.model.named_parameters() if weight.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_samples_can_be_a_list():
    samples = [{"question": letter} for letter in "abcd"]
    with build(env=Question, **SMALL, data=samples, eval_data=samples[:2], eval_episodes=2) as run:
        assert run.evaluate().metrics["num_tasks"] == 2
        assert run.train(steps=1).step == 1
    with pytest.raises(ConfigError, match="asks about samples"):
        build(env=Question, **SMALL)


def test_training_continues_and_writes_the_new_step_count(tmp_path):
    run = build(env=Letter, **SMALL, name="longer")
    assert [run.train(steps=n).step for n in (1, 2)] == [1, 3]
    run.close()
    assert read_toml(RunConfig, run.folder / CONFIG).train.steps == 3
    again = load(run.folder, env=Letter)
    with again:
        assert again.resume(steps=2).step == 5
    with pytest.raises(ConfigError, match="another --name starts a new one"):
        build(env=Letter, **SMALL, name="longer").train()
    with pytest.raises(ConfigError, match="holds no run"):
        load(tmp_path / "nowhere")


def test_resumed_run_equals_an_uninterrupted_run():
    with build(env=Letter, **SMALL, name="whole", steps=4) as run:
        run.train()
        whole = torch.cat([weight.flatten() for weight in run.trainer.model.parameters()])
    with build(env=Letter, **SMALL, name="parts") as run:
        run.train(steps=2)
    with load("runs/parts", env=Letter) as run:
        run.resume(steps=2)
        parts = torch.cat([weight.flatten() for weight in run.trainer.model.parameters()])
    assert torch.equal(whole, parts)


def test_weights_that_are_not_loaded_are_not_evaluated():
    with build(env=Letter, **SMALL, name="trained") as run:
        run.train(steps=1)
    with load("runs/trained", env=Letter) as run:
        with pytest.raises(ConfigError, match=r"step_000001 are not loaded. Call resume\(\) first"):
            run.evaluate()
        run.resume(steps=1)
        assert run.evaluate().metrics["num_samples"] == 200


def test_first_weights_may_be_evaluated_before_the_run_is_resumed():
    with build(env=Letter, **SMALL, name="both", steps=2) as run:
        run.train(steps=1)
    with build(env=Letter, **SMALL, name="both", steps=2) as run:
        run.evaluate()
        run.resume()
    assert [entry["train/step"] for entry in read_metrics("runs/both/metrics.jsonl") if "train/step" in entry] == [1, 2]


def test_closed_run_resumes_from_its_newest_checkpoint():
    run = build(env=Letter, **SMALL, name="again")
    run.train(steps=1)
    for step in (2, 3):
        run.close()
        assert run.resume(steps=1).step == step
    run.close()


def test_nonconstant_schedule_cannot_be_extended():
    with build(env=Letter, **SMALL, schedule="linear", steps=2) as run:
        run.train()
        with pytest.raises(ConfigError, match="schedule = 'linear' ends at step 2"):
            run.train(steps=1)


def test_evaluation_before_and_after_training_is_on_the_same_tasks():
    with build(env=Letter, **SMALL, eval_episodes=40, eval_temperature=1.0) as run:
        before, again = run.evaluate(), run.evaluate()
        assert before.metrics["mean_reward"] == again.metrics["mean_reward"] and not run.folder.exists()
        run.train(steps=25)
        assert run.evaluate().metrics["mean_reward"] > before.metrics["mean_reward"] + 0.3


async def test_async_code_and_notebooks():
    async with build(env=Letter, **SMALL) as run:
        assert (await run.train_async(1)).step == 1
        assert run.train(steps=1).step == 2, "the loop of a notebook runs already"
        assert (await run.evaluate_async()).metrics["num_samples"] == 200
    assert run.trainer is None


def test_a_signal_stops_after_the_update_and_saves():
    def stop_soon(run: Run) -> None:
        while run.step < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with build(env=Letter, **SMALL) as run:
        threading.Thread(target=stop_soon, args=(run,), daemon=True).start()
        result = run.train(steps=10_000)
    assert result.stopped_by == "SIGINT" and 2 <= result.step < 10_000
    assert (run.folder / "checkpoints" / f"step_{result.step:06d}").is_dir()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lrr": 1.0}, "no setting 'lrr'. Did you mean 'lr'"),
        ({"lr": "fast"}, "lr = 'fast': expected a number"),
        ({"lr": math.nan}, "lr = nan; it must be a finite number"),
        ({"group_size": 3}, "not a multiple of group_size = 3"),
        ({"temperature": 0.0}, "nothing to learn"),
        ({"algo": "grop"}, "Did you mean 'grpo'"),
        ({"env": None}, "No env: give env="),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(settings, message):
    with pytest.raises(LookupError if "Did you mean 'grpo'" in message else ConfigError, match=message):
        build(**{"env": Letter, **SMALL, **settings})


@pytest.mark.parametrize("settings", [{"lr": "fast"}, {"device": "abacus"}, {"model": "/nowhere"}])
def test_a_mistake_in_a_script_shows_one_traceback(settings):
    """What transformers, torch or msgspec said about it is in the sentence already."""
    with pytest.raises(ConfigError) as mistake:
        build(**{"env": Letter, **SMALL, **settings}).train(1)
    assert "".join(traceback.format_exception(mistake.value)).count("Traceback") == 1


def test_a_resolved_run_leaves_nothing_open():
    resolved = build(env=Letter, **SMALL).resolved
    assert isinstance(resolved, ResolvedRun)
    assert (resolved.group_size, resolved.num_groups, resolved.max_lag, resolved.max_steps) == (4, 2, 0, 32)
    assert resolved.sampling.max_tokens == resolved.eval_sampling.max_tokens == 1
    assert isinstance(resolved.trainer, TrainerConfig) and resolved.trainer.lr == 1e-2
    assert isinstance(resolved.checkpoint, CheckpointConfig)
    assert resolved.checkpoint.output_dir == resolved.folder / "checkpoints"


def test_failed_run_says_how_to_resume(monkeypatch):
    class Broken(Letter):
        def env_step(self, action):
            raise RuntimeError("out of letters")

    with build(env=Broken, **SMALL, name="broken") as run, pytest.raises(RunFailed, match="runs/broken --resume"):
        run.train(steps=1)
    assert asyncio.all_tasks(asyncio.new_event_loop()) == set()
    assert "out of letters" in json.loads((run.folder / FAILURE).read_text())["error"]


def test_a_run_that_goes_on_after_a_failure_has_not_failed(monkeypatch):
    with build(env=Letter, **SMALL, name="repaired", checkpoint_every=1) as run:
        run.train(steps=1)
        with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
            patch.setattr(type(run.trainer), "train", failing)
            run.train(steps=1)
        assert json.loads((run.folder / FAILURE).read_text())["error"] == "ArithmeticError: a bug"
    with load("runs/repaired", env=Letter) as run:
        run.resume(1)
    assert not (run.folder / FAILURE).exists()


async def failing(self, num_steps):
    raise ArithmeticError("a bug")
