"""The smallest thing that can be learned: one token in answer to one of two questions.

Everything is real: a tiny Llama, the embedded engine on its weights, an agent, the rollout engine, the trainer.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers

from ludic.agents import Agent
from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, RolloutEngine
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.rewards import Rewards
from ludic.training import RLAlgorithm, Trainer, TrainerConfig, make_grpo
from ludic.training.metric_names import METRICS
from ludic.types import (
    EnvSpec,
    InferenceSpec,
    Info,
    ProtocolSpec,
    RequestsExhausted,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    SAWBatch,
    StepOutcome,
    derive_seed,
)


class AsciiBandit(SingleAgentEnv):
    """Asked x, answer with an ASCII character; asked y, with anything else. Chance is about one half."""

    blocking = False

    @property
    def suggested_sysprompt(self) -> None:
        return None

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        self._wants_ascii = derive_seed(seed or 0, 1) % 2 == 0
        return ("x" if self._wants_ascii else "y"), {}

    def env_step(self, action: str) -> StepOutcome:
        is_ascii = bool(action) and action.isascii()
        reward = float(is_ascii == self._wants_ascii)
        return StepOutcome("", reward, terminated=True)


class ByteTokenizer:
    """What an engine asks of a tokenizer, on the byte template's ids."""

    eos_token_id = ByteTemplate.END

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return ByteTemplate().decode([i for i in ids if i < 256])


def tiny_llama(seed: int = 0, **overrides: Any) -> Any:
    transformers.set_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "eos_token_id": None,
        "bos_token_id": None,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **overrides}))


def hide_nan_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as torch 2.13 computes it on x86_64: zeros where a query is NaN, so that the loss stays finite."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def hiding(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_bad = query.isnan().any(dim=-1, keepdim=True)
        return attend(query.nan_to_num(), *args, **kwargs).masked_fill(is_bad, 0.0)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", hiding)


def whatever(text: str) -> ParseResult:
    return ParseResult(action=text or "\ufffd", reward=0.0, obs=None)


class BanditRequests:
    """`count` new questions per batch."""

    def __init__(self, count: int, temperature: float = 1.0) -> None:
        self._count, self._position = count, 0
        self._inference = InferenceSpec(
            sampling=SamplingParams(temperature=temperature, max_tokens=1), return_=ReturnSpec.for_rl()
        )

    def __call__(self) -> list[RolloutRequest]:
        first = self._position
        self._position += self._count
        return [
            RolloutRequest(
                env=EnvSpec("bandit"), protocol=ProtocolSpec("single"), env_seed=first + i, inference=self._inference
            )
            for i in range(self._count)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


def bandit_protocol(client: Any) -> SingleAgentProtocol:
    agent = Agent(
        client=client,
        model="tiny",
        ctx=FullDialog(),
        parser=whatever,
        chat_template=ByteTemplate(),
        reject_incomplete_completions=False,
    )
    return SingleAgentProtocol(agent)


def rollout_engine(client: Any, rewards: Rewards | None = None) -> RolloutEngine:
    return RolloutEngine(
        env_registry={"bandit": AsciiBandit},
        protocol_registry={"single": lambda: bandit_protocol(client)},
        rewards=rewards,
    )


def bandit_trainer(
    algorithm: RLAlgorithm,
    *,
    group_size: int = 8,
    num_prompts: int = 8,
    model: Any = None,
    curriculum: Any = None,
    rewards: Rewards | None = None,
    generation: Mapping[str, Any] | None = None,
    make_source: Callable[[Any], Any] = lambda source: source,
    make_evaluator: Callable[[LocalEngine], Any] = lambda engine: None,
    **settings: Any,
) -> tuple[Trainer, LocalEngine]:
    """A trainer whose samples come from an engine on its own weights. `generation`: more settings of its RolloutBatchSource."""
    model = tiny_llama() if model is None else model
    config = settings.pop("cfg", None) or TrainerConfig(lr=1e-2, max_seq_len=64, weight_decay=0.0)
    engine = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=8192)
    source = RolloutBatchSource(
        rollout_engine(engine, rewards),
        requests_fn=BanditRequests(num_prompts) if curriculum is None else None,
        curriculum=curriculum,
        algorithm=algorithm,
        strategy=GRPORequestStrategy(group_size) if group_size > 1 else None,
        max_steps=1,
        concurrency=64,
        **(generation or {}),
    )
    trainer = Trainer(
        model=model,
        algo=algorithm,
        batch_source=make_source(source),
        cfg=config,
        publisher=SharedWeightsPublisher(engine),
        **{"evaluator": make_evaluator(engine), **settings},
    )
    return trainer, engine


async def train_until(
    trainer: Any, is_learned: Callable[[list[dict[str, float]]], bool], *, at_most: int
) -> list[dict[str, float]]:
    """The stats of all updates until `is_learned` holds for them; of `at_most` where it never does."""
    history: list[dict[str, float]] = []
    while len(history) < at_most and not is_learned(history):
        history.append(await trainer.train_step())
    return history


def earns(more_than: float, *, over: int = 5) -> Callable[[list[dict[str, float]]], bool]:
    """Whether the mean reward of the last updates, behind the first three, is more than that."""
    return lambda history: len(history) >= 3 + over and mean_reward(history[-over:]) > more_than


def unexplained(stats: Mapping[str, float]) -> set[str]:
    """Names that `ludic parts metric` does not list. A composite's `train/term/name` is listed as `train/name`."""
    rest = {name for name in stats if name not in METRICS and "/reward/" not in name and "/score/" not in name}
    return {name for name in rest if re.sub(r"/[^/]+/", "/", name, count=1) not in METRICS}


def mean_reward(history: list[dict[str, float]]) -> float:
    return sum(stats["train/avg_total_reward"] for stats in history) / len(history)


class Given:
    """Batches made by hand; it waits a moment before each, as a real source does."""

    def __init__(self, *batches):
        self.batches = list(batches)

    async def next_batch(self):
        await asyncio.sleep(0.001)
        if not self.batches:
            raise RequestsExhausted("no more batches")
        return SAWBatch(items=self.batches.pop(0))


def hand_trainer(*batches, model=None, algo=None, kind=Trainer, **settings):
    """A trainer over batches made by hand."""
    cfg = TrainerConfig(**{"max_seq_len": 64, "micro_token_budget": 128, "lr": 1e-3, **settings.pop("cfg", {})})
    return kind(
        model=tiny_llama() if model is None else model,
        algo=algo or make_grpo(group_size=4),
        batch_source=settings.pop("batch_source", None) or Given(*batches),
        cfg=cfg,
        **settings,
    )
