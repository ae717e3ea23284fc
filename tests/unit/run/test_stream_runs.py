"""`--data file.py:function`: runs on generated samples, with and without curricula, killed and resumed."""

import json
import time
from pathlib import Path

import pytest

from ludic.batch_gen.requests.streams import first_samples
from ludic.run import build
from ludic.run.parts.samples import eval_samples, train_stream
from ludic.training.loggers import read_metrics
from ludic.types import StepOutcome, load_rollouts
from tests import forked
from tests.fakes import CountingEnv
from tests.unit.cli.train_parts import ENV, SMALL, command_in

pytestmark = pytest.mark.slow

STREAM = """
import random


def stream(seed, difficulty=1):
    rng = random.Random(seed)
    while True:
        yield {"question": "".join(rng.choices("abcdef", k=difficulty)), "level": rng.randrange(5)}


def breaks(seed):
    yield {"question": "a"}
    raise KeyError("no more words")
"""
FLAGS = [*SMALL, "--lr", "1e-2", "--concurrency", "1"]
RISING = ["--curriculum", "rising_difficulty", "--curriculum-set", "window=8", "--curriculum-set", "advance_at=0.2"]


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    (tmp_path / "words.py").write_text(STREAM)
    run = command_in(tmp_path, monkeypatch, capsys)

    def train(*flags: str, data: str = "words.py:stream"):
        return run("train", "letter.py:Question", "--data", data, *FLAGS, *flags)

    return train


def questions(run: Path) -> list[tuple[int, str]]:
    """Number and text of the task of each group, in order of the episodes."""
    rollouts = [r for file in sorted(run.glob("rollouts/*")) for r in load_rollouts(file)]
    by_episode = {r.meta["episode_idx"]: r for r in rollouts}
    first = [by_episode[index] for index in sorted(by_episode)[::4]]
    return [(r.request_meta["sample_index"], r.env_steps[0].prev_obs) for r in first]


def test_every_task_is_the_next_sample_of_the_stream(ludic, tmp_path):
    ended = ludic("--steps", "3", "--name", "first")
    assert ended.code == 0, ended.err
    asked = questions(tmp_path / "runs" / "first")
    assert [number for number, _ in asked] == list(range(6)) and len({text for _, text in asked}) > 2


def test_plan_and_evaluation_know_the_stream(ludic, tmp_path):
    ended = ludic(
        "--steps", "1", "--dry-run", "--eval-at-start", "--eval-data", "words.py:stream", "--eval-episodes", "3"
    )
    assert ended.code == 0 and "a new sample of the stream" in ended.out, ended.err
    held_out = build(
        env="letter.py:Question", data="words.py:stream", eval_data="words.py:stream", model="tiny", max_tokens=1,
        eval_episodes=3, group_size=2, rollouts_per_update=2, logger="none",
    )  # fmt: skip
    trained = first_samples(train_stream(held_out.resolved), 20, seed=held_out.resolved.seed)
    evaluated = eval_samples(held_out.resolved)
    assert len(evaluated) == 3 and evaluated != trained[:3], "another seed than training's"


def test_curriculum_over_a_list_takes_the_first_samples_of_the_stream(ludic, tmp_path):
    chosen = [
        "--curriculum",
        "easiest_first",
        "--curriculum-set",
        "difficulty=level",
        "--curriculum-set",
        "num_tasks=16",
    ]
    ended = ludic("--steps", "1", "--name", "first", *chosen)
    assert ended.code == 0, ended.err
    assert all(number < 16 for number, _ in questions(tmp_path / "runs" / "first"))


def test_mistakes_are_named_before_the_run_begins(ludic, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "?"}) + "\n")
    for data, flags, message in [
        ("words.py:strem", [], "Did you mean 'stream'"),
        ("q.jsonl", RISING, "draws from a function of seed and difficulty"),
        ("words.py:breaks", RISING, "needs a function of `seed` and `difficulty`"),
        ("words.py:stream", [*RISING, "--curriculum-set", "windw=3"], "windw"),
    ]:
        ended = ludic("--steps", "1", "--dry-run", *flags, data=data)
        assert ended.code == 2 and message in ended.err and "Traceback" not in ended.err, ended.err


def test_stream_that_fails_names_the_users_line(ludic):
    ended = ludic("--steps", "3", data="words.py:breaks")
    assert ended.code == 2 and "no more words" in ended.err and 'words.py", line 13' in ended.err, ended.err


class Target(CountingEnv):
    """Counts to the sample's target."""

    def __init__(self, sample):
        super().__init__(target=sample["target"])

    def env_step(self, action):
        return StepOutcome("", reward=1.0, terminated=True)


def test_function_may_be_given_as_an_object(tmp_path):
    def targets(seed):
        while True:
            yield {"target": seed + 1}

    run = build(
        env=Target, data=targets, model="tiny", max_tokens=1, group_size=2, rollouts_per_update=2, logger="none",
        runs=tmp_path, name="run",
    )  # fmt: skip
    with run:
        assert run.train(1).step == 1


@pytest.mark.extended(covered_by="tests/unit/batch_gen/test_streams.py::test_restored_stream_continues_at_its_position")
@pytest.mark.slow
def test_killed_run_resumes_at_the_position_of_the_stream(tmp_path):
    (tmp_path / "letter.py").write_text(ENV)
    (tmp_path / "words.py").write_text(STREAM)
    command = ["train", "letter.py:Question", "--data", "words.py:stream", *FLAGS, *RISING, "--checkpoint-every", "2"]

    def start(*arguments: str) -> forked.Forked:
        return forked.python("-m", "ludic.cli.main", *arguments, cwd=tmp_path)

    def levels(name: str) -> list[float]:
        path = tmp_path / "runs" / name / "metrics.jsonl"
        return [row["train/difficulty"] for row in read_metrics(path)] if path.exists() else []

    killed = start(*command, "--steps", "10", "--name", "killed")
    deadline = time.time() + 300
    while len(levels("killed")) < 5:
        assert killed.poll() is None and time.time() < deadline, killed.said()
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert len(levels("killed")) < 10, "it was too fast to be killed; this test has shown nothing"
    resumed = start("train", "runs/killed", "--resume")
    whole = start(*command, "--steps", "10", "--name", "whole")
    for process in (resumed, whole):
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    assert levels("killed") == levels("whole") and levels("whole")[-1] > 1
    assert questions(tmp_path / "runs" / "killed") == questions(tmp_path / "runs" / "whole")
