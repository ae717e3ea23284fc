"""Delegation on MuSiQue: a parent that cannot search hands the steps of a question to children that can.

Shows: DelegatingProtocol, children with their own env and tools, rollouts of a whole family, and a credit rule by
which children share the fate of their parent; played by an oracle without a model, by a model, or trained.
Needs: the extra search and a JSONL file of questions; a model with native tool calling for --player model and train.
Takes: seconds for the oracle; with a model, a parent and its two to four children per episode.

    python examples/delegation/delegate_musique.py --data musique.jsonl
    python examples/delegation/delegate_musique.py --data musique.jsonl --player train --model Qwen/Qwen3.5-4B --steps 20
"""
# ruff: noqa: T201 - a script prints

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ludic.agents import Agent, ReActAgent
from ludic.batch_gen import RolloutEngine
from ludic.batch_gen.requests.samples import read_samples
from ludic.cli.script import ScriptFlags, parse_script, run_script, train_script
from ludic.context import FullDialog
from ludic.inference import ByteTemplate, ChatTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import Delegate, DelegatingProtocol, InteractionProtocol
from ludic.interaction.delegating import TaskEnv
from ludic.parsers import xml_tag_parser
from ludic.run import build
from ludic.training import make_grpo
from ludic.types import (
    ChatClient,
    ConfigError,
    CreditAssigner,
    EnvSpec,
    ProtocolSpec,
    Rollout,
    RolloutRequest,
    RolloutStepKey,
    save_rollouts,
)
from ludic_envs.musique_search import MuSiQueSample
from ludic_envs.search import DocumentSearch

MAX_DELEGATIONS, MAX_SEARCHES = 6, 2
PARENT_PROMPT = (
    "You answer a question that takes several steps, and you cannot look anything up. Hand each step to the searcher with "
    "delegate, as a question that can be understood on its own; what it answers tells what to ask next. Then give the answer "
    "in as few words as possible inside <answer></answer>."
)
CHILD_PROMPT = (
    "You answer one simple question. Look it up with the search tool, then give the answer in as few words as possible "
    "inside <answer></answer>."
)
ENV: dict[str, Any] = {"max_searches": 0, "system_prompt": PARENT_PROMPT}
"""The parent's env: the question without its search tool."""


@dataclass(frozen=True)
class Flags(ScriptFlags):
    """Who plays."""

    player: Literal["oracle", "model", "train"] = "oracle"
    """The oracle knows the decomposition: it shows what the best play looks like, and that it can be reached."""
    limit: int = 20
    """The first so many questions."""
    out: Path | None = None
    """A JSONL file for what oracle or model have played."""


# --- the family ------------------------------------------------------------------------------------------------


class SearchTask(TaskEnv):
    """A child's world: the question that its parent asks, and a search over the paragraphs of the parent's question."""

    def __init__(self, task: str, search: DocumentSearch) -> None:
        super().__init__(task)
        self._search = search

    @property
    def suggested_sysprompt(self) -> str:
        return CHILD_PROMPT

    def episode_tools(self, agent_id: str) -> Sequence[Callable[..., Any]]:
        return (self.search,)

    def search(self, query: str) -> str:
        """Search the documents; the best matching ones come back.

        Args:
            query: What to look for, in a few words.
        """
        return self._search(query)


class Family(InteractionProtocol):
    """Parent and children of one episode, all answered by one model."""

    def __init__(self, *, client: ChatClient | None = None, model: str = "", chat_template: ChatTemplate) -> None:
        self._client, self._model, self._template = client, model, chat_template
        self._family: DelegatingProtocol | None = None

    def client_of(self, role: str, sample: MuSiQueSample) -> ChatClient:
        assert self._client is not None, "a family without a client plays by script"
        return self._client

    @property
    def unfinished(self) -> list[Rollout]:
        return [] if self._family is None else self._family.unfinished

    async def run(self, *, env: Any, **episode: Any) -> list[Rollout]:
        search = DocumentSearch([str(paragraph) for paragraph in env.sample.paragraphs])

        def make_agent(role: str, num_calls: int, **tools: Any) -> Agent:
            return ReActAgent(
                client=self.client_of(role, env.sample),
                model=self._model,
                ctx=FullDialog(),
                parser=xml_tag_parser("answer", success_reward=0.0, error_reward=-0.2),
                chat_template=self._template,
                max_react_steps=num_calls,
                **tools,
            )

        delegates = {
            "searcher": Delegate(
                make_agent=lambda: make_agent("searcher", MAX_SEARCHES + 1),
                make_env=lambda task: SearchTask(task, search),
                description="looks up one fact",
            )
        }
        parent = make_agent("parent", MAX_DELEGATIONS + 1, external_tools=[DelegatingProtocol.tool(delegates)])
        self._family = DelegatingProtocol(parent, delegates=delegates, max_children=MAX_DELEGATIONS)
        self._family.env_timeout_s = self.env_timeout_s
        return await self._family.run(env=env, **episode)


class Oracle(Family):
    """Delegates the questions of the decomposition; each child searches for its question and knows what to find."""

    def __init__(self) -> None:
        super().__init__(chat_template=ByteTemplate(tool_parser=HermesToolParser()))
        self._num_children = 0

    def client_of(self, role: str, sample: MuSiQueSample) -> ChatClient:
        if role == "parent":
            orders = [tool_call("delegate", to="searcher", task=hop.question) for hop in sample.hops]
            return ScriptedClient([*orders, f"<answer>{sample.answer}</answer>"])
        hop = sample.hops[self._num_children]
        self._num_children += 1
        return ScriptedClient([tool_call("search", query=hop.question), f"<answer>{hop.answer}</answer>"])


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass(frozen=True)
class FamilyCredit:
    """Parents are compared with the parents of their group; children weigh what their parent weighs.

    A child cannot be graded on its own: there is no right answer to a question that its parent made up.
    """

    parents: CreditAssigner

    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]:
        children = [rollout for rollout in rollouts if "parent_rollout_id" in rollout.meta]
        weights = dict(self.parents.compute([rollout for rollout in rollouts if rollout not in children]))
        of_parent: Mapping[str, float] = {rollout_id: weight for (rollout_id, _), weight in weights.items()}
        for child in children:
            weight = of_parent.get(child.meta["parent_rollout_id"], 0.0)
            weights |= {(child.id, step.index): weight for step in child.steps}
        return weights


# --- who plays -------------------------------------------------------------------------------------------------


def main(args: list[str]) -> int:
    flags, config = parse_script(
        __doc__, args, Flags, name="delegation", model="Qwen/Qwen3.5-4B", agent="react", max_steps=1, max_tokens=256,
        group_size=4, rollouts_per_update=16, lr=1e-6, max_seq_len=4096, too_long="drop", eval_temperature=0.7,
    )  # fmt: skip
    if config.env.data is None:
        raise ConfigError("Give --data, a JSONL file of questions in MuSiQue's form.")
    samples = read_samples(config.env.data)[: flags.limit]
    if flags.player == "oracle":
        report(asyncio.run(play_oracle(samples)), flags.out)
        return 0
    algo = make_grpo(group_size=config.algo.group_size or 1, reduction="token_mean")
    algo = replace(algo, name="family_grpo", credit_assigner=FamilyCredit(algo.credit_assigner))
    run = build(config, env="musique_search", set=ENV, protocol=Family, data=samples, eval_data=samples, algo=algo)
    if flags.player == "train":
        return train_script(run, flags)
    with run:
        report(run.play(), flags.out)
    return 0


async def play_oracle(samples: Sequence[Any]) -> list[Rollout]:
    requests = [
        RolloutRequest(
            env=EnvSpec("musique_search", {"sample": sample, **ENV}),
            protocol=ProtocolSpec("oracle"),
            env_seed=index,
            meta={"sample_index": index},
        )
        for index, sample in enumerate(samples)
    ]
    return await RolloutEngine(protocol_registry={"oracle": Oracle}).generate_rollouts(requests, max_steps=1)


def report(rollouts: Sequence[Rollout], out: Path | None) -> None:
    parents = [rollout for rollout in rollouts if "parent_rollout_id" not in rollout.meta]
    children = [rollout for rollout in rollouts if "parent_rollout_id" in rollout.meta]
    num_searches = [sum(len(step.tool_calls or ()) for step in child.agent_steps) for child in children]
    right = [any(step.info.get("correct", False) for step in rollout.env_steps) for rollout in parents]
    print(f"questions             {len(parents)}")
    print(f"reward                {fmean(rollout.total_reward for rollout in parents):.3f}")
    print(f"right                 {fmean(right):.1%}")
    print(f"children per question {len(children) / len(parents):.2f}")
    print(f"searches per child    {fmean(num_searches) if children else 0:.2f}")
    if out is not None:
        save_rollouts(rollouts, out)


if __name__ == "__main__":
    run_script(main)
