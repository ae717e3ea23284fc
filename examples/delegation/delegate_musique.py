"""Delegation on MuSiQue: a parent that cannot search hands the steps of a question to children that can.

Shows: DelegatingProtocol, children with an env and tools of their own, rollouts of a whole family, and a credit rule by
which children share the fate of their parent; played by an oracle without a model, by a model, or trained.
Needs: the extra search and a JSONL file of questions; a model with native tool calling for --player model.
Takes: seconds for the oracle; with a model, a parent and its two to four children per episode.

    python examples/delegation/delegate_musique.py --data musique.jsonl
    python examples/delegation/delegate_musique.py --data musique.jsonl --player model --model-name Qwen/Qwen3.5-4B --train-steps 20
"""
# ruff: noqa: T201 - a script prints

import asyncio
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import tyro

from ludic.agents import Agent, ReActAgent
from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, RolloutEngine
from ludic.batch_gen.requests.samples import read_samples
from ludic.context import FullDialog
from ludic.envs.musique_search import MuSiQueSample
from ludic.inference import (
    ByteTemplate,
    ChatTemplate,
    HermesToolParser,
    HFChatTemplate,
    ScriptedClient,
    tool_parser_for,
)
from ludic.interaction import Delegate, DelegatingProtocol
from ludic.interaction.delegating import TaskEnv
from ludic.parsers import xml_tag_parser
from ludic.tools.search import DocumentSearch
from ludic.types import (
    ChatClient,
    ConfigError,
    CreditAssigner,
    EnvSpec,
    InferenceSpec,
    LudicError,
    ProtocolSpec,
    ReturnSpec,
    Rollout,
    RolloutRequest,
    RolloutStepKey,
    SamplingParams,
)

Sample = dict[str, Any]
PARENT_PROMPT = (
    "You answer a question that takes several steps, and you cannot look anything up. Hand each step to the searcher with "
    "delegate, as a question that can be understood on its own; what it answers tells what to ask next. Then give the answer "
    "in as few words as possible inside <answer></answer>."
)
CHILD_PROMPT = (
    "You answer one simple question. Look it up with the search tool, then give the answer in as few words as possible "
    "inside <answer></answer>."
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who plays, and whether it is trained."""

    data: Path
    """A JSONL file of questions in MuSiQue's form."""
    limit: int = 20
    """The first so many of them."""
    player: Literal["oracle", "model"] = "oracle"
    """The oracle knows the decomposition: it shows what the best play looks like, and that it can be reached."""
    out: Path | None = None
    """A JSONL file for the rollouts, or with --train-steps a folder for metrics, rollouts and the model."""
    seed: int = 0

    model_name: str = "Qwen/Qwen3.5-4B"
    """A folder or a hub id; its chat template must show tools."""
    max_tokens: int = 256
    """Of one reply."""
    max_delegations: int = 6
    max_searches: int = 2
    """Of one child."""
    train_steps: int = 0
    """0 only plays."""
    batch_size: int = 4
    """Questions per step."""
    group_size: int = 4
    """Episodes per question, which are compared with each other."""
    learning_rate: float = 1e-6
    max_seq_len: int = 4096


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


def family(
    settings: Settings, sample: Sample, template: ChatTemplate, client_of: Callable[[str], ChatClient]
) -> DelegatingProtocol:
    """The protocol of one episode; `client_of` says who answers for the "parent" and for a "searcher"."""
    read = MuSiQueSample.read(sample)
    search = DocumentSearch([str(paragraph) for paragraph in read.paragraphs])

    def make_agent(role: str, num_calls: int, **tools: Any) -> Agent:
        return ReActAgent(
            client=client_of(role),
            model=settings.model_name,
            ctx=FullDialog(),
            parser=xml_tag_parser("answer", success_reward=0.0, error_reward=-0.2),
            chat_template=template,
            max_react_steps=num_calls,
            **tools,
        )

    delegates = {
        "searcher": Delegate(
            make_agent=lambda: make_agent("searcher", settings.max_searches + 1),
            make_env=lambda task: SearchTask(task, search),
            description="looks up one fact",
        )
    }
    return DelegatingProtocol(
        make_agent("parent", settings.max_delegations + 1, external_tools=[DelegatingProtocol.tool(delegates)]),
        delegates=delegates,
        max_children=settings.max_delegations,
    )


def request(sample: Sample, index: int, inference: InferenceSpec) -> RolloutRequest:
    return RolloutRequest(
        env=EnvSpec("musique_search", env_arguments(sample)),
        protocol=ProtocolSpec("family", {"sample": sample}),
        env_seed=index,
        inference=inference,
        meta={"sample_index": index},
    )


def env_arguments(sample: Sample) -> dict[str, Any]:
    """The parent's env: the question without its search tool."""
    return {"sample": sample, "max_searches": 0, "system_prompt": PARENT_PROMPT}


# --- who answers -----------------------------------------------------------------------------------------------


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def oracle(settings: Settings, sample: Sample) -> DelegatingProtocol:
    """Delegates the questions of the decomposition; each child searches for its question and knows what to find."""
    read = MuSiQueSample.read(sample)
    children = iter(read.hops)
    orders = [tool_call("delegate", to="searcher", task=hop.question) for hop in read.hops]

    def client_of(role: str) -> ChatClient:
        if role == "parent":
            return ScriptedClient([*orders, f"<answer>{read.answer}</answer>"])
        hop = next(children)
        return ScriptedClient([tool_call("search", query=hop.question), f"<answer>{hop.answer}</answer>"])

    return family(settings, sample, ByteTemplate(tool_parser=HermesToolParser()), client_of)


async def play(settings: Settings, engine: RolloutEngine, samples: Sequence[Sample], temperature: float) -> None:
    """Every question once; then what came of it."""
    sampling = SamplingParams(temperature=temperature, max_tokens=settings.max_tokens)
    requests = [request(sample, index, InferenceSpec(sampling=sampling)) for index, sample in enumerate(samples)]
    rollouts = await engine.generate_rollouts(requests, max_steps=1, concurrency=8)
    parents = [rollout for rollout in rollouts if "parent_rollout_id" not in rollout.meta]
    children = [rollout for rollout in rollouts if "parent_rollout_id" in rollout.meta]
    print(f"questions             {len(parents)}")
    print(f"reward                {fmean(rollout.total_reward for rollout in parents):.3f}")
    print(f"right                 {fmean(is_right(rollout) for rollout in parents):.1%}")
    print(f"children per question {len(children) / len(parents):.2f}")
    print(f"searches per child    {fmean(map(num_searches, children)) if children else 0:.2f}")


def is_right(rollout: Rollout) -> bool:
    return any(step.info.get("correct", False) for step in rollout.env_steps)


def num_searches(rollout: Rollout) -> int:
    return sum(len(step.tool_calls or ()) for step in rollout.agent_steps)


# --- training --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FamilyCredit:
    """Parents are compared with the parents of their group; children weigh what their parent weighs.

    A child cannot be graded on its own: nobody knows the right answer to a question that its parent made up.
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


def train(settings: Settings, samples: list[Sample]) -> None:
    from ludic.distributed import SharedWeightsPublisher
    from ludic.training import JSONLLogger, PrintLogger, TeeLogger, Trainer, TrainerConfig, make_grpo

    out = settings.out or Path("runs/delegation")
    if (out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {out} already. Choose another --out.")
    with_model = ServedModel(settings)
    sampling = SamplingParams(temperature=1.0, max_tokens=settings.max_tokens)
    inference = InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl())
    asked = [request(sample, index, inference) for index, sample in enumerate(samples)]
    dice = random.Random(settings.seed)
    algo = make_grpo(group_size=settings.group_size, reduction="token_mean")
    algo = replace(algo, name="family_grpo", credit_assigner=FamilyCredit(algo.credit_assigner))
    try:
        trainer = Trainer(
            model=with_model.model,
            algo=algo,
            batch_source=RolloutBatchSource(
                with_model.engine(out / "rollouts.jsonl"),
                requests_fn=lambda: dice.sample(asked, min(settings.batch_size, len(asked))),
                strategy=GRPORequestStrategy(settings.group_size, seed=settings.seed),
                algorithm=algo,
                max_steps=1,
                concurrency=32,
            ),
            cfg=TrainerConfig(
                lr=settings.learning_rate,
                max_seq_len=settings.max_seq_len,
                too_long="drop",
                micro_token_budget=2 * settings.max_seq_len,
                seed=settings.seed,
            ),
            publisher=SharedWeightsPublisher(with_model.server),
            train_logger=TeeLogger(
                JSONLLogger(out / "metrics.jsonl"), PrintLogger(keys=("avg_total_reward", "num_rollouts", "grad_norm"))
            ),
            tokenizer=with_model.server.tokenizer,
        )
        trainer.train_sync(settings.train_steps)
    finally:
        with_model.server.close()
    with_model.model.save_pretrained(out / "model")
    with_model.server.tokenizer.save_pretrained(out / "model")
    print(f"The model is in {out / 'model'}.")


class ServedModel:
    """One model that answers for the whole family."""

    def __init__(self, settings: Settings) -> None:
        from ludic.inference.local import LocalEngine
        from ludic.models.loading import load_model

        loaded = load_model(settings.model_name)
        self.settings = settings
        self.model = loaded.model
        self.server = LocalEngine(loaded.model, loaded.tokenizer, seed=settings.seed)
        self.template = HFChatTemplate(loaded.tokenizer, tool_parser=tool_parser_for(loaded.tokenizer))

    def engine(self, jsonl: Path | None) -> RolloutEngine:
        def make(sample: Sample) -> DelegatingProtocol:
            return family(self.settings, sample, self.template, lambda role: self.server)

        return RolloutEngine(protocol_registry={"family": make}, jsonl_path=jsonl, seed=self.settings.seed)


def main(settings: Settings) -> None:
    samples = read_samples(settings.data)[: settings.limit]
    if settings.train_steps and settings.player != "model":
        raise ConfigError("--train-steps trains a model: give --player model, too.")
    if settings.train_steps:
        train(settings, samples)
    elif settings.player == "oracle":
        engine = RolloutEngine(
            protocol_registry={"family": lambda sample: oracle(settings, sample)}, jsonl_path=settings.out
        )
        asyncio.run(play(settings, engine, samples, temperature=0.0))
    else:
        with_model = ServedModel(settings)
        try:
            asyncio.run(play(settings, with_model.engine(settings.out), samples, temperature=0.7))
        finally:
            with_model.server.close()


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"delegate_musique: {mistake}")
