"""`--reward`, `--reward-weight` and `--reward-set` in small runs: values, metrics, mistakes, a resume; objects in `build`."""

import asyncio
from pathlib import Path

import pytest

import ludic.run
from ludic.batch_gen import TooManyFailures
from ludic.cli.eval.config import EvalConfig, of_run
from ludic.rewards.shaping import LengthPenalty
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.config.reward import RewardSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.parts.episodes import make_rewards
from ludic.run.settings import read_toml, to_toml
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError, LudicError, load_rollouts
from tests.unit.cli.train_parts import RUN, Ended, command_in

pytestmark = pytest.mark.slow

SCORERS = """
def vowel(rollout):
    return float(rollout.agent_steps[-1].action[:1] in "aeiouAEIOU")


async def parts(rollout, high=1.0):
    return {"one": high, "two": 0.5}


def rank(rollouts):
    return [float(number) for number, _ in enumerate(rollouts)]


def broken(rollout):
    if len(broken.seen) % 8 == 3:
        broken.seen.append(rollout)
        raise RuntimeError("no verdict")
    broken.seen.append(rollout)
    return 1.0

broken.seen = []
three = 3


class Fixed:
    name, by_group = "own", False

    async def score(self, rollouts):
        return [{"own": 1.0, "own/half": 0.5} for _ in rollouts]

    def metrics(self):
        return {"own/calls": 3.0, "other": 1.0}


def made(value=1.0):
    return Judge(value=value)


def zero():
    return 0.5


class Judge:
    by_group = False

    def __init__(self, name="judge", value=1.0):
        self.name, self.value = name, value

    async def score(self, rollouts):
        return [{self.name: self.value} for _ in rollouts]
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(SCORERS)
    return command_in(tmp_path, monkeypatch, capsys)


def done(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    return ended


def played(run: str = "first") -> list:
    return [r for file in sorted(Path("runs", run, "rollouts").glob("*.gz")) for r in load_rollouts(file)]


def logged(run: str = "first") -> list[dict[str, float]]:
    return list(read_metrics(Path("runs") / run / "metrics.jsonl"))


def test_a_run_scores_its_episodes_logs_each_component_and_keeps_its_settings(command):
    flags = [
        "--reward",
        "mine.py:vowel",
        "--reward",
        "j=mine.py:Judge",
        "--reward",
        "mine.py:parts",
        "--reward",
        "length",
    ]
    flags += ["--reward", "mine.py:rank", "--reward-set", "j.value=2", "--reward-set", "parts.high=3"]
    flags += [
        "--reward-weight",
        "env=0.5",
        "--reward-weight",
        "j=0.25",
        "--reward-weight",
        "parts/two=0",
        "--algo",
        "gdpo",
    ]
    done(command("train", *RUN, *flags))
    for rollout in played():
        added = rollout.reward_components
        assert added["j"] == 0.5 and added["parts/one"] == 3.0 and added["parts/two"] == 0.0 and added["length"] < 0
        assert rollout.scores["j"] == 2.0 and rollout.scores["parts/two"] == 0.5
        assert added["env"] == 0.5 * rollout.scores["env"]
        assert rollout.total_reward == pytest.approx(sum(added.values()))
    assert {rollout.scores["rank"] for rollout in played()} == {0.0, 1.0, 2.0, 3.0}
    row = logged()[-1]
    assert row["train/reward/j"] == 0.5 and row["train/score/j"] == 2.0 and row["train/score/parts/two"] == 0.5
    rewards = sum(value for name, value in row.items() if name.startswith("train/reward/"))
    assert rewards == pytest.approx(row["train/avg_total_reward"])
    stored = read_toml(RunConfig, Path("runs/first/config.toml"))
    assert stored.reward.reward_weight == {"env": 0.5, "j": 0.25, "parts/two": 0}
    assert of_run(Path("runs/first")).reward == stored.reward
    more = done(command("train", "runs/first", "--resume", "--steps", "3"))
    assert more.code == 0 and logged()[-1]["train/reward/j"] == 0.5
    assert command("train", "runs/first", "--resume", "--steps", "4", "--reward-weight", "j=1").code == 2


def test_a_scorer_that_raises_costs_its_group_and_not_the_run(command):
    done(command("train", *RUN, "--reward", "mine.py:broken", "--concurrency", "1"))
    assert [row["train/num_failed"] for row in logged()] == [1.0, 1.0]
    failures = [rollout.failure for rollout in played() if rollout.failure is not None]
    assert len(failures) == 2 and failures[0].summary == "RuntimeError: no verdict"


def test_a_scorer_without_a_name_argument_and_a_function_that_makes_one_are_renamed(command):
    rewards = make_rewards(
        RewardSettings(reward=("a=mine.py:Fixed", "b=mine.py:made", "mine.py:made"), reward_set={"b.value": 2.0}),
        AgentSettings(),
    )
    fixed, renamed, judge = rewards.scorers
    assert asyncio.run(fixed.score([None])) == [{"a": 1.0, "a/half": 0.5}] and fixed.metrics() == {
        "a/calls": 3.0,
        "other": 1.0,
    }
    assert asyncio.run(renamed.score([None])) == [{"b": 2.0}] and renamed.metrics() == renamed.mean_weights() == {}
    assert judge.name == "judge" and not judge.by_group
    with pytest.raises(ConfigError, match=r"mine.py:zero takes no rollout and returned 0.5"):
        make_rewards(RewardSettings(reward=("mine.py:zero",)), AgentSettings())


def test_overlong_takes_the_limit_of_the_run():
    settings = RewardSettings(reward=("overlong",), reward_set={"overlong.buffer_tokens": 3})
    rewards = make_rewards(settings, AgentSettings(max_tokens=10))
    assert (rewards.scorers[0].max_tokens, rewards.scorers[0].buffer_tokens) == (10, 3)
    assert make_rewards(RewardSettings(), AgentSettings()) is None
    assert make_rewards(RewardSettings(reward_weight={"env": 2.0}), AgentSettings()).scorers == ()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--reward", "lenght"], "Did you mean 'length'"),
        (["--reward", "mine.py:nothing"], "No reward in mine.py named 'nothing'"),
        (["--reward", "mine.py:three"], "name a class or a function"),
        (["--reward", "length", "--reward", "length"], "Two rewards are called 'length'"),
        (["--reward", "env=mine.py:vowel"], "named 'env'"),
        (["--reward", "length", "--reward-set", "length.per=3"], "per"),
        (["--reward", "length", "--reward-set", "other.per=3"], "no argument of a scorer"),
        (["--reward-weight", "length=0.5"], "No reward component named 'length'"),
        (["--reward-weight", "env=much"], "a weight is a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_named_before_weights_are_loaded(command, flags, says):
    for how in ([], ["--dry-run"]):
        ended = command("train", *RUN, *flags, *how)
        assert ended.code == 2 and says in ended.err.replace("\n", " "), ended.err


def test_the_plan_names_components_and_weights(command):
    out = done(command("train", *RUN, "--reward", "length", "--reward-weight", "length=0.1", "--dry-run")).out
    assert "Rewards: 1 × env, 0.1 × length." in out


def test_a_file_has_a_section(tmp_path):
    settings = RewardSettings(reward=("a=mine.py:vowel",), reward_weight={"a": 0.5}, reward_set={"a.b": 1})
    (tmp_path / "c.toml").write_text(to_toml(RunConfig(reward=settings)))
    assert "[reward]" in (tmp_path / "c.toml").read_text()
    assert read_toml(RunConfig, tmp_path / "c.toml").reward == settings
    (tmp_path / "e.toml").write_text(to_toml(EvalConfig(reward=settings)))
    assert read_toml(EvalConfig, tmp_path / "e.toml").reward == settings


def test_build_takes_functions_scorers_and_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def long(rollout):
        return 1.0

    settings = {"model": "tiny", "max_tokens": 1, "eval_episodes": 2, "reward_weight": {"long": 0.5}}
    made = ludic.run.build(env="tic_tac_toe", reward=[long, LengthPenalty(), "shorter"], **settings)
    with made as run:
        assert {"long", "length", "shorter"} <= run.play()[0].reward_components.keys()
        assert run.play()[0].scores["long"] == 1.0 == 2 * run.play()[0].reward_components["long"]
    with ludic.run.build(env="tic_tac_toe", reward=long, **settings) as run:
        assert run.play()[0].scores["long"] == 1.0


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda task, answer, session: 1.0, r"one argument.*but takes \(task, answer, session\).*docs/gateway.md"),
        (3.0, "neither a reward function nor a scorer"),
        ("lenght", "Did you mean 'length'"),
    ],
)
def test_build_refuses_what_is_no_reward(reward, says):
    with pytest.raises(LudicError, match=says):
        ludic.run.build(env="tic_tac_toe", model="tiny", reward=reward)


def test_an_evaluation_that_cannot_be_scored_ends_with_the_reason(tmp_path):
    def judge(rollout):
        raise RuntimeError("no verdict")

    settings = {"model": "tiny", "max_tokens": 1, "rollouts_per_update": 8, "group_size": 8, "runs": tmp_path}
    with (
        ludic.run.build(env="tic_tac_toe", reward=[judge], eval_episodes=4, **settings) as run,
        pytest.raises(TooManyFailures, match="max_unscored_share=0.5"),
    ):
        run.evaluate()
