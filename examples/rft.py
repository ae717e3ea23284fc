"""Rejection-sampling fine-tuning: sample, keep what earned enough, imitate it, repeat.

Shows: the whole loop on a task of one turn and a model of 30,000 weights: `make_rft` keeps and imitates, `ReplayBatchSource`
makes several updates of each sampling.
Needs: nothing.
Takes: fifteen seconds on two CPU cores, most of them imports.

    python examples/rft.py
    python examples/rft.py --rounds 30 --updates-per-round 1 --min-reward 1.0

For a task of your own, replace `Letters`, the model and its template; nothing else knows of them.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

import transformers
import tyro

from ludic.agents import Agent
from ludic.batch_gen import ReplayBatchSource, RolloutBatchSource, RolloutEngine, make_dataset_sequence_requests_fn
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.training import Trainer, TrainerConfig, make_rft
from ludic.types import InferenceSpec, LudicError, ReturnSpec, SamplingParams, StepOutcome


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is sampled, what of it is kept, and how often it is imitated."""

    rounds: int = 20
    """Samplings, each from the policy as it is then."""
    questions: int = 8
    """Of one sampling."""
    samples_per_question: int = 8
    min_reward: float = 1.0
    """Imitate what earned at least this."""
    updates_per_round: int = 2
    """Optimizer steps of one sampling."""
    lr: float = 2e-2
    seed: int = 0


class Letters(SingleAgentEnv):
    """Asked x, answer with an ASCII character; asked y, with anything else. One turn; chance earns about one half."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self.letter = letter

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.letter, {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", reward=float(action.isascii() == (self.letter == "x")), terminated=True)


class Bytes:
    """The tokenizer of a model whose tokens are bytes."""

    eos_token_id = ByteTemplate.END

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return ByteTemplate().decode([i for i in ids if i < 256])


def main(settings: Settings) -> None:
    model = tiny_llama(settings.seed)
    server = LocalEngine(model, Bytes(), max_model_len=64, kv_tokens=8192)  # serves the trainer's own weights
    try:
        trainer = Trainer(
            model=model,
            algo=make_rft(min_reward=settings.min_reward),
            batch_source=batches(server, settings),
            cfg=TrainerConfig(lr=settings.lr, weight_decay=0.0, max_seq_len=64, seed=settings.seed),
            publisher=SharedWeightsPublisher(server),
        )
        asyncio.run(repeat(trainer, settings))
    finally:
        server.close()


async def repeat(trainer: Trainer, settings: Settings) -> None:
    for number in range(settings.rounds):
        history = [await trainer.train_step() for _ in range(settings.updates_per_round)]
        first, last = history[0], history[-1]
        print(
            f"round {number}: reward {first['train/avg_total_reward']:.2f}, imitated "
            f"{sum(stats['train/num_samples'] for stats in history):.0f} samples, nll {last['train/nll_mean']:.2f}"
        )


def batches(server: LocalEngine, settings: Settings) -> ReplayBatchSource | RolloutBatchSource:
    """Questions, answered by the policy; of the answers those that earned enough, each for as many updates as asked."""
    num_answers = settings.questions * settings.samples_per_question
    sampled = RolloutBatchSource(
        RolloutEngine(env_registry={"letters": Letters}, protocol_registry={"single": lambda: protocol(server)}),
        requests_fn=make_dataset_sequence_requests_fn(
            ["x", "y"],
            batch_size=settings.questions,
            group_size=settings.samples_per_question,
            env_kind="letters",
            env_kwargs_fn=lambda letter: {"letter": letter},
            protocol_kind="single",
            inference=InferenceSpec(
                sampling=SamplingParams(temperature=1.0, max_tokens=1), return_=ReturnSpec.for_rl()
            ),
        ),
        algorithm=make_rft(),
        # Here as well as in make_rft, so that what is kept for later updates is worth its room.
        sample_filter=lambda item: (item.origin.total_reward or 0.0) >= settings.min_reward,
        max_steps=1,
        concurrency=64,
    )
    if settings.updates_per_round == 1:
        return sampled
    return ReplayBatchSource(
        sampled,
        capacity=num_answers,
        num_replayed=num_answers // 2,
        max_lag=2 * settings.updates_per_round,
        fresh_every=settings.updates_per_round,
        seed=settings.seed,
    )


def protocol(server: LocalEngine) -> SingleAgentProtocol:
    agent = Agent(
        client=server,
        model="tiny",
        ctx=FullDialog(),
        parser=lambda text: ParseResult(action=text or "\ufffd", reward=0.0, obs=None),
        chat_template=ByteTemplate(),
        reject_incomplete_completions=False,  # one token is all that is asked for
    )
    return SingleAgentProtocol(agent)


def tiny_llama(seed: int) -> Any:
    transformers.set_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"rft: {mistake}")
