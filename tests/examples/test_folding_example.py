"""examples/folding.py: the memory is learned where a window can only guess."""

import asyncio
import json
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

from ludic.inference import HFChatTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.run import RunConfig
from ludic.run.protocols.agents import agent_factory
from ludic.run.settings import with_values
from tests import programs
from tests.fakes import RecordingClient

pytest.importorskip("torch", reason="the local extra is not installed")
SCRIPT = Path(__file__).parents[2] / "examples" / "folding.py"


@pytest.fixture
def example() -> ModuleType:
    return programs.load(SCRIPT)


def prompts(example, memory, fact) -> list[list[int]]:
    """What the model is shown in an episode in which it always answers rightly."""
    tokenizer = example.word_tokenizer(example.WORDS)
    client = RecordingClient(ScriptedClient(lambda request: fact, tokenizer=tokenizer))
    run = example.make_run(with_values(RunConfig(), {"max_tokens": 1}), example.Flags(memory=memory))
    agent = agent_factory(run.config.agent, HFChatTemplate(tokenizer), "tiny")(client)
    asyncio.run(SingleAgentProtocol(agent).run(env=example.Recall(fact, turns=2), max_steps=2))
    return [prompt for prompt, _ in client.calls]


def test_behind_a_window_the_last_prompt_is_the_same_for_every_fact(example):
    """So whatever is learned, its reply is right for one in four at most, and an episode earns 1/2 + 1/8."""
    assert len({tuple(prompts(example, "window", fact)[-1]) for fact in example.FACTS}) == 1
    assert len({tuple(prompts(example, "folding", fact)[-1]) for fact in example.FACTS}) == len(example.FACTS)
    assert [len(prompts(example, memory, "red")) for memory in ("window", "folding")] == [2, 3]


def test_two_updates_train_parent_and_memory(example, tmp_path):
    assert example.main(["--steps", "2", "--runs", str(tmp_path), "--logger", "none"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "folding" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(row["train/grad_norm"] > 0 for row in rows)


@pytest.mark.extended(covered_by="test_two_updates_train_parent_and_memory")
@pytest.mark.slow
def test_an_agent_that_writes_its_memory_itself_learns_to_keep_the_fact(example, tmp_path):
    """Seed 0: beyond what a window can earn (0.625) after 45 updates, 0.9 at least after 65."""
    assert example.main(["--steps", "65", "--runs", str(tmp_path), "--logger", "none"]) == 0
    rows = map(json.loads, (tmp_path / "folding" / "metrics.jsonl").read_text().splitlines())
    rewards = [row["train/avg_total_reward"] for row in rows]
    assert fmean(rewards[:5]) < 0.25 and fmean(rewards[-8:]) > 0.9
