"""A whole GRPO step on one GPU, phase by phase.

SmolLM2-135M's shape in bf16, 16 prompts × 8 samples, about 100 prompt tokens, 256 new ones. Generation goes through the agent,
the protocol and the rollout engine to the embedded engine, which serves the trained parameters themselves.

    PYTHONPATH=src:benchmarks python3 benchmarks/training.py --only grpo
"""

import time
from typing import Any

import torch
from engine import make, smollm2

from ludic.agents import Agent
from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, RolloutEngine
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.training import Trainer, TrainerConfig, make_grpo
from ludic.types import (
    EnvSpec,
    InferenceSpec,
    Info,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    StepOutcome,
)

NUM_PROMPTS, GROUP_SIZE, NUM_NEW = 16, 8, 256


class OneQuestion(SingleAgentEnv):
    """About 100 bytes of question; the reward is arbitrary, since only speed matters."""

    @property
    def suggested_sysprompt(self) -> None:
        return None

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        return f"Question {seed}: ".ljust(98, "x"), {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", float(len(action) % 2), terminated=True)


class ByteTokenizer:
    """Decodes ids to text; ids above 255 have none."""

    eos_token_id = None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return ByteTemplate().decode([i for i in ids if i < 256])


def protocol(client: LocalEngine) -> SingleAgentProtocol:
    agent = Agent(
        client=client,
        model="shape",
        ctx=FullDialog(),
        parser=lambda text: ParseResult(action=text or "-", reward=0.0, obs=None),
        chat_template=ByteTemplate(),
        reject_incomplete_completions=False,
    )
    return SingleAgentProtocol(agent)


class Questions:
    """New prompts for every step."""

    def __init__(self) -> None:
        self._next = 0
        self._inference = InferenceSpec(
            sampling=SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True),
            return_=ReturnSpec.for_rl(),
        )

    def __call__(self) -> list[RolloutRequest]:
        self._next += NUM_PROMPTS
        return [
            RolloutRequest(
                env=EnvSpec("question"),
                protocol=ProtocolSpec("single"),
                env_seed=self._next + i,
                inference=self._inference,
            )
            for i in range(NUM_PROMPTS)
        ]


async def grpo_step(num_steps: int = 4) -> None:
    """One line per step after the warm-up (compiling and capturing), then the best."""
    model: Any = make(smollm2, "cuda", torch.bfloat16)
    client = LocalEngine(model, ByteTokenizer(), max_sequences=NUM_PROMPTS * GROUP_SIZE, max_model_len=512)
    engine = RolloutEngine(
        env_registry={"question": OneQuestion}, protocol_registry={"single": lambda: protocol(client)}
    )
    algorithm = make_grpo(group_size=GROUP_SIZE)
    source = RolloutBatchSource(
        engine,
        requests_fn=Questions(),
        algorithm=algorithm,
        strategy=GRPORequestStrategy(GROUP_SIZE),
        max_steps=1,
        concurrency=NUM_PROMPTS * GROUP_SIZE,
    )
    trainer = Trainer(
        model=model,
        algo=algorithm,
        batch_source=source,
        cfg=TrainerConfig(lr=1e-6, max_seq_len=512, micro_token_budget=49_152, compile=True),
        publisher=SharedWeightsPublisher(client),
    )
    started = time.perf_counter()
    for _ in range(3):
        await trainer.train_step()
    print(
        f"GRPO step, SmolLM2-135M shape, {NUM_PROMPTS} × {GROUP_SIZE} (warm-up {time.perf_counter() - started:.0f} s)"
    )
    best: dict[str, float] = {}
    for _ in range(num_steps):
        stats = await trainer.train_step()
        phases = {name: stats[f"perf/{name}"] for name in ("step_s", "fetch_s", "update_s", "publish_s")}
        print("  " + "  ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items()))
        best = phases if not best or phases["step_s"] < best["step_s"] else best
    generated = NUM_PROMPTS * GROUP_SIZE * NUM_NEW / best["fetch_s"]
    print(
        f"  best {best['step_s']:.3f} s: generation {generated:,.0f} tok/s, update {stats['perf/tokens_per_s']:,.0f} tok/s; "
        f"log-prob difference {stats['train/logp_difference_abs']:.4f} nats, ess {stats['train/ess']:.3f}"
    )
    client.close()
