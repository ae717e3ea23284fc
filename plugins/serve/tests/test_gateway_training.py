"""Training through the gateway with an unchanged OpenAI client: it learns, and it learns what the native protocol learns."""

import random
from typing import Any

import pytest

import ludic.run
import ludic_serve.gateway
from ludic.envs import SingleAgentEnv
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError, LudicError, StepOutcome, load_rollouts
from ludic_serve.gateway.protocol import TaskEnv

openai = pytest.importorskip("openai")

BEATEN_BY = {"rock": "p", "paper": "s", "scissors": "r"}
TASKS = [{"hand": hand, "answer": answer} for hand, answer in BEATEN_BY.items()]
SMALL = {"model": "tiny", "max_tokens": 1, "logger": "none"}


class RockPaperScissors(SingleAgentEnv):
    """Answer with the first letter of what beats the opponent's hand."""

    blocking = False

    def env_reset(self, *, seed=None):
        self.hand = random.Random(seed).choice(list(BEATEN_BY))
        return self.hand, {}

    def env_step(self, action):
        return StepOutcome("", reward=float(action == BEATEN_BY[self.hand]), terminated=True)


async def play(task: Any, *, base_url: str, api_key: str, model: str) -> str:
    """The agent: one call of an ordinary client. Reading the system's certificates would take longer than the call."""
    http_client = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        messages = [{"role": "user", "content": task["hand"] if isinstance(task, dict) else task}]
        answer = await client.chat.completions.create(model=model, messages=messages)
    return answer.choices[0].message.content


def score(task: Any, answer: str, session: Any) -> float:
    return float(answer == task["answer"])


def curve(run: ludic.run.Run, *names: str) -> list[tuple[float, ...]]:
    rows = read_metrics(run.folder / "metrics.jsonl")
    return [tuple(row[name] for name in names) for row in rows if names[0] in row]


@pytest.mark.extended(covered_by="plugins/serve/tests/test_gateway_page.py::test_the_first_agent_learns")
@pytest.mark.slow
def test_an_unchanged_client_learns_rock_paper_scissors_as_the_native_agent_does(tmp_path):
    """The client takes ten times as long as the native agent, so it trains for the first updates; the native agent goes on."""
    settings = {**SMALL, "env": RockPaperScissors, "group_size": 8, "lr": 8e-3, "runs": tmp_path}
    with ludic.run.build(**settings, name="native") as native:
        native.train(steps=28)
    with ludic.run.build(**settings, name="outside", agent=play) as outside:
        outside.train(steps=3)
    names = ("train/avg_total_reward", "train/loss", "train/grad_norm")
    assert curve(outside, *names) == curve(native, *names)[:3]
    rewards = [reward for (reward,) in curve(native, names[0])]
    assert (
        rewards[0] < 0.1 < 0.3 < max(rewards[:14]) and max(rewards[-3:]) > 0.75
    )  # rounding decides how far it is by then


def test_train_takes_a_function_tasks_and_a_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = ludic_serve.gateway.train(
        agent=play, tasks=TASKS, reward=score, group_size=4, steps=2, rollouts_per_update=8, **SMALL
    )
    assert result.step == 2
    folder = tmp_path / "runs" / "play-tiny-grpo"
    rollouts = list(load_rollouts(folder / "rollouts" / "from_step_000000.jsonl.gz"))
    assert len(rollouts) == 16 and {rollout.env_name for rollout in rollouts} == {TaskEnv.__name__}
    again = ludic_serve.gateway.train(
        agent=play,
        tasks=TASKS,
        reward=score,
        group_size=4,
        steps=3,
        rollouts_per_update=8,
        resume=True,
        **SMALL,
    )
    assert again.step == 3


def test_evaluate_plays_each_task_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"hand": "rock", "answer": "p"}\n{"hand": "paper", "answer": "s"}\n')

    async def always_right(task: Any, answer: str, session: Any) -> dict[str, float]:
        assert session.counts["calls"] == 1
        return {"right": 1.0, "bonus": 0.5}

    report = ludic_serve.gateway.evaluate(agent=play, tasks=str(file), reward=always_right, **SMALL)
    assert report.metrics["mean_reward"] == 1.5 and len(report.outcomes) == 2
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_named_before_a_model_is_loaded(tmp_path):
    good: dict[str, Any] = {"agent": play, "tasks": TASKS, "reward": score}
    for changed, message in (
        ({"agent": None}, "No agent"),
        ({"tasks": []}, "There are no tasks"),
        ({"tasks": str(tmp_path / "none.jsonl")}, "Cannot read tasks"),
        ({"reward": None}, "reward is None"),
        ({"algo": "grop"}, "Did you mean 'grpo'"),
        ({"setps": 3}, "Did you mean 'steps'"),
        ({"engine": "pipeline", "redis": "redis://localhost"}, "actors play the episodes"),
    ):
        with pytest.raises(LudicError, match=message):
            ludic_serve.gateway.train(**{**good, **SMALL, **changed})
    with (
        pytest.raises(ConfigError, match="for an agent that is a function or a command"),
        ludic.run.build(env=RockPaperScissors, reward=score, runs=tmp_path, **SMALL) as run,
    ):
        run.evaluate()


def test_a_text_is_a_task(tmp_path):
    seen = []

    async def agent(task: Any, *, base_url: str, api_key: str, model: str) -> str:
        seen.append(task)
        return await play(task, base_url=base_url, api_key=api_key, model=model)

    report = ludic_serve.gateway.evaluate(agent=agent, tasks=["rock", "paper"], reward=lambda *_: 1.0, **SMALL)
    assert report.metrics["mean_reward"] == 1.0
    assert sorted(seen) == ["paper", "rock"]
