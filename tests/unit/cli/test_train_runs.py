"""Runs of `ludic train`: what they write and say, and how they go on. Everything is real; the model is tiny."""

import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ludic.models.loading import character_tokenizer, tiny_llama
from ludic.run.config.run_config import RunConfig
from ludic.run.settings import read_toml
from ludic.training.loggers import read_metrics
from ludic.types import load_rollouts
from tests.unit.cli.train_parts import RUN, SMALL, command_in

pytestmark = pytest.mark.slow


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    return command_in(tmp_path, monkeypatch, capsys)


def rewards(folder: Path) -> list[float]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [row["train/avg_total_reward"] for row in rows if "train/avg_total_reward" in row]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.slow
def test_weights_of_another_model_cannot_be_forked_from(ludic, tmp_path):
    assert ludic("train", *RUN).code == 0
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path / "other")
    tiny_llama(len(tokenizer), width=16, layers=1).save_pretrained(tmp_path / "other")
    ended = ludic("train", "letter.py:Letter", "--model", "other", "--fork-from", "runs/first", "--dtype", "float32")
    assert ended.code == 2 and "step_000002" in ended.err and "this model" in ended.err, ended.err


def test_a_run_leaves_settings_metrics_rollouts_and_checkpoints_and_says_so(ludic, tmp_path):
    ended = ludic("train", *RUN, "--set", "bonus=0.5")
    folder = tmp_path / "runs" / "first"
    assert ended.code == 0, ended.err
    assert len(rewards(folder)) == 2 and min(rewards(folder)) >= 0.5, "the argument reached the env"
    assert len(list(load_rollouts(folder / "rollouts" / "from_step_000000.jsonl.gz"))) == 16
    assert (folder / "checkpoints" / "step_000002" / "manifest.json").exists()
    config = read_toml(RunConfig, folder / "config.toml")
    assert (config.env.id, config.algo.group_size, config.agent.parser) == ("letter.py:Letter", 4, "raw")
    for text in (
        "Done after update 2 of 2",
        f"Reward: {rewards(folder)[0]:.3f} in the first update, {rewards(folder)[1]:.3f} in the last",
        "Run folder: runs/first",
        "ludic eval runs/first",
    ):
        assert text in ended.out


def test_a_run_folder_and_a_config_file_are_targets_and_flags_win(ludic, tmp_path):
    ludic("train", *RUN)
    assert ludic("train", "runs/first/config.toml", "--name", "second", "--steps", "1").code == 0
    again = read_toml(RunConfig, tmp_path / "runs" / "second" / "config.toml")
    assert (again.train.steps, again.trainer.lr, again.model.model) == (1, 1e-2, "tiny")
    assert rewards(tmp_path / "runs" / "second") == rewards(tmp_path / "runs" / "first")[:1]


def test_an_existing_run_is_not_touched_unless_it_is_resumed(ludic, tmp_path):
    ludic("train", *RUN)
    same = ludic("train", *RUN)
    assert same.code == 2 and "this very run" in same.err and "ludic train runs/first --resume" in same.err
    other = ludic("train", *RUN, "--lr", "0.5", "--seed", "3")
    assert other.code == 2 and "lr: 0.01 there, 0.5 now" in other.err and "seed: 0 there, 3 now" in other.err
    assert len(rewards(tmp_path / "runs" / "first")) == 2


def test_resuming_goes_on_and_says_what_changed(ludic, tmp_path):
    ludic("train", *RUN, "--save-rollouts")
    complete = ludic("train", "runs/first", "--resume")
    assert complete.code == 0 and "is complete: 2 of 2" in complete.out and not complete.err
    config = tmp_path / "runs" / "first" / "config.toml"
    config.write_text(config.read_text().replace('reduction = "token_mean"\n', ""))  # as a run of an older version is
    ended = ludic("train", "runs/first", "--resume", "--steps", "4")
    assert ended.code == 0, ended.err
    assert "Going on after update 2." in ended.out and "Changed: steps: 2 there, 4 now." in ended.out
    assert 'Changed: reduction: not set there, "token_mean" now.' in ended.out
    assert len(rewards(tmp_path / "runs" / "first")) == 4
    assert read_toml(RunConfig, tmp_path / "runs" / "first" / "config.toml").train.steps == 4
    refused = ludic("train", "runs/first", "--resume", "--steps", "6", "--lr", "0.5")
    assert refused.code == 2 and "lr: 0.01 there, 0.5 now" in refused.err and "steps" not in refused.err.split("`")[0]


def flip_a_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_run_goes_on_from_its_newest_undamaged_checkpoint(ludic, tmp_path, caplog):
    ludic("train", *RUN, "--checkpoint-every", "1", "--steps", "3", "--checkpoint-keep", "3")
    folder = tmp_path / "runs" / "first"
    expected = rewards(folder)
    saved = [folder / "checkpoints" / f"step_00000{step}" for step in (1, 2, 3)]
    flip_a_bit(saved[2] / "manifest.json", 40)
    flip_a_bit(saved[1] / "model.safetensors", -1)
    flip_a_bit(next((folder / "rollouts").iterdir()), 50)
    (folder / "checkpoints" / "best.json").write_bytes(bytes(100))
    first, *later = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"\n" + first + bytes(30) + b"\n" + b"".join(later))

    exported = ludic("export", "runs/first", "out")
    assert exported.code == 0 and "out: the weights of runs/first/checkpoints/step_000001" in exported.out
    asked_for = ludic("export", "runs/first", "other", "--step", "2")
    assert asked_for.code == 2 and "model.safetensors is not what was written" in asked_for.err
    caplog.clear()
    ended = ludic("train", "runs/first", "--resume")
    assert ended.code == 0 and "Going on after update 1." in ended.out, ended.err
    skipped = [message for message in caplog.messages if message.startswith("Skipping")]
    assert len(skipped) == 2 and "step_000003: it has no complete manifest.json" in skipped[0]
    assert "step_000002: model.safetensors is not what was written" in skipped[1]
    assert "2 damaged lines are left out, the first is line 1" in caplog.text and rewards(folder) == expected

    for checkpoint in saved:
        flip_a_bit(checkpoint / "ranks" / "00000-000.safetensors", 100)
    before = sorted(folder.rglob("*"))
    for arguments in (["train", "runs/first", "--resume", "--steps", "5"], ["export", "runs/first", "other"]):
        refused = ludic(*arguments)
        assert refused.code == 2 and "All checkpoints in runs/first/checkpoints are damaged" in refused.err
    assert ludic("train", *RUN).code == 2, "it is not started over, either"
    assert sorted(folder.rglob("*")) == before and rewards(folder) == expected and not Path("other").exists()


@pytest.mark.slow
def test_without_the_optimizer_a_run_leaves_weights_and_cannot_be_resumed(ludic, tmp_path):
    ended = ludic("train", *RUN, "--no-save-optimizer", "--checkpoint-every", "0")
    assert ended.code == 0 and "--resume" not in ended.out, ended.out + ended.err
    (saved,) = (tmp_path / "runs" / "first" / "checkpoints").glob("step_*")
    assert (saved / "model.safetensors").exists() and not list(saved.glob("*optimizer*"))
    resumed = ludic("train", "runs/first", "--resume", "--steps", "3")
    assert resumed.code == 2 and "holds no optimizer" in resumed.err and "--model" in resumed.err, resumed.err
    forked = ludic("train", *RUN, "--model", "runs/first", "--name", "second", "--steps", "1")
    assert forked.code == 0, forked.err


def test_a_schedule_that_ends_elsewhere_is_another_run(ludic):
    ludic("train", *RUN, "--schedule", "linear")
    refused = ludic("train", "runs/first", "--resume", "--steps", "4")
    assert refused.code == 2 and "steps: 2 there, 4 now" in refused.err


@pytest.mark.slow
def test_a_run_without_a_checkpoint_starts_over_when_resumed(ludic, tmp_path):
    ludic("train", *RUN)
    folder = tmp_path / "runs" / "first"
    expected = rewards(folder)
    shutil.rmtree(folder / "checkpoints")
    ended = ludic("train", "runs/first", "--resume")
    assert ended.code == 0 and "There is no checkpoint yet: it starts over." in ended.out
    assert rewards(folder) == expected
    assert len(list(load_rollouts(folder / "rollouts" / "from_step_000000.jsonl.gz"))) == 16


@pytest.mark.slow
def test_a_fork_takes_the_weights_of_a_concrete_checkpoint_and_nothing_else(ludic, tmp_path):
    ludic("train", *RUN)
    ended = ludic("train", *RUN[:-1], "fork", "--fork-from", "runs/first", "--lr", "1e-9", "--weight-decay", "0")
    assert ended.code == 0, ended.err
    settings = read_toml(RunConfig, tmp_path / "runs" / "fork" / "config.toml").model
    assert settings.fork_from == Path("runs/first/checkpoints/step_000002"), "whatever the newest is later"
    first, fork = (tmp_path / "runs" / name / "checkpoints" / "step_000002" for name in ("first", "fork"))
    for name, weight in weights(fork).items():
        torch.testing.assert_close(weight, weights(first)[name], rtol=0, atol=1e-6)
    assert json.loads((fork / "trainer_state.json").read_text())["step"] == 2


def test_closing_statement_has_evaluation_before_and_after(ludic, tmp_path):
    ended = ludic("train", *RUN, "--eval-at-start", "--eval-every", "2", "--eval-episodes", "6")
    assert ended.code == 0, ended.err
    assert "Evaluation: mean reward" in ended.out and "after update 0" in ended.out and "after update 2" in ended.out
    rows = [row for row in read_metrics(tmp_path / "runs" / "first" / "metrics.jsonl") if "eval/mean_reward" in row]
    assert [row["step"] for row in rows] == [0, 2] and rows[0]["eval/num_samples"] == 6


@pytest.mark.slow
def test_evaluation_in_the_background_sees_the_weights_it_was_asked_about(ludic, tmp_path):
    both = ["--eval-at-start", "--eval-every", "2", "--eval-episodes", "6"]
    ludic("train", *RUN, *both)
    ended = ludic("train", *RUN[:-1], "beside", *both, "--eval-in-background")
    assert ended.code == 0, ended.err
    found = [
        [
            (row["step"], row["eval/mean_reward"])
            for row in read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
            if "eval/mean_reward" in row
        ]
        for name in ("first", "beside")
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_generating_while_training_stays_within_the_lag(ludic, tmp_path):
    ended = ludic("train", *RUN, "--max-lag", "1", "--steps", "4")
    assert ended.code == 0, ended.err
    lags = [row["train/lag_max"] for row in read_metrics(tmp_path / "runs" / "first" / "metrics.jsonl")]
    assert len(lags) == 4 and max(lags) <= 1


@pytest.mark.slow
def test_an_adapter_is_trained_saved_and_can_be_a_model_again(ludic, tmp_path):
    ended = ludic("train", *RUN, "--lora-rank", "2")
    assert ended.code == 0 and "is low for a LoRA" not in ended.out, ended.err
    checkpoint = tmp_path / "runs" / "first" / "checkpoints" / "step_000002"
    assert (checkpoint / "adapter_model.safetensors").exists() and not (checkpoint / "model.safetensors").exists()
    assert ludic("train", "runs/first", "--resume", "--steps", "3").code == 0
    on = ludic("train", "letter.py:Letter", *SMALL, "--model", "runs/first", "--steps", "1", "--name", "on")
    assert on.code == 0, on.err
    low = ludic("train", *RUN, "--lora-rank", "2", "--lr", "1e-5", "--steps", "1", "--name", "low")
    assert "lr 1e-05 is low for a LoRA" in low.out


@pytest.mark.slow
def test_samples_of_a_file_are_asked_in_turn(ludic, tmp_path):
    (tmp_path / "q.jsonl").write_text("".join(f'{{"question": "{letter}"}}\n' for letter in "abcd"))
    ended = ludic("train", "letter.py:Question", "--data", "q.jsonl", *SMALL, "--steps", "2", "--name", "first")
    assert ended.code == 0, ended.err
    rollouts = load_rollouts(tmp_path / "runs" / "first" / "rollouts" / "from_step_000000.jsonl.gz")
    asked = [rollout.env_steps[0].prev_obs for rollout in rollouts]
    assert sorted(asked) == sorted("abcd" * 4), "two updates of two groups of four: every question once"
    no_eval = ludic("train", "letter.py:Question", "--data", "q.jsonl", *SMALL, "--eval-every", "1")
    assert no_eval.code == 2 and "--eval-data FILE.jsonl" in no_eval.err


def test_a_learning_rate_that_is_far_too_high_says_so(ludic):
    ended = ludic("train", *RUN, "--lr", "1e30", "--steps", "4", "--checkpoint-every", "1")
    assert ended.code == 2 and "not finite" in ended.err and "Traceback" not in ended.err
    assert "--lr SMALLER" in ended.err and "died" not in ended.err


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before_and_says_how_to_go_on(ludic, tmp_path):
    ludic("train", *RUN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the kernel refuses, as a full disk would
    try:
        ended = ludic("train", "runs/first", "--resume", "--steps", "4", "--checkpoint-every", "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert ended.code == 2 and "Could not write runs/first/checkpoints/step_000003" in ended.err
    assert "step_000002 is intact" in ended.err and "ludic train runs/first --resume" in ended.err
    assert "Traceback" not in ended.err
    assert ludic("train", "runs/first", "--resume", "--steps", "4").code == 0
    assert len(rewards(tmp_path / "runs" / "first")) == 4


OWN = """
from ludic.agents import ReActAgent
from ludic.context import FullDialog
from ludic.parsers import ParseResult
from ludic.training import make_grpo

from letters_of_own import ALPHABET  # beside this file

def steady(*, group_size, shift=0.0):
    return make_grpo(group_size=group_size, name=f"steady{shift}")

def first_letter(text):
    return ParseResult(text[:1] if text[:1] in ALPHABET else "a", 0.25, None)

class Careful(ReActAgent):
    name = "careful"

def spell(word: str) -> str:
    \"\"\"The letters of a word.\"\"\"
    return " ".join(word)

def nothing():
    return None
"""


def test_resume_finds_custom_algorithm_agent_parser_and_tools(ludic, tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "own.py").write_text(OWN)
    (tmp_path / "parts" / "letters_of_own.py").write_text("import string\nALPHABET = string.ascii_letters\n")
    own = [
        "--algo",
        "parts/own.py:steady",
        "--algo-set",
        "shift=2.0",
        "--parser",
        f"{tmp_path}/parts/own.py:first_letter",
    ]
    own += ["--agent", "parts/own.py:Careful", "--tools", "parts/own.py:spell", "calculator"]
    ended = ludic("train", "letter.py:Letter", *SMALL, "--steps", "1", *own, "--max-seq-len", "2048")
    folder = tmp_path / "runs" / "Letter-tiny-steady"
    assert ended.code == 0, ended.err
    resumed = ludic("train", str(folder.relative_to(tmp_path)), "--resume", "--steps", "2")
    assert resumed.code == 0 and len(rewards(folder)) == 2, resumed.err
    assert min(rewards(folder)) >= 0.25, "the parser's reward"
    config = read_toml(RunConfig, folder / "config.toml")
    assert config.agent.tools == ("parts/own.py:spell", "calculator") and config.algo.algo == "parts/own.py:steady"
    prompt = (
        next(load_rollouts(folder / "rollouts" / "from_step_000000.jsonl.gz")).agent_steps[0].trace.prompt_token_ids
    )
    assert "The letters of a word." in character_tokenizer().decode(prompt.tolist())
    for wrong, message in (
        (["--algo", "parts/own.py:nothing"], "makes a NoneType; it must return an RLAlgorithm"),
        (
            ["--agent", "parts/own.py:nothing"],
            "The agent nothing() cannot be called: too many positional arguments. Its first argument is the task",
        ),
        (["--tools", "calculator", "--agent-set", 'tools=["calculator"]'], "Tools were given twice"),
    ):
        refused = ludic("train", "letter.py:Letter", *SMALL, "--name", "wrong", *wrong)
        assert refused.code == 2 and message in refused.err, refused.err


# --- runs that go wrong -----------------------------------------------------------------------------------------


def test_an_env_that_raises_shows_its_own_line_once_and_how_often(ludic, caplog):
    ended = ludic("train", "letter.py:Breaks", *SMALL, "--steps", "1", "--name", "first")
    assert ended.code == 2, ended.out
    first, *rest = [record.getMessage() for record in caplog.records if record.name == "ludic.batch_gen.episodes"]
    assert "return table[action]" in first and "return helper({}, action)" in first and "/src/ludic/" not in first
    assert "of env 'letter.py:Breaks' failed and will be retried: KeyError" in first and "env seed" in first
    assert all("return table[action]" not in line for line in rest)
    assert "5 of 8 episodes failed, more than max_failed_share=0.5 allows. 5 x at letter.py:" in ended.err
    assert "To go on: ludic train runs/first --resume" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        ("Exits", "RuntimeError: The env raised SystemExit(0)."),
        ("Overflows", "Overflows.step gave 'agent_0' reward=1e+300"),
        ("Circular", "an info that is not JSON: Circular reference"),
    ],
)
def test_an_env_that_exits_or_returns_what_it_may_not_ends_its_run_with_the_reason(ludic, cls, told):
    ended = ludic("train", f"letter.py:{cls}", *SMALL, "--steps", "1")
    assert ended.code == 2 and "more than max_failed_share=0.5 allows" in ended.err and told in ended.err


def test_an_env_whose_constructor_exits_is_named(ludic):
    ended = ludic("train", "letter.py:ExitsWhenMade", *SMALL)
    assert ended.code == 2 and "cannot be made with no arguments: SystemExit: 0" in ended.err


def test_an_env_that_hangs_ends_its_run_with_the_limit_it_passed(ludic, monkeypatch):
    monkeypatch.setattr("ludic.envs.threads._FINISH_S", 0.05)
    monkeypatch.setattr("ludic.envs.threads._INTERRUPTED_S", 0.05)
    ended = ludic("train", "letter.py:Hangs", *SMALL, "--steps", "1", "--env-timeout", "1")
    assert ended.code == 2 and "Hangs.step took longer than env_timeout_s=1." in ended.err
    ended = ludic("train", "letter.py:Hangs", *SMALL, "--steps", "1", "--episode-timeout", "1", "--name", "other")
    assert ended.code == 2 and "The episode took longer than episode_timeout_s=1." in ended.err


def test_the_share_of_episodes_that_may_fail_is_a_setting(ludic):
    ended = ludic("train", "letter.py:Breaks", *SMALL, "--steps", "1", "--max-failed-share", "1")
    assert ended.code == 2 and "max_failed_share" not in ended.err and "nothing to train on" in ended.err


def test_env_without_super_init_works(ludic):
    assert ludic("train", "letter.py:WithoutSuper", *SMALL, "--steps", "1").code == 0


def test_run_that_learned_nothing_ends_with_the_reason(ludic):
    ended = ludic("train", "letter.py:Flat", *SMALL, "--steps", "2", "--name", "first")
    assert ended.code == 0
    assert ended.out.splitlines()[-1].startswith(
        "Nothing was learned: the gradient was zero in every update (2). All episodes earned the same reward, 1,"
    )
    assert "Nothing was learned" not in ludic("train", *RUN).out


@pytest.mark.slow
def test_replies_that_are_cut_off_are_named_as_the_cause(ludic):
    flags = ["--max-tokens", "2", "--cut-off", "reject", "--unreadable", "stop", "--steps", "1", "--seed", "1"]
    ended = ludic("train", "letter.py:Letter", *SMALL, *flags)
    assert "ran out of tokens before they ended" in ended.out.splitlines()[-1], ended.out
