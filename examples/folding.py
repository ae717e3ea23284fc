"""A memory that is learned: what was said at the beginning is needed to the end, and a prompt holds one turn.

Shows: `FoldingAgent`, whose summaries are trained with the episode's advantage like every other reply; the same task with a
sliding window, which can only guess; a model of 30,000 weights.
Needs: nothing.
Takes: half a minute on two CPU cores.

    python examples/folding.py
    python examples/folding.py --memory window
    python examples/folding.py --memory full
    python examples/folding.py --algo ppo
"""
# ruff: noqa: T201 - a script prints

import asyncio
import sys
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import tyro

from ludic.agents import Agent, FoldingAgent
from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, RolloutEngine, make_dataset_sequence_requests_fn
from ludic.context import FullDialog, SlidingWindow, SummarisedDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import SingleAgentEnv
from ludic.inference import ChatTemplate, HFChatTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.models.tiny import tiny_llama, word_tokenizer
from ludic.parsers import ParseResult
from ludic.training import Trainer, TrainerConfig, make_grpo, make_ppo
from ludic.types import ChatClient, InferenceSpec, LudicError, ReturnSpec, SamplingParams, StepOutcome

Memory = Literal["folding", "window", "full"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is remembered, for how long, and how."""

    memory: Memory = "folding"
    """A summary after each turn, a window of one turn, or everything."""
    algo: Literal["grpo", "ppo"] = "grpo"
    """Compare episodes with their siblings, or turns with what a critic expected of them."""
    turns: int = 2
    """The colour is shown before the first and asked for in each."""
    steps: int = 90
    """Updates."""
    group_size: int = 8
    groups: int = 8
    """Per update."""
    lr: float = 5e-3
    seed: int = 0


FACTS = ("red", "blue", "green", "gold")
WORDS = (*FACTS, "now?", "note:", "noted:")


class Recall(SingleAgentEnv):
    """A colour is shown once; every reply should name it, and earns its share of 1 if it does."""

    def __init__(self, fact: str, turns: int) -> None:
        super().__init__()
        self.fact, self.turns = fact, turns

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._turns_left = self.turns
        return self.fact, {}

    def env_step(self, action: str) -> StepOutcome:
        self._turns_left -= 1
        return StepOutcome("now?", float(action == self.fact) / self.turns, terminated=self._turns_left == 0)


def main(settings: Settings) -> list[float]:
    """Trains; the mean reward of every update."""
    tokenizer = word_tokenizer(WORDS)
    model = tiny_llama(len(tokenizer), width=32, layers=2, max_length=64, seed=settings.seed)
    template = HFChatTemplate(tokenizer)
    server = LocalEngine(model, tokenizer, max_model_len=64, kv_tokens=16384)  # serves the trainer's own weights
    algorithm = make_grpo(group_size=settings.group_size) if settings.algo == "grpo" else make_ppo(over="turns")
    source = RolloutBatchSource(
        RolloutEngine(
            env_registry={"recall": Recall},
            protocol_registry={"single": lambda: SingleAgentProtocol(agent(settings.memory, server, template))},
            seed=settings.seed,
        ),
        requests_fn=make_dataset_sequence_requests_fn(
            FACTS,
            batch_size=settings.groups,
            env_kind="recall",
            env_kwargs_fn=lambda fact: {"fact": fact, "turns": settings.turns},
            protocol_kind="single",
            inference=InferenceSpec(
                sampling=SamplingParams(temperature=1.0, max_tokens=1), return_=ReturnSpec.for_rl()
            ),
        ),
        strategy=GRPORequestStrategy(settings.group_size, seed=settings.seed),
        algorithm=algorithm,
        max_steps=settings.turns,
        concurrency=128,
    )
    try:
        trainer = Trainer(
            model=model,
            algo=algorithm,
            batch_source=source,
            cfg=TrainerConfig(lr=settings.lr, weight_decay=0.0, max_seq_len=64, seed=settings.seed),
            publisher=SharedWeightsPublisher(server),
        )
        return asyncio.run(repeat(trainer, settings))
    finally:
        server.close()


async def repeat(trainer: Trainer, settings: Settings) -> list[float]:
    rewards: list[float] = []
    for step in range(settings.steps):
        rewards.append((await trainer.train_step())["train/avg_total_reward"])
        if (step + 1) % 10 == 0:
            print(f"update {step + 1}: reward {fmean(rewards[-10:]):.2f}")
    return rewards


def agent(memory: Memory, server: ChatClient, template: ChatTemplate) -> Agent:
    settings: dict[str, Any] = {
        "client": server,
        "model": "tiny",
        "parser": lambda text: ParseResult(action=text, reward=0.0, obs=None),
        "chat_template": template,
        "reject_incomplete_completions": False,  # one word is all that is asked for
    }
    if memory == "folding":
        # A model that reads is better served by the prompts that FoldingAgent has.
        ctx = SummarisedDialog(max_turns=1)
        return FoldingAgent(ctx=ctx, summary_prompt="note:", summary_heading="noted:", **settings)
    return Agent(ctx=SlidingWindow(max_turns=1) if memory == "window" else FullDialog(), **settings)


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"folding: {mistake}")
