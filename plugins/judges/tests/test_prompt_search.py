"""Prompt search: a right instruction raises the score, and prompts that are good at different tasks stay."""

import json
import re

import pytest

from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import ConfigError, EnvSpec, ProtocolSpec, RolloutRequest, StepOutcome
from ludic_judges import JudgeModel
from ludic_judges.prompt_search import ModelReflector, PromptSearch

RULES = {"shout": "Write capitals.", "count": "Write digits."}


class Task(SingleAgentEnv):
    """Wants capitals or digits, and says so afterwards."""

    blocking = False

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def env_reset(self, *, seed=None):
        return self.kind, {}

    def env_step(self, action):
        right = action.isupper() if self.kind == "shout" else action.isdigit()
        return StepOutcome("", float(right), terminated=True, info={"feedback": f"wanted {RULES[self.kind]}"})


def follows_instructions(request):
    """Answers right where the system prompt tells it how to."""
    text = ByteTemplate().decode(request.prompt_token_ids)
    kind = next(kind for kind in RULES if f"<user>{kind}" in text)
    right = "ABC" if kind == "shout" else "123"
    return right if RULES[kind] in text else "abc"


def engine(env=Task):
    def protocol(system_prompt=""):
        agent = Agent(
            client=ScriptedClient(follows_instructions), model="m", ctx=FullDialog(system_prompt=system_prompt or None),
            parser=raw_parser, chat_template=ByteTemplate(),
        )  # fmt: skip
        return SingleAgentProtocol(agent)

    return RolloutEngine(env_registry={"task": env}, protocol_registry={"play": protocol}, max_failed_share=1.0)


def tasks(*kinds):
    return [RolloutRequest(env=EnvSpec("task", {"kind": kind}), protocol=ProtocolSpec("play"), env_seed=n) for n, kind in enumerate(kinds)]  # fmt: skip


class Scripted:
    """Adds the rule of the first rollout that earned nothing."""

    def __init__(self):
        self.seen = []

    async def propose(self, prompt, rollouts):
        self.seen.append((prompt, [(r.steps[0].prompt_messages[-1]["content"], r.total_reward) for r in rollouts]))
        kind = next((kind for kind, reward in self.seen[-1][1] if reward == 0), None)
        return prompt if kind is None else f"{prompt} {RULES[kind]}"


async def test_a_right_instruction_raises_the_score():
    search = PromptSearch(engine(), tasks("shout", "count", "shout", "count"), Scripted(), start="Answer.", shown=2)
    best = await search.search(max_episodes=60)
    assert search.candidates[0].scores == (0.0, 0.0, 0.0, 0.0)
    assert best.scores == (1.0, 1.0, 1.0, 1.0) and all(rule in best.prompt for rule in RULES.values())
    assert best.parent is not None and search.candidates[best.parent].mean == 0.5
    assert search.num_episodes <= 60


async def test_a_proposal_that_earns_no_more_is_rejected_after_the_shown_tasks():
    class Useless:
        async def propose(self, prompt, rollouts):
            return f"{prompt}!"

    search = PromptSearch(engine(), tasks("shout", "count", "shout"), Useless(), shown=1)
    await search.search(max_episodes=3)
    assert not await search.round() and not await search.round()
    assert len(search.candidates) == 1 and (search.num_rejected, search.num_episodes) == (2, 5)


async def test_a_reflector_that_repeats_itself_ends():
    class Same:
        async def propose(self, prompt, rollouts):
            return prompt

    search = PromptSearch(engine(), tasks("shout"), Same(), shown=1)
    await search.search(max_episodes=10)
    assert len(search.candidates) == 1 and search.num_episodes == 10


async def test_the_front_keeps_prompts_that_are_good_at_different_tasks():
    start = [*RULES.values(), "neither"]
    search = PromptSearch(engine(), tasks("shout", "count", "shout"), Scripted(), start=start, shown=3)
    await search.search(max_episodes=9)
    assert [candidate.scores for candidate in search.candidates] == [(1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
    assert search.front() == {0: 2, 1: 1}
    await search.search(max_episodes=30)
    best = max(search.front().items(), key=lambda pair: pair[1])
    assert search.candidates[best[0]].mean == 1.0 and list(search.front()) == [best[0]]  # it covers both


async def test_rounds_are_the_same_for_the_same_seed():
    found = []
    for _ in range(2):
        search = PromptSearch(engine(), tasks("shout", "count", "shout", "count"), Scripted(), shown=2, seed=3)
        await search.search(max_episodes=40)
        found.append(search.candidates)
    assert found[0] == found[1]


async def test_an_episode_that_fails_earns_nothing():
    class Broken(Task):
        def env_step(self, action):
            raise RuntimeError("broken")

    search = PromptSearch(engine(Broken), tasks("shout"), Scripted(), shown=1)
    await search.search(max_episodes=1)
    assert search.best.scores == (0.0,)


async def test_a_model_reflects_on_tasks_replies_and_rewards():
    asked = []

    def reply(request):
        asked.append(ByteTemplate().decode(request.prompt_token_ids))
        mark = re.search(r'"mark": "(\w+)"', asked[-1])[1]
        return json.dumps({"mark": mark, "diagnosis": "small letters", "instruction": " Write capitals. "})

    reflector = ModelReflector(JudgeModel(ScriptedClient(reply), model="r", chat_template=ByteTemplate()))
    search = PromptSearch(engine(), tasks("shout"), reflector, start="Answer.", shown=1)
    best = await search.search(max_episodes=2)
    assert best.prompt == "Write capitals." and best.mean == 1.0
    for part in ("Answer.", "shout", "abc", "reward 0", "wanted Write capitals"):
        assert part in asked[0]


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="shown=2"):
        PromptSearch(engine(), tasks("shout"), Scripted(), shown=2)
