"""`ludic rescore`, and `--judge` of `ludic train` and `ludic eval`, with an endpoint that judges by a rule."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from ludic.run import build
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.config.reward import RewardSettings
from ludic.run.parts.episodes import make_rewards
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError, load_rollouts, save_rollouts
from plugins.judges.tests.cases import mark_in, section_in
from tests.unit.cli.runner import invoke

pytestmark = pytest.mark.slow

PARTS = """
from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome

class Letter(SingleAgentEnv):
    blocking = False

    def env_reset(self, *, seed=None):
        return "Write a letter.", {}

    def env_step(self, action):
        return StepOutcome("", float(action.isupper()), terminated=True, info={"correct": action.isupper()})

def is_digit(rollout):
    return float(rollout.agent_steps[-1].action.isdigit())

def picky(rollout):
    raise RuntimeError("I never score.")
"""
JUDGES_PAGE = Path(__file__).parents[3] / "docs" / "judges.md"
SMALL = {"model": "tiny", "max_tokens": 1, "group_size": 4, "rollouts_per_update": 64, "logger": "none"}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]


class Judging(BaseHTTPRequestHandler):
    """Gives 10 to digits and 0 to other replies; ranks digits first."""

    def do_GET(self):
        self.answer({"data": [{"id": "digits-judge"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = "\n".join(message["content"] for message in body["messages"])
        if '"count_digits"' in prompt and "Tool result:" not in prompt:
            call = {"name": "count_digits", "arguments": {"text": section_in(prompt, "reply")}}
            return self.say(f"<tool_call>{json.dumps(call)}</tool_call>")
        verdict = {"mark": mark_in(prompt), "reason": "I look for digits."}
        if '"ranking"' in prompt:
            labels = re.findall(r"^\[reply ([A-Z]\d*) ", prompt, re.MULTILINE)
            verdict["ranking"] = sorted(labels, key=lambda label: not section_in(prompt, f"reply {label}").isdigit())
        else:
            verdict["score"] = (10 if "from 0 to 10" in prompt else 1) * section_in(prompt, "reply").isdigit()
        self.say(json.dumps(verdict))

    def say(self, text):
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        self.answer({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}})

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    pytest.importorskip("aiohttp")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judging)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS)


@pytest.fixture
def played() -> Path:
    with build(env="parts.py:Letter", **SMALL, name="played") as run:
        run.train(steps=1)
    (file,) = Path("runs/played/rollouts").iterdir()
    return file


def number(pattern: str, output: str) -> float:
    return float(re.search(pattern, output)[1])


def test_a_run_is_rescored_by_a_function_and_trained_on(played: Path):
    before = played.read_bytes()
    result = invoke(["rescore", "runs/played", "--reward", "parts.py:is_digit", "--reward-weight", "env=0"])
    assert result.exit_code == 0, result
    out = Path("runs/played/rescored/is_digit/rollouts/rescored.jsonl.gz")
    digits = [float(r.agent_steps[-1].action.isdigit()) for r in load_rollouts(out)]
    assert played.read_bytes() == before and [r.total_reward for r in load_rollouts(out)] == digits and any(digits)
    assert "64 rollouts of 16 groups" in result.output
    assert number(r"reward +\S+ +(\S+)", result.output) == pytest.approx(sum(digits) / 64, abs=1e-4)
    assert number(r"env × 0 +(\S+)", result.output) == pytest.approx(number(r"reward +(\S+)", result.output))
    assert "is_digit and the env's verdict: accuracy" in result.output and "Pairs of siblings" in result.output
    assert f"ludic train ENV --rollouts {out}" in result.output.replace("\n", " ")
    trained = invoke(["train", "parts.py:Letter", *FLAGS, "--steps", "1", "--name", "again", "--rollouts", str(out)])
    assert trained.exit_code == 0, trained
    (row,) = [row for row in read_metrics(Path("runs/again/metrics.jsonl")) if "train/loss" in row]
    assert row["train/reward/is_digit"] == pytest.approx(sum(digits) / 64)
    assert invoke(["show", str(out.parents[1])]).exit_code == 0, "the result opens like a run"


def test_a_file_is_rescored_by_a_judge(played: Path, judge: str):
    Path("criteria.toml").write_text('[digit]\ntext = "It is a digit."\nweight = 3\n[short]\ntext = "It is short."\n')
    command = ["rescore", str(played), "--judge", judge, "--judge-criteria", "criteria.toml", "--out", "graded.jsonl"]
    result = invoke([*command, "--reward-weight", "env=0", "--judge-cache", "verdicts.jsonl"])
    assert result.exit_code == 0, result
    for rollout in load_rollouts("graded.jsonl"):
        is_digit = float(rollout.agent_steps[-1].action.isdigit())
        assert rollout.reward_components["judge/digit"] == 0.75 * is_digit and rollout.total_reward == is_digit
    calls = number(r"judge/calls (\S+)", result.output)
    assert number(r"judge/prompt_tokens ([\d,]+)", result.output.replace(",", "")) == 100 * calls and calls <= 2 * 64
    again = invoke([*command, "--judge-cache", "verdicts.jsonl"])
    assert number(r"judge/calls (\S+)", again.output) == 0, "all verdicts were in the file"


@pytest.mark.slow
def test_a_judge_with_tools_is_a_reward(played: Path, judge: str):
    (program,) = re.findall(r"^```python\n(# checker\.py\n.*?)^```$", JUDGES_PAGE.read_text(), re.DOTALL | re.MULTILINE)
    Path("checker.py").write_text(program.replace("http://127.0.0.1:8000/v1", judge))
    rewards = "--reward count=checker.py:checker --reward-weight env=0 --out c.jsonl"
    result = invoke(["rescore", str(played), *rewards.split()])
    assert result.exit_code == 0, result
    found = list(load_rollouts("c.jsonl"))
    assert [r.reward_components["count"] for r in found] == [float(r.agent_steps[-1].action.isdigit()) for r in found]
    replies = {r.agent_steps[-1].action for r in found}
    assert number(r"count/verdicts (\S+)", result.output) == 64
    assert number(r"count/calls (\S+)", result.output) == 2 * len(replies), "a call of the tool, and a verdict"


def test_siblings_are_ranked(played: Path, judge: str):
    command = ["rescore", str(played), "--judge", judge, "--judge-by", "ranking", "--name", "ranked"]
    result = invoke(command)
    assert result.exit_code == 0 and "judge/position_bias" in result.output, result
    assert played.with_name(played.name.replace(".jsonl", ".ranked.jsonl")).is_file()


def test_rollouts_without_a_score_are_failed_and_said(played: Path):
    result = invoke(["rescore", "played", "--reward", "parts.py:picky"])
    assert (
        result.exit_code == 1
        and "64 rollouts have no score and count as failed: RuntimeError: I never score." in result.output
    )
    (out,) = Path("runs/played/rescored/picky/rollouts").iterdir()
    assert all(r.failure is not None for r in load_rollouts(out))


def test_a_model_in_this_process_judges(played: Path):
    """The tiny model writes no verdict, and every rollout says so."""
    save_rollouts(list(load_rollouts(played))[:8], "few.jsonl")
    result = invoke(["rescore", "few.jsonl", "--judge", "tiny", "--judge-tokens", "4", "--out", "graded.jsonl"])
    assert result.exit_code == 1 and "The judge tiny gave no readable verdict in 3 tries" in result.output, result


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "No reward"),
        (["--judge-tokens", "5"], "judge_tokens = 5 is for a judge"),
        (["--judge", "tiny", "--judge-model", "x"], "for a judge behind a URL"),
        (["--judge", "http://127.0.0.1:1/v1", "--judge-key-env", "NOT_SET"], "not set"),
        (["--judge", "tiny", "--judge-criteria", "none.toml"], "cannot be read"),
        (["--reward", "parts.py:is_digit", "--out", "empty.jsonl"], "is the file that is read"),
        (["--reward", "parts.py:is_digit"], "no rollouts in"),
    ],
)
def test_mistakes_are_named(args, message):
    Path("empty.jsonl").write_text("")
    result = invoke(["rescore", "empty.jsonl", *args])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception), result


def test_training_with_a_judge(judge: str):
    judged = f"--steps 2 --name judged --judge {judge} --reward-weight judge=0.5"
    result = invoke(["train", "parts.py:Letter", *FLAGS, *judged.split()])
    assert result.exit_code == 0, result
    rows = [row for row in read_metrics(Path("runs/judged/metrics.jsonl")) if "train/loss" in row]
    (file,) = Path("runs/judged/rollouts").iterdir()
    digits = [r.agent_steps[-1].action.isdigit() for r in load_rollouts(file)]
    assert sum(row["train/score/judge"] for row in rows) / 2 == pytest.approx(sum(digits) / 128)
    assert (
        rows[1]["train/judge/verdicts"] == 128
        and rows[1]["train/judge/calls"] + rows[1]["train/judge/cache_hits"] == 128
    )
    plan = invoke(["train", "parts.py:Letter", *FLAGS, "--judge", judge, "--dry-run"])
    assert "1 × judge" in plan.output


def test_evaluating_with_a_judge(judge: str):
    result = invoke(f"eval parts.py:Letter --model tiny --max-tokens 1 --num-tasks 20 --judge {judge}".split())
    assert result.exit_code == 0 and "score/judge" in result.output, result
    (file,) = Path("runs/eval").glob("*/metrics.json")
    (numbers,) = json.loads(file.read_text()).values()
    assert numbers["judge/verdicts"] == 20 and 0 <= numbers["score/judge"] <= 1


def test_a_judge_of_siblings_needs_some(judge: str):
    for command in (
        ["train", "parts.py:Letter", *FLAGS, "--group-size", "1", "--algo", "reinforce"],
        ["eval", "parts.py:Letter", "--model", "tiny"],
    ):
        result = invoke([*command, "--judge", judge, "--judge-by", "pairs"])
        assert isinstance(result.exception, ConfigError) and "compares the episodes of one task" in str(
            result.exception
        )


def test_settings_of_one_judge_are_one_object():
    """So that its model is loaded once for several envs and for evaluations."""
    settings = RewardSettings(judge="tiny", reward_weight={"judge": 0.5})
    first, second = make_rewards(settings, AgentSettings()), make_rewards(settings, AgentSettings())
    assert first.scorers == second.scorers
    assert make_rewards(RewardSettings(judge="tiny", judge_tokens=9), AgentSettings()).scorers != first.scorers
