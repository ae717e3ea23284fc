"""`ludic eval` as a person types it: a tiny model saved in a folder, a quiz in a user's file."""

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from peft import LoraConfig, get_peft_model

from ludic.cli.eval import run as eval_run
from ludic.cli.eval.config import PolicySettings
from ludic.cli.eval.models import evaluated_models, load, pinned
from ludic.cli.eval.run import read_command
from ludic.inference.local import LocalEngine
from ludic.models.loading import tiny_llama, word_tokenizer
from ludic.run.config.env_and_agent import AgentSettings, EnvSettings
from ludic.run.config.model import ModelSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.resolve import slug
from ludic.run.settings import to_toml, with_values
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from ludic.types import ConfigError, LudicError, load_rollouts
from ludic_serve.openai_server import serve
from tests.unit.cli.runner import invoke

pytestmark = pytest.mark.slow

WORDS = ["yes", "no", "maybe", "q0", "q1", "q2", "q3"]
QUIZ = '''
"""Say yes; which question it is makes no difference."""
from ludic.envs import DatasetQAEnv, LudicEnv, SingleAgentEnv
from ludic.types import StepOutcome

class Quiz(DatasetQAEnv):
    def __init__(self, sample):
        super().__init__(sample)

class Yes(SingleAgentEnv):
    full_reward = 1.0

    def env_reset(self, *, seed=None):
        return f"q{seed % 4}", {"seed": seed}

    def env_step(self, action):
        return StepOutcome("", float("yes" in action), terminated=True)

    def reference_action(self, agent_id):
        return "yes"

class Duel(LudicEnv):
    agent_ids, active_agents = ["left", "right"], ()

    def reset(self, *, seed=None):
        self.active_agents = list(self.agent_ids)
        return {name: (f"q{seed % 4}", {"seed": seed}) for name in self.agent_ids}

    def step(self, actions):
        self.active_agents = []
        return {name: StepOutcome("", float(len(actions.get(name, ""))), terminated=True) for name in self.agent_ids}
'''
SHORT = ["--max-tokens", "2", "--cut-off", "read"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where the commands are typed: a quiz, its questions, two models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiz.py").write_text(QUIZ)
    lines = [json.dumps({"id": str(i), "question": f"q{i % 4}", "answer": "yes"}) for i in range(6)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n")
    for seed, name in enumerate(("one", "two")):
        save_model(tmp_path / name, seed)
    return tmp_path


def save_model(folder: Path, seed: int = 0, *, template: bool = True) -> None:
    tokenizer = word_tokenizer(WORDS)
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=32, layers=1, seed=seed).save_pretrained(folder)


def ludic(*args: str) -> Result:
    result = invoke(["eval", *args])
    if result.exception is not None and not isinstance(result.exception, (SystemExit, LudicError)):
        raise result.exception
    return result


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    return json.loads((folder / "metrics.json").read_text())


def samples(folder: Path, model: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples" / f"{model}.jsonl").read_text().splitlines()]


def answers(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["answer"] for sample in samples]


def episodes(folder: Path, model: str) -> Path:
    (found,) = (folder / "rollouts").glob(f"{model}-*.jsonl.gz")
    return found


def stored(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)


# --- the command ---


def test_evaluation_prints_a_report_and_writes_all_files(folder):
    result = ludic("quiz.py:Yes", "--model", "one", "--num-tasks", "12", "--samples", "4", "--pass-k", "1,4", *SHORT)
    assert result.exit_code == 0, result.output
    out = folder / "runs" / "eval" / "Yes-one"
    numbers, played = metrics(out)["one"], samples(out, "one")
    assert len(played) == 48 and len({sample["task"] for sample in played}) == 12
    right = sum(sample["correct"] for sample in played) / 48
    assert 0 < right < 1, "a random model says yes now and then"
    assert numbers["accuracy"] == pytest.approx(right) == pytest.approx(numbers["pass@1"])
    assert numbers["pass@4"] >= numbers["accuracy"] and "majority@4" in numbers
    assert len(list(load_rollouts(episodes(out, "one")))) == 48
    for text in (
        "accuracy",
        f"{right:.1%} [",
        "pass@4",
        "majority@4",
        "unreadable",
        "truncated",
        "12 × 4",
        str(out.name),
    ):
        assert text in result.output


def test_components_of_scorers_are_shown_and_do_not_change_what_is_right(folder):
    (folder / "mine.py").write_text("def short(rollout):\n    return 1.0 / (1 + len(rollout.agent_steps[0].action))\n")
    args = ["quiz.py:Yes", "--model", "one", "--num-tasks", "12", *SHORT]
    plain = ludic(*args, "--name", "plain")
    rewards = ["--reward", "mine.py:short", "--reward-weight", "env=0.1", "--reward-weight", "short=3"]
    scored = ludic(*args, *rewards, "--name", "scored")
    assert plain.exit_code == 0 == scored.exit_code, scored.output
    before, after = (metrics(folder / "runs" / "eval" / name)["one"] for name in ("plain", "scored"))
    assert after["accuracy"] == before["accuracy"] and after["mean_reward"] == before["mean_reward"]
    played = samples(folder / "runs" / "eval" / "scored", "one")
    mean = sum(sample["scores"]["short"] for sample in played) / 12
    assert after["score/short"] == pytest.approx(mean) and "score/short" in scored.output
    assert after["mean_total_reward"] == pytest.approx(0.1 * before["mean_reward"] + 3 * mean)
    assert "score/short" not in plain.output


def test_several_models_play_the_same_tasks(folder):
    args = ["quiz.py:Quiz", "--data", "questions.jsonl", "--model", "one", "--model", "two", "--samples", "3", *SHORT]
    result = ludic(*args)
    assert result.exit_code == 0, result.output
    out = folder / "runs" / "eval" / "Quiz-one-two"
    one, two = samples(out, "one"), samples(out, "two")
    assert [s["task"] for s in one] == [s["task"] for s in two] and len(one) == 18
    assert [s["answer"] for s in one] != [s["answer"] for s in two]
    header = next(line for line in result.output.splitlines() if "one" in line)
    assert header.split() == ["one", "two"]
    assert "better than the first by" in result.output


def test_the_same_command_gives_the_same_numbers_in_a_new_folder(folder):
    args = ["quiz.py:Yes", "--model", "one", "--num-tasks", "8", *SHORT]
    assert ludic(*args).exit_code == ludic(*args, "--concurrency", "1").exit_code == 0
    first, second = (metrics(folder / "runs" / "eval" / name)["one"] for name in ("Yes-one", "Yes-one-2"))
    assert first == second


def test_resume_plays_only_what_is_missing(folder, monkeypatch):
    args = ["quiz.py:Yes", "--model", "one", "--name", "mine", *SHORT]
    assert ludic(*args, "--num-tasks", "6").exit_code == 0
    out = folder / "runs" / "eval" / "mine"
    lines = stored(episodes(out, "one"))
    stopped = "".join(lines[:4]) + lines[4][:50]  # killed while it wrote
    episodes(out, "one").write_bytes(gzip.compress(stopped.encode())[:-8])
    assert ludic(*args, "--num-tasks", "10", "--resume").exit_code == 0
    again = stored(episodes(out, "one"))
    assert again[:4] == lines[:4] and len(again) == 10
    assert ludic("quiz.py:Yes", "--model", "one", "--num-tasks", "10", "--name", "fresh", *SHORT).exit_code == 0
    assert metrics(out) == metrics(folder / "runs" / "eval" / "fresh")


@pytest.mark.parametrize("share_a_file", [False, True])
def test_models_with_the_same_name_do_not_share_episodes(folder, share_a_file):
    save_model(folder / "other" / "one", seed=1)
    args = ["quiz.py:Yes", "--num-tasks", "8", *SHORT]
    mine, fresh = (folder / "runs" / "eval" / name for name in ("mine", "fresh"))
    assert ludic(*args, "--name", "mine", "--model", "one").exit_code == 0
    first = samples(mine, "one")
    if share_a_file:
        (other,) = evaluated_models(PolicySettings(model=("other/one",)))
        episodes(mine, "one").rename(mine / "rollouts" / f"{other.file_stem}.jsonl.gz")
    assert ludic(*args, "--name", "mine", "--model", "other/one", "--resume").exit_code == 0
    assert ludic(*args, "--name", "fresh", "--model", "other/one").exit_code == 0
    assert answers(samples(mine, "one")) == answers(samples(fresh, "one")) != answers(first)
    assert len(list((mine / "rollouts").glob("*.jsonl.gz"))) == (1 if share_a_file else 2)


def test_model_identity_does_not_depend_on_spelling_or_other_models(folder):
    (typed,) = evaluated_models(PolicySettings(model=("one",)))
    _, compared = evaluated_models(PolicySettings(model=("two/../two/../one", str(folder / "one"))))
    assert (compared.identity, compared.file_stem) == (typed.identity, typed.file_stem)


def test_no_two_models_of_a_comparison_share_a_file(folder):
    for name in ("a/model", "b/model", "model_2"):
        save_model(folder / name)
    field = evaluated_models(PolicySettings(model=("a/model", "b/model", "model_2")))
    assert [contender.label for contender in field] == ["model", "model (2)", "model_2 (2)"]
    assert len({slug(contender.label) for contender in field}) == len({c.file_stem for c in field}) == 3


def test_a_run_that_is_interrupted_says_how_to_go_on(folder, monkeypatch):
    async def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_run, "run_episodes", interrupted)
    result = ludic("quiz.py:Yes", "--model", "one", *SHORT)
    assert result.exit_code == 130 and "--resume --name Yes-one" in result.output


def test_an_env_without_a_verdict_can_be_told_what_right_is(folder):
    args = ["twenty_forty_eight", "--model", "one", "--num-tasks", "2", "--max-steps", "2", *SHORT, "--name", "n"]
    assert ludic(*args).exit_code == 0
    assert "accuracy" not in metrics(folder / "runs" / "eval" / "n")["one"]
    assert ludic(*args, "--resume", "--success-reward", "-99").exit_code == 0
    assert metrics(folder / "runs" / "eval" / "n")["one"]["accuracy"] == 1.0


def test_what_was_measured_is_shown_even_if_the_next_model_cannot_be_loaded(folder):
    result = ludic("quiz.py:Yes", "--model", "one", "--model", "nowhere/at/all", "--num-tasks", "4", *SHORT)
    assert "Cannot load the model" in str(result.exception)
    assert "accuracy" in result.output and "4 × 1" in result.output


# --- adapters, runs, endpoints ---


def an_adapter(base: Path) -> Any:
    model = get_peft_model(
        load(ModelSettings(model=str(base)), seed=0).model, LoraConfig(r=4, target_modules="all-linear")
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(8)[None]).logits


def a_run(folder: Path, **values: Any) -> Any:
    """A training run of an adapter, as far as an evaluation sees it."""
    model = an_adapter(folder / "one")
    CheckpointManager(CheckpointConfig(folder / "run" / "checkpoints")).save(4, model=model)
    config = RunConfig(
        env=EnvSettings(id="quiz.py:Yes", max_steps=1),
        model=ModelSettings(model=str(folder / "one"), lora_rank=4),
        agent=AgentSettings(max_tokens=2, cut_off="read"),
    )
    (folder / "run" / "config.toml").write_text(to_toml(with_values(config, values)))
    return model


def test_the_checkpoint_of_an_adapter_is_its_base_with_the_adapter(folder):
    model = a_run(folder)
    loaded = load(ModelSettings(model=str(folder / "run" / "checkpoints" / "step_000004")), seed=0)
    torch.testing.assert_close(logits(loaded.model), logits(model))
    base = load(ModelSettings(model=str(folder / "one")), seed=0)
    assert not torch.allclose(logits(base.model), logits(model))


def test_a_foreign_adapter_is_loaded_on_the_base_that_it_names(folder):
    model = an_adapter(folder / "one")
    model.save_pretrained(folder / "adapter")
    loaded = load(ModelSettings(model="adapter"), seed=0)
    torch.testing.assert_close(logits(loaded.model), logits(model))
    config = folder / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="does not say what it was trained on"):
        load(ModelSettings(model="adapter"), seed=0)


def test_a_run_folder_is_evaluated_before_and_after(folder):
    a_run(folder)
    result = ludic("run", "--num-tasks", "6")
    assert result.exit_code == 0, result.output
    (found,) = metrics_of_all(folder)
    assert list(found) == ["one", "run/step_000004"]
    assert found["one"]["num_samples"] == 6 and found["one"]["mean_completion_tokens"] <= 2, "played as it was trained"


def test_a_snapshot_of_a_run_is_the_opponent_in_each_role_in_turn(folder):
    a_run(folder)
    duel = ["quiz.py:Duel", "--num-tasks", "4", "--temperature", "0", *SHORT]
    alone = ludic(*duel, "--model", "run@4", "--name", "alone")
    assert "Each model plays left and right, so it meets itself. --against MODEL" in alone.output
    said = {
        (r.env_seed, r.agent_id): r.agent_steps[0].action
        for r in load_rollouts(next(Path("runs/eval/alone/rollouts").iterdir()))
    }

    played = ludic(*duel, "--model", "one", "--against", "run@4", "--name", "both")
    assert played.exit_code == 0 and "meets itself" not in played.output, played.output
    rollouts = list(load_rollouts(episodes(Path("runs/eval/both"), "one")))
    rollouts.sort(key=lambda r: r.request_meta["sample_index"])
    opponent = [r for r in rollouts if r.policy == "opponent"]
    assert [r.agent_id for r in opponent] == ["right", "left", "right", "left"]
    assert all(r.agent_steps[0].action == said[r.env_seed, r.agent_id] for r in opponent)
    found = metrics(Path("runs/eval/both"))["one"]
    own = [r.total_reward for r in rollouts if r.policy != "opponent"]
    assert found["num_samples"] == len(own) == 4 and found["mean_reward"] == pytest.approx(sum(own) / 4)
    assert 'against = "' in Path("runs/eval/both/config.toml").read_text()


def write_run(folder: Path, **values: Any) -> None:
    """The settings of a run, which are all that is read of it before models are loaded."""
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(with_values(RunConfig(), {"id": "quiz.py:Yes", **values})))


def test_a_forked_run_began_with_the_weights_of_its_fork(folder):
    write_run(folder / "run", model="one", fork_from=Path("runs/x/checkpoints/step_000002"))
    assert read_command(["run"])[1].policy.model == ("runs/x/checkpoints/step_000002", "run")


def test_run_is_evaluated_with_its_own_seed_and_length(folder):
    write_run(folder / "run", model="tiny", seed=3, max_seq_len=77)
    config = read_command(["run", "--seed", "9"])[1]
    assert (config.policy.init_seed, config.measure.seed, config.policy.max_model_len) == (3, 9, 77)


def test_random_weights_come_from_their_own_seed(folder):
    args = ["quiz.py:Yes", "--model", "tiny", "--num-tasks", "6", *SHORT]
    seeds = {"a": ["--init-seed", "1"], "b": ["--init-seed", "2"], "c": ["--init-seed", "1"]}
    for name, seed in seeds.items():
        assert ludic(*args, *seed, "--name", name).exit_code == 0
    a, b, c = (answers(samples(folder / "runs" / "eval" / name, "tiny")) for name in seeds)
    assert a == c != b


def test_evaluating_on_training_data_is_reported(folder):
    a_run(folder, id="quiz.py:Quiz", data=folder / "questions.jsonl")
    said = "These are the samples that run was trained on"
    assert said in ludic("run", "--num-tasks", "2").output
    (folder / "held_out.jsonl").write_text((folder / "questions.jsonl").read_text())
    other = ludic("run", "--num-tasks", "2", "--data", "held_out.jsonl")
    assert other.exit_code == 0 and said not in other.output


def test_another_parser_does_not_get_the_arguments_of_the_runs_parser(folder):
    write_run(folder / "run", parser="xml_tag", parser_set={"tag": "move"})
    assert read_command(["run", "--parser", "boxed"])[1].agent.parser_set == {}


def metrics_of_all(folder: Path) -> Iterator[dict[str, dict[str, float]]]:
    return (json.loads(path.read_text()) for path in sorted((folder / "runs" / "eval").glob("*/metrics.json")))


@pytest.fixture
def endpoint(folder) -> Iterator[str]:
    """Our own server, in a thread: the command has its own event loop."""
    model = load(ModelSettings(model="one"), seed=0)
    engine = LocalEngine(model.model, model.tokenizer, kv_tokens=4096)
    started, address, loop = threading.Event(), [], asyncio.new_event_loop()

    def ready(where: str) -> None:
        address.append(where)
        started.set()

    task = loop.create_task(serve(engine, port=0, model_name="served", on_ready=ready, api_key="secret"))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    assert started.wait(60)
    yield f"{address[0]}/v1"
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()
    engine.close()


def test_an_endpoint_is_measured_as_the_model_behind_it(folder, endpoint, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    common = ["quiz.py:Yes", "--num-tasks", "8", "--samples", "2", *SHORT]
    result = ludic(*common, "--base-url", endpoint, "--api-key-env", "MY_KEY", "--name", "http")
    assert result.exit_code == 0, result.output
    assert ludic(*common, "--model", "one", "--name", "here").exit_code == 0
    over_http = metrics(folder / "runs" / "eval" / "http")["served"]
    assert over_http == metrics(folder / "runs" / "eval" / "here")["one"], "same seeds, same replies, same numbers"
    assert "secret" not in (folder / "runs" / "eval" / "http" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt-9", "--api-key-env", "MY_KEY"], "does not serve 'gpt-9'; it serves served"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY: that environment variable is not set"),
        ([], "401"),
    ],
)
def test_endpoint_errors_are_reported_before_playing(folder, endpoint, monkeypatch, flags, message):
    monkeypatch.setenv("MY_KEY", "secret")
    result = ludic("quiz.py:Yes", "--base-url", endpoint, *flags)
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)
    assert not (folder / "runs").exists()


# --- bad input ---


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tic_tac_to"], "Did you mean 'tic_tac_toe'"),
        (["gsm8k", "--model", "one"], "give --data FILE.jsonl"),
        (["quiz.py:Quiz", "--model", "one", "--data", "nowhere.jsonl"], "Cannot read --data nowhere.jsonl"),
        (["quiz.py:Nothing", "--model", "one"], "No env in quiz.py named 'Nothing'"),
        (["quiz.py:Yes", "--model", "nowhere/at/all"], "Cannot load the model 'nowhere/at/all'"),
        (["quiz.py:Yes", "--model", "bare"], "has no chat template"),
        (["quiz.py:Yes", "--model", "one", "--num-tasks", "0"], "takes all of --data"),
        (["quiz.py:Yes", "--model", "one", "--parser", "boxd"], "Did you mean 'boxed'"),
        (["quiz.py:Yes", "--model", "one", "--resume"], "nothing to resume"),
        (["quiz.py:Yes", "--base-url", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["quiz.py:Yes", "--api-key-env", "X"], "give --base-url"),
        (["one"], "folder without a config.toml"),
        (["quiz.py:Yes", "--model", "one", "--against", "two"], "--against two takes an env with several roles"),
        (["quiz.py:Duel", "--model", "one", "--against", "two@3"], "has no checkpoint of step 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_named_and_leaves_nothing_behind(folder, args, message):
    save_model(folder / "bare", template=False)
    result = ludic(*args)
    assert isinstance(result.exception, LudicError), result.output
    assert message in str(result.exception)
    assert not (folder / "runs").exists()


def test_a_step_that_a_run_has_not_is_answered_with_those_it_has(tmp_path):
    for name in ("step_000005", "step_000020", "step_000020.bak"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        pinned(f"{tmp_path}@7")
    assert str(refused.value) == f"{tmp_path} has no checkpoint of step 7; it has @5, @20."
    assert pinned("org/model@5") == "org/model@5"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pass-k", "8", "--samples", "4"], "k = 8, but there are --samples 4"),
        (["--majority-k", "2"], "k = 2, but there are --samples 1"),
        (["--pass-k", "few"], "whole numbers"),
        (["--samples", "0"], "at least 1"),
        (["--samples", "2", "--temperature", "0"], "would be the same"),
        (["--num-taks", "3"], "--num-tasks"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_is_loaded(folder, flags, message, capfd):
    result = ludic("quiz.py:Yes", "--model", "one", *flags)
    said = result.output + "".join(capfd.readouterr()) + str(result.exception)
    assert result.exit_code in (1, 2) and message in " ".join(said.replace("│", " ").split())


def test_a_name_that_is_taken_and_another_setting_on_resume_are_refused(folder):
    args = ["quiz.py:Yes", "--model", "one", "--num-tasks", "2", "--name", "mine", *SHORT]
    assert ludic(*args).exit_code == 0
    assert "is there already" in str(ludic(*args).exception)
    refused = ludic(*args, "--resume", "--temperature", "0").exception
    assert isinstance(refused, ConfigError) and "temperature: 0.6 there, 0.0 now" in str(refused)
