"""FoldGRPO against GRPO where branches are opened: a tiny model reads pages for which its context has no room.

An episode asks for the colour on each of four pages. A page is a tool result of 30 words, and a model that reads in its main
context has room for two of four; one that reads in a branch (`BranchingAgent`) keeps the colour alone and has room for all. A
call is one token: the tokenizer's words have no spaces, and a call in Hermes' format is a word. For each seed of the weights the
model is supervised on scripted episodes that open a branch for one page in five. Both algorithms begin with these weights and
see the same pages, once with a reward for each page and once with one for all four together. The runs are folders of `ludic
train`, and scripts/plot_seeds.py makes the table: held-out reward, the share of training episodes with a branch, branches per
episode, and tokens of an episode's samples per different token: the samples of branches share their prefix.

    OMP_NUM_THREADS=1 PYTHONPATH=.:src .venv/bin/python research/experiments/branching.py [--records FILE]
"""

import asyncio
import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tyro

from ludic.agents import BranchingAgent
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import HFChatTemplate, ScriptedClient
from ludic.inference.templates.chat import HermesToolParser
from ludic.interaction import SingleAgentProtocol
from ludic.models.loading import tiny_llama, word_tokenizer
from ludic.models.prefix_tree import TokenTree
from ludic.parsers import raw_parser
from ludic.run import build
from ludic.types import InferenceSpec, Info, Rollout, SamplingParams, StepOutcome, derive_seed, save_rollouts
from ludic.types.segments import call_segments
from scripts import plot_seeds

EarnedBy: TypeAlias = Literal["page", "episode"]
COLOURS = ("red", "blue", "green", "gold")
NUM_PAGES, PAGE_LENGTH = 4, 30
ROOM = 116
"""Tokens of a prompt with its reply. FoldGRPO has a penalty for calls in the main context above half of them, as in the paper."""
SCRIPTED_BRANCHES = 0.2


def call(name: str, **arguments: str) -> str:
    """A call as one word."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, separators=(',', ':'))}</tool_call>"


BRANCH, READ = call("branch", task="read"), call("read")
RETURNS = {colour: call("return_result", result=colour) for colour in COLOURS}
TOKENIZER = word_tokenizer((*COLOURS, "next?", "and", BRANCH, READ, *RETURNS.values(), "branch", "Error:"))
"""The agent's other words share the token for unknown ones."""
TEMPLATE = HFChatTemplate(TOKENIZER, tool_parser=HermesToolParser())


class Pages(SingleAgentEnv):
    """Each turn asks for the colour on the next page, which the tool `read` shows."""

    blocking = False

    def __init__(self, *, earned_by: EarnedBy = "page") -> None:
        """A right reply earns its share of 1; by "episode", the last one earns 1 where all were right."""
        super().__init__()
        self._by_page = earned_by == "page"

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        dice = random.Random(seed)
        self.colours = [dice.choice(COLOURS) for _ in range(NUM_PAGES)]
        self._places = [dice.randrange(PAGE_LENGTH) for _ in range(NUM_PAGES)]
        self._page = self._num_right = 0
        return "next?", {}

    def episode_tools(self, agent_id: str) -> Sequence[Callable[..., Any]]:
        return (self.read,)

    async def read(self) -> str:
        """Read the page."""
        words = ["and"] * PAGE_LENGTH
        words[self._places[self._page]] = self.colours[self._page]
        return " ".join(words)

    def env_step(self, action: str) -> StepOutcome:
        is_right = action == self.colours[self._page]
        self._page += 1
        self._num_right += is_right
        reward = is_right / NUM_PAGES if self._by_page else float(self._num_right == NUM_PAGES)
        return StepOutcome("next?", reward, terminated=self._page == NUM_PAGES)


def branches(rollout: Rollout) -> dict[str, float]:
    """A scorer without a weight: branches of the episode, whether there is one, and tokens of its samples per different token."""
    opened = max((step.info.get("branch", 0) for step in rollout.agent_steps), default=0)
    traces = [calls[-1].trace for calls in call_segments(rollout)]
    samples = [np.concatenate([t.prompt_token_ids, t.completion_token_ids]) for t in traces if t is not None]
    sharing = sum(map(len, samples)) / TokenTree.of(samples, min_shared=1).num_tokens
    return {"opened": float(opened), "any": float(opened > 0), "sharing": sharing}


async def scripted(seed: int) -> Rollout:
    """An episode in which all is right, with a branch for some pages; it ends early where the main context is full."""
    env, dice = Pages(), random.Random(derive_seed(seed, 1))

    def replies() -> Iterator[str]:
        for colour in env.colours:
            in_branch = dice.random() < SCRIPTED_BRANCHES
            yield from (BRANCH, READ, RETURNS[colour], colour) if in_branch else (READ, colour)

    agent = BranchingAgent(
        client=ScriptedClient(replies(), tokenizer=TOKENIZER, max_prompt_tokens=ROOM - 1), model="script", ctx=FullDialog(),
        parser=raw_parser, chat_template=TEMPLATE, tools_in_prompt=False, reject_incomplete_completions=False,
    )  # fmt: skip
    one_token = InferenceSpec(sampling=SamplingParams(max_tokens=1))
    (rollout,) = await SingleAgentProtocol(agent).run(env=env, max_steps=NUM_PAGES, env_seed=seed, inference=one_token)
    return rollout


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How many runs, how long, and where they are."""

    seeds: tuple[int, ...] = (0, 1, 2)
    earned_by: tuple[EarnedBy, ...] = ("page", "episode")
    """What earns a reward; both are measured."""
    warm_up: int = 300
    """Supervised updates."""
    episodes: int = 512
    """Scripted episodes."""
    updates: int = 30
    eval_episodes: int = 200
    runs: Path = Path("runs/branching")
    records: Path | None = None
    """JSONL file of all updates to write."""
    reach: float = 0.9
    """A training reward: the table says after how many updates it was reached."""


def trained(model: Any, settings: Settings, **given: Any) -> Any:
    """The model after one run, which begins with a copy of it."""
    run = build(
        env=Pages, model=copy.deepcopy(model), tokenizer=TOKENIZER, runs=settings.runs, agent="branching",
        agent_set={"tools_in_prompt": False, "max_react_steps": 6}, max_steps=NUM_PAGES, max_tokens=1, max_seq_len=ROOM,
        rollouts_per_update=32, weight_decay=0.0, checkpoint_every=0, save_tokens="off", logger="none", **given,
    )  # fmt: skip
    run.train()
    assert run.trainer is not None, "it has just trained"
    after = run.trainer.model
    run.close()
    return after


def main(settings: Settings) -> None:
    folders = []
    for seed in settings.seeds:
        script = settings.runs / f"script-{seed}.jsonl"
        script.parent.mkdir(parents=True, exist_ok=True)
        games = (scripted(derive_seed(seed, 2, number)) for number in range(settings.episodes))
        save_rollouts([asyncio.run(game) for game in games], script)
        model = tiny_llama(len(TOKENIZER), width=64, layers=2, max_length=ROOM, seed=seed)
        model = trained(
            model, settings, algo="sft", rollouts=(script,), steps=settings.warm_up, lr=3e-3, schedule="cosine", seed=seed,
            name=f"warm_up-{seed}",
        )  # fmt: skip
        algorithms: dict[str, dict[str, Any]] = {"grpo": {}, "fold_grpo": {"max_main_tokens": ROOM // 2}}
        for earned_by, algo in product(settings.earned_by, algorithms):
            folders.append(settings.runs / f"{earned_by}-{algo}-{seed}")
            trained(
                model, settings, set={"earned_by": earned_by}, algo=algo, algo_set=algorithms[algo], group_size=8,
                steps=settings.updates, lr=1e-3, seed=seed, reward=[branches], reward_weight={"branches": 0.0},
                eval_at_start=True, eval_every=settings.updates, eval_episodes=settings.eval_episodes, eval_temperature=1.0,
                name=folders[-1].name,
            )  # fmt: skip
    keep = tuple(f"{name}=train/score/branches/{name}" for name in ("any", "opened", "sharing"))
    plot_seeds.main(
        plot_seeds.Settings(sources=tuple(folders), records=settings.records, reach=settings.reach, keep=keep)
    )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
