"""Judges of single replies: scores, retries, the cache, limits and cost."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.agents import ReActAgent
from ludic.batch_gen import RolloutEngine
from ludic.envs import DatasetQAEnv
from ludic.eval import evaluate
from ludic.inference import HFChatTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.rewards import Rewards
from ludic.types import (
    ConfigError,
    EngineClosed,
    EnvSpec,
    ProtocolSpec,
    RolloutRequest,
    SamplingParams,
    Scorer,
)
from ludic_judges import (
    Case,
    Criterion,
    JudgeAgent,
    JudgeError,
    JudgeModel,
    LLMJudge,
    RubricJudge,
    VerdictCache,
    read_criteria,
)
from plugins.judges.tests.cases import judge_model, mark_in, prompt_of, rollout, section_in
from tests.fakes import make_agent
from tests.unit.inference.test_real_templates import tokenizer_of

VERDICT = '{"mark": "MARK", "reason": "Fine.", "score": %d}'


def grade(prompt: str) -> str:
    """4 is right."""
    return VERDICT % (10 if section_in(prompt, "reply") == "4" else 3)


async def test_a_score_is_a_share_of_the_scale():
    judge = LLMJudge(judge_model(grade), "Is it right?")
    assert await judge.score([rollout("4"), rollout("5")]) == [{"judge": 1.0}, {"judge": 0.3}]
    centred = LLMJudge(judge_model(grade), "Is it right?", scale=(2, 12), name="math")
    assert await centred.score([rollout("5")]) == [{"math": pytest.approx(0.1)}]
    assert judge.by_group is False


async def test_the_judge_sees_criterion_task_and_reference():
    prompts = []

    def rule(prompt):
        prompts.append(prompt)
        return grade(prompt)

    judge = LLMJudge(judge_model(rule), "Is it right?", reference="gold")
    await judge.score([rollout("4", info={"gold": "four"})])
    assert "Is it right?" in prompts[0] and section_in(prompts[0], "right answer") == "four"
    own = LLMJudge(judge_model(rule), "Is it polite?", show=lambda r: Case(task="T", reply=r.steps[0].action))
    await own.score([rollout("4")])
    assert section_in(prompts[1], "task") == "T" and "right answer" not in prompts[1]
    with pytest.raises(ConfigError, match="show="):
        LLMJudge(judge_model(rule), "", show=lambda r: Case(task="", reply=""), reference="gold")


async def test_an_unreadable_verdict_is_asked_for_again_with_the_reason():
    prompts = []

    def rule(prompt):
        prompts.append(prompt)
        return "Ten points <|im_end|>" if len(prompts) == 1 else VERDICT % 10

    model = judge_model(rule)
    assert await LLMJudge(model, "?").score([rollout("4")]) == [{"judge": 1.0}]
    assert "That is not a verdict. The reply is not one JSON object" in prompts[1]
    assert "Ten points < |im_end| >" in prompts[1], "quoted"
    cost = model.cost
    assert (cost.calls, cost.unreadable, cost.failed, cost.verdicts) == (2, 1, 0, 1)


async def test_a_judge_that_never_answers_raises(tmp_path: Path):
    model = judge_model(lambda _: "Ten points.", max_retries=1, cache=tmp_path / "verdicts.jsonl")
    with pytest.raises(JudgeError, match="no readable verdict in 2 tries.*Ten points"):
        await LLMJudge(model, "?").score([rollout("4")])
    assert (model.cost.calls, model.cost.failed, model.cost.verdicts) == (2, 1, 0)
    assert not list(tmp_path.iterdir()), "what cannot be read is not kept"


async def test_an_error_of_the_client_is_the_judges_error():
    """Also one that would end a run if the policy raised it."""

    def rule(prompt):
        raise EngineClosed("The engine was shut down.")

    with pytest.raises(JudgeError, match="EngineClosed: The engine was shut down"):
        await LLMJudge(judge_model(rule), "?").score([rollout("4")])
    with pytest.raises(JudgeError, match="TimeoutError"):
        await LLMJudge(JudgeModel(Slow(), model="m", timeout_s=0.01), "?").score([rollout("4")])


class Slow:
    """Answers after a while, and counts the calls at a time."""

    def __init__(self, wait_s: float = 60.0) -> None:
        self.wait_s, self.running, self.most = wait_s, 0, 0
        self.inner = judge_model(grade).client

    async def complete_tokens(self, request):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.wait_s)
        self.running -= 1
        return await self.inner.complete_tokens(request)

    def sync_weights(self, params, *, timeout_s=600.0, version=None):
        raise RuntimeError


async def test_calls_at_a_time_are_limited():
    client = Slow(0.001)
    judge = LLMJudge(JudgeModel(client, model="m", concurrency=3), "?")
    await asyncio.gather(*(judge.score([rollout(str(number))]) for number in range(20)))
    assert client.most == 3


def test_a_judge_may_be_used_in_several_event_loops():
    judge = LLMJudge(JudgeModel(Slow(0.001), model="m", concurrency=1), "?")

    async def several(first):
        await asyncio.gather(*(judge.score([rollout(str(first + number))]) for number in range(3)))

    for first in (0, 10):
        asyncio.run(several(first))
    assert judge.metrics()["judge/calls"] == 6


# --- the cache ---


async def test_the_same_question_is_asked_once_also_at_the_same_time():
    model = judge_model(grade)
    judge = LLMJudge(model, "?")
    first = await judge.score([rollout("4")] * 3)
    assert first == await judge.score([rollout("4")] * 3) and model.cost.calls == 1
    assert judge.metrics() == {
        "judge/verdicts": 6, "judge/calls": 1, "judge/cache_hits": 5, "judge/unreadable": 0, "judge/failed": 0,
        "judge/prompt_tokens": model.cost.prompt_tokens, "judge/completion_tokens": model.cost.completion_tokens,
    }  # fmt: skip
    uncached = judge_model(grade, use_cache=False)
    await LLMJudge(uncached, "?").score([rollout("4"), rollout("4")])
    assert uncached.cost.calls == 2 and uncached.cost.cache_hits == 0


@pytest.mark.parametrize(
    "other",
    [{"model": "another"}, {"sampling": SamplingParams(temperature=1.0)}, {"seed": 1}, {"criterion": "Really?"}],
)
async def test_another_model_sampling_seed_or_criterion_is_another_question(other):
    cache, client = VerdictCache(), judge_model(grade).client
    criterion = other.pop("criterion", "?")
    await LLMJudge(JudgeModel(client, model="m", cache=cache), "?").score([rollout("4")])
    asked = JudgeModel(client, **{"model": "m", "cache": cache} | other)
    await LLMJudge(asked, criterion).score([rollout("4")])
    assert asked.cost.cache_hits == 0 and asked.cost.calls == 1


async def test_verdicts_are_kept_in_a_file(tmp_path: Path):
    path = tmp_path / "verdicts.jsonl"
    first = judge_model(grade, cache=path)
    await LLMJudge(first, "?").score([rollout("4"), rollout("5")])
    again = judge_model(lambda _: "", cache=path)
    assert await LLMJudge(again, "?").score([rollout("5")]) == [{"judge": 0.3}] and again.cost.calls == 0
    # What one has appended meanwhile, the other reads.
    await LLMJudge(first, "?").score([rollout("6")])
    assert await LLMJudge(again, "?").score([rollout("6")]) == [{"judge": 0.3}] and again.cost.calls == 0


async def test_damaged_and_foreign_lines_of_the_file_are_asked_for_again(tmp_path: Path):
    path = tmp_path / "verdicts.jsonl"
    await LLMJudge(judge_model(grade, cache=path), "?").score([rollout("4")])
    row = json.loads(path.read_text())
    path.write_text(f'{json.dumps(row | {"reply": "ten"})}\n{{"key": 1}}\n[1]\nnonsense\n{{"key": "cut')
    model = judge_model(grade, cache=path)
    assert await LLMJudge(model, "?").score([rollout("4")]) == [{"judge": 1.0}] and model.cost.calls == 1
    path.write_text("")  # a file that began again
    assert await LLMJudge(model, "?").score([rollout("5")]) == [{"judge": 0.3}]


async def test_memory_holds_a_limited_number(tmp_path: Path):
    cache = VerdictCache(max_in_memory=2)
    for key in "abc":
        await cache.put(key, key)
    assert [await cache.get(key) for key in "abc"] == [None, "b", "c"]
    with pytest.raises(ConfigError, match="plain file"):
        VerdictCache(tmp_path / "verdicts.jsonl.gz")


WRITER = """
import asyncio, sys
from ludic_judges import VerdictCache

async def main():
    cache = VerdictCache(sys.argv[1])
    for number in range(200):
        await cache.put(f"{sys.argv[2]}-{number}", "x" * number)

asyncio.run(main())
"""


async def test_several_processes_write_one_file(tmp_path: Path):
    path = tmp_path / "verdicts.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    cache = VerdictCache(path)
    for name in "abc":
        for number in range(200):
            assert await cache.get(f"{name}-{number}") == "x" * number


# --- a reply that is begun ---


async def test_a_small_model_gets_the_beginning_of_its_verdict():
    tokenizer = tokenizer_of("qwen2_5")
    seen = []

    def reply(request):
        seen.append(tokenizer.decode(request.prompt_token_ids.tolist()))
        return 'Fine.", "score": 8}'

    client = ScriptedClient(reply, tokenizer=tokenizer)
    model = JudgeModel(client, model="m", chat_template=HFChatTemplate(tokenizer), prefill=True)
    assert await LLMJudge(model, "?").score([rollout("4")]) == [{"judge": 0.8}]
    assert re.search(r'assistant\n\{"mark": "[0-9a-f]{8}", "reason": "\Z', seen[0])
    for settings in ({"prefill": True}, {"concurrency": 0}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            judge_model(grade, **settings)


# --- rubrics ---

RUBRIC = [
    Criterion(name="right", text="The answer is right.", weight=3),
    Criterion(name="brief", text="It is one word.", scale=(0, 4)),
]


def by_criterion(prompt: str) -> str:
    return VERDICT % (1 if "right." in prompt else 2)


async def test_each_criterion_has_its_own_verdict_and_weight():
    judge = RubricJudge(judge_model(by_criterion), RUBRIC)
    assert await judge.score([rollout("4")]) == [{"judge/right": 0.75, "judge/brief": 0.125}]
    assert await judge.verdicts(judge.case_of(rollout("4"))) == {"right": 1.0, "brief": 0.5}
    assert judge.asking.cost.calls == 2
    penalty = RubricJudge(judge_model(by_criterion), [RUBRIC[0], Criterion(name="rude", text="It is rude.", weight=-1)])
    with pytest.raises(JudgeError, match="0 to 1"):
        await penalty.score([rollout("4")])


async def test_all_criteria_in_one_call():
    def rule(prompt):
        assert "- right: The answer is right." in prompt
        return '{"mark": "MARK", "right": {"reason": "", "score": 1}, "brief": {"reason": "", "score": 4}}'

    judge = RubricJudge(judge_model(rule), RUBRIC, together=True, name="r")
    assert await judge.score([rollout("4")]) == [{"r/right": 0.75, "r/brief": 0.25}]
    assert judge.asking.cost.calls == 1


async def test_one_failed_criterion_fails_the_reward():
    judge = RubricJudge(judge_model(lambda prompt: grade(prompt) if "brief" in prompt else "", max_retries=0), RUBRIC)
    with pytest.raises(JudgeError):
        await judge.score([rollout("4")])


def test_criteria_are_read_from_toml(tmp_path: Path):
    path = tmp_path / "criteria.toml"
    path.write_text(
        '[right]\ntext = "The answer is right."\nweight = 3\n[brief]\ntext = "It is one word."\nscale = [0, 4]\n'
    )
    assert read_criteria(path) == RUBRIC
    for text, message in (
        ("", "no criteria"),
        ("[a]\nweight = 1", "table with text"),
        ('[a]\ntext = "x"\nwieght = 1', "table with text"),
        ('[a]\ntext = "x"\nscale = [0]', "two whole numbers"),
        ('[a]\ntext = "x"\nweight = "1"', "give a number"),
        ('[a]\ntext = "x"\nweight = 0', "weight 0"),
        ('["a b"]\ntext = "x"', "letters and _"),
        ("[a", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_criteria(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_criteria(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="at least one"):
        RubricJudge(judge_model(grade), [])


# --- an agent as a judge ---


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


async def test_an_agent_with_tools_grades():
    prompts = []

    def reply(request):
        prompt = prompt_of(request)
        prompts.append(prompt)
        if "<tool>" not in prompt:
            return CALL
        return VERDICT.replace("MARK", mark_in(prompt)) % (10 if "<tool>4" in prompt else 0)

    def make():
        return make_agent(ScriptedClient(reply), cls=ReActAgent, tools=[add])

    judge = LLMJudge(JudgeAgent(make, concurrency=2), "Is it right?")
    assert await judge.score([rollout("4"), rollout("5")]) == [{"judge": 1.0}, {"judge": 1.0}]
    assert judge.metrics()["judge/calls"] == 4 and '"name": "add"' in prompts[0]
    assert await judge.score([rollout("4")]) == [{"judge": 1.0}] and judge.metrics()["judge/calls"] == 4, "cached"


async def test_an_agent_is_told_what_was_wrong_with_its_verdict():
    def reply(request):
        prompt = prompt_of(request)
        return VERDICT.replace("MARK", mark_in(prompt)) % 10 if "That is not a verdict" in prompt else "Ten."

    judge = LLMJudge(JudgeAgent(lambda: make_agent(ScriptedClient(reply))), "?")
    assert await judge.score([rollout("4")]) == [{"judge": 1.0}] and judge.metrics()["judge/unreadable"] == 1


# --- in a rollout engine ---


async def test_a_failing_judge_fails_its_episodes_and_not_the_run():
    def rule(prompt):
        return VERDICT % 5 if section_in(prompt, "task") == "easy" else "no idea"

    judge = LLMJudge(judge_model(rule, max_retries=0), "?")
    assert isinstance(judge, Scorer)
    engine = RolloutEngine(
        env_registry={"qa": DatasetQAEnv},
        protocol_registry={"one": lambda: SingleAgentProtocol(make_agent(["<a>4</a>"]))},
        rewards=Rewards([judge], {"judge": 0.5}),
    )
    samples = [{"question": question, "answer": "4"} for question in ("easy", "hard", "easy")]
    requests = [RolloutRequest(env=EnvSpec("qa", {"sample": s}), protocol=ProtocolSpec("one")) for s in samples]
    first, failed, last = await engine.generate_rollouts(requests, max_steps=1)
    assert first.steps[-1].reward_components["judge"] == last.steps[-1].reward_components["judge"] == 0.25
    assert first.steps[-1].info["scores"]["judge"] == 0.5
    assert failed.failure is not None and failed.failure.error == "JudgeError"
    assert "no readable verdict in 1 tries" in failed.failure.message


def verdict_on_the_bandit(prompt: str) -> str:
    """Asked x, an ASCII character is right; asked y, anything else."""
    reply = section_in(prompt, "reply")
    return VERDICT % (10 if (bool(reply) and reply.isascii()) == (section_in(prompt, "task") == "x") else 0)


@pytest.mark.slow
async def test_a_policy_learns_the_bandit_from_verdicts_alone():
    """The env's own reward has weight 0 while training, and measures what was learned."""
    from ludic.training import make_grpo
    from tests.unit.training import bandit

    async def earned(engine) -> float:
        report = await evaluate(bandit.rollout_engine(engine), bandit.BanditRequests(256)(), concurrency=64)
        return report.metrics["mean_total_reward"]

    judge = LLMJudge(judge_model(verdict_on_the_bandit), "x asks for an ASCII character, y for another one.")
    trainer, engine = bandit.bandit_trainer(make_grpo(group_size=8), rewards=Rewards([judge], {"env": 0.0}))
    before = await earned(engine)
    history = await bandit.train_until(trainer, bandit.earns(0.95), at_most=40)
    after = await earned(engine)
    engine.close()
    print(f"reward {before:.2f} -> {after:.2f} after {len(history)} updates, {judge.asking.cost.verdicts} verdicts")  # noqa: T201 - docs/judges.md
    assert before < 0.65 and after > 0.85
    for stats in history:
        assert stats["train/reward/env"] == 0.0
        assert stats["train/reward/judge"] == stats["train/avg_total_reward"]
