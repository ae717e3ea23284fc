"""A whole GRPO step, phase by phase, and TRL's step beside it where TRL and vLLM are installed.

Random weights in bf16 (fp32 on a CPU), new prompts in every step, replies of a fixed length. Generation goes through the agent,
the protocol and the rollout engine to the embedded engine, which serves the trained parameters themselves.

    PYTHONPATH=src python3 benchmarks/grpo_step.py                                   # 135M, 16 × 8; on a CPU a tiny model
    PYTHONPATH=src python3 benchmarks/grpo_step.py --shape 1.5b --prompts 64 --json grpo.jsonl
    PYTHONPATH=src python3 benchmarks/grpo_step.py --max-lag 1                       # does overlapping the phases pay?

With `--max-lag 1` the next batch is generated while this one is trained on; rounds with and without alternate. "trained" counts
prompt and reply tokens of all samples, also those of a prompt that is computed once. MFU counts the tokens that are computed, six
operations per parameter and token, without attention.
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine import make
from engine_gpu import SHAPES, append_record, config_of, plain_config, run_child
from machine import ON_GPU, described, hardware

from ludic.agents import Agent
from ludic.batch_gen import AsyncRolloutBatchSource, GRPORequestStrategy, RolloutBatchSource, RolloutEngine
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

NUM_WARM_UP = 3
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16."""
MICRO_TOKENS = {"tiny": 4096, "135m": 49_152}
"""Tokens of a micro-batch; 16,384 for larger shapes."""
TRL_MICRO_BATCH = {"tiny": 8, "135m": 64}
"""Samples of TRL's micro-batch; 16 for larger shapes, since it keeps all logits."""


class OneQuestion(SingleAgentEnv):
    """A question of `length` bytes. No two rewards are equal, so that every group counts. Like `gsm8k` it needs no thread."""

    blocking = False
    numbers = itertools.count()

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    @property
    def suggested_sysprompt(self) -> None:
        return None

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        return f"Question {seed}: ".ljust(self._length, "x"), {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", next(self.numbers) * 0.618 % 1.0, terminated=True)


class SlowQuestion(OneQuestion):
    """Its answer is graded for `seconds`."""

    blocking = False

    def __init__(self, length: int, seconds: float) -> None:
        super().__init__(length)
        self._seconds = seconds

    async def async_env_step(self, action: str) -> StepOutcome:
        await asyncio.sleep(self._seconds)
        return self.env_step(action)


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

    def __init__(self, count: int, num_new: int, env: EnvSpec) -> None:
        self._next, self._count, self._env = 0, count, env
        self._inference = InferenceSpec(
            sampling=SamplingParams(temperature=1.0, max_tokens=num_new, ignore_eos=True),
            return_=ReturnSpec.for_rl(),
        )

    def __call__(self) -> list[RolloutRequest]:
        self._next += self._count
        return [
            RolloutRequest(
                env=self._env,
                protocol=ProtocolSpec("single"),
                env_seed=self._next + i,
                inference=self._inference,
            )
            for i in range(self._count)
        ]


# --- ours ---


class OurStep:
    """Model, engine, source and trainer; `steps` measures."""

    def __init__(self, options: argparse.Namespace, model: Any = None) -> None:
        """`model` instead of random weights of the shape."""
        self._options = options
        self._model: Any = model or make(
            SHAPES[options.shape], "cuda" if ON_GPU else "cpu", torch.bfloat16 if ON_GPU else torch.float32
        )
        num_samples = options.prompts * options.group
        length = -(-(options.prompt_tokens + options.new_tokens) // 256) * 256
        self.client = LocalEngine(self._model, ByteTokenizer(), max_sequences=num_samples, max_model_len=length)
        template = len(ByteTemplate().apply([{"role": "user", "content": ""}]).prompt_token_ids)
        question = {"length": options.prompt_tokens - template}
        slow = {"seconds": options.env_seconds} if options.env_seconds else {}
        env = EnvSpec("question", {**question, **slow})
        engine = RolloutEngine(
            env_registry={"question": SlowQuestion if slow else OneQuestion},
            protocol_registry={"single": lambda: protocol(self.client)},
        )
        algorithm = make_grpo(group_size=options.group)
        self._source = RolloutBatchSource(
            engine,
            requests_fn=Questions(options.prompts, options.new_tokens, env),
            algorithm=algorithm,
            strategy=GRPORequestStrategy(options.group),
            max_steps=1,
            concurrency=num_samples,
        )
        self._trainer = Trainer(
            model=self._model,
            algo=algorithm,
            batch_source=self._source,
            cfg=TrainerConfig(
                lr=1e-6,
                max_seq_len=length,
                micro_token_budget=options.micro_tokens or MICRO_TOKENS.get(options.shape, 16_384),
                compile=ON_GPU,
                share_prefixes=options.share_prefixes,
            ),
            publisher=SharedWeightsPublisher(self.client),
        )

    async def steps(self, count: int, max_lag: int, num_unmeasured: int) -> list[dict[str, float]]:
        """The metrics of `count` steps, with the time of each as `wall_s`."""
        rows: list[dict[str, float]] = []
        if max_lag == 0:
            return await self._measured(count, num_unmeasured)
        async with AsyncRolloutBatchSource(self._source, max_lag=max_lag) as ahead:
            self._trainer.batch_source = ahead
            ahead.notify_version(self._trainer.step)
            try:
                rows = await self._measured(count, num_unmeasured)
            finally:
                self._trainer.batch_source = self._source
        return rows

    async def _measured(self, count: int, num_unmeasured: int) -> list[dict[str, float]]:
        rows = []
        for number in range(num_unmeasured + count):
            started = time.perf_counter()
            stats = await self._trainer.train_step()
            if number >= num_unmeasured:
                rows.append({**stats, "wall_s": time.perf_counter() - started})
        return rows

    def summary(self, rows: list[dict[str, float]], max_lag: int) -> dict[str, float]:
        """Medians over the steps. With overlapping phases only the whole step has a speed of generation."""
        options = self._options

        def median(name: str) -> float:
            return statistics.median(row[name] for row in rows)

        num_new = options.prompts * options.group * options.new_tokens
        step_s, update_s = median("wall_s"), median("perf/update_s")
        num_computed = median("train/num_tokens") / median_or(rows, "perf/prefix_sharing", 1.0)
        found = {
            "step_s": step_s,
            "best_s": min(row["wall_s"] for row in rows),
            "generation_s": median("perf/fetch_s"),
            "update_s": update_s,
            "publish_s": median("perf/publish_s"),
            "generated_tokens_per_s": num_new / (step_s if max_lag else median("perf/fetch_s")),
            "trained_tokens_per_s": median("train/num_tokens") / update_s,
            "prefix_sharing": median_or(rows, "perf/prefix_sharing", 1.0),
            "logp_difference": median("train/logp_difference_abs"),
            "peak_gib": peak_gib(),
        }
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in hardware()), None)
        if peak is not None:
            found["mfu"] = 6 * self._num_multiplied() * num_computed / update_s / peak
        return found

    def _num_multiplied(self) -> int:
        """Parameters that multiply: all but an embedding that is not also the head."""
        num = sum(p.numel() for p in self._model.parameters())
        return (
            num if self._model.config.tie_word_embeddings else num - self._model.get_input_embeddings().weight.numel()
        )


def median_or(rows: list[dict[str, float]], name: str, default: float) -> float:
    return statistics.median(row.get(name, default) for row in rows)


def peak_gib() -> float:
    if ON_GPU:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


async def measure_ours(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Lag → summary."""
    ours = OurStep(options)
    started = time.perf_counter()
    await ours.steps(NUM_WARM_UP, 0, 0)
    if options.max_lag:
        await ours.steps(1, options.max_lag, 0)
    warm_up_s = time.perf_counter() - started
    print(f"ours, warm-up of {NUM_WARM_UP} steps {warm_up_s:.0f} s; seconds of each step:", flush=True)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    lags = [0] if not options.max_lag else [0, options.max_lag] * 2
    rows: dict[int, list[dict[str, float]]] = {}
    for lag in lags:
        # The first overlapped step waits for the batch before it.
        found = await ours.steps(options.steps, lag, num_unmeasured=2 if lag else 0)
        rows.setdefault(lag, []).extend(found)
        for row in found:
            phases = "  ".join(f"{name} {row[f'perf/{name}_s']:.3f}" for name in ("fetch", "update", "publish"))
            print(f"  lag {lag}: step {row['wall_s']:.3f}  {phases}", flush=True)
    ours.client.close()
    return {lag: {**ours.summary(found, lag), "warm_up_s": warm_up_s} for lag, found in rows.items()}


def show(summary: dict[str, float], lag: int) -> None:
    mfu = f", MFU {summary['mfu']:.2f}" if "mfu" in summary else ""
    waits = "generation" if lag == 0 else "wait for the batch"
    print(
        f"  lag {lag}, median: step {summary['step_s']:.3f} s (best {summary['best_s']:.3f}): {waits} "
        f"{summary['generation_s']:.3f}, update {summary['update_s']:.3f}, publish {summary['publish_s']:.3f}\n"
        f"    generated {summary['generated_tokens_per_s']:,.0f} tok/s{' of the step' if lag else ''}, "
        f"trained {summary['trained_tokens_per_s']:,.0f} tok/s{mfu}, "
        f"prefix sharing {summary['prefix_sharing']:.2f}, peak {summary['peak_gib']:.1f} GiB, "
        f"log-prob difference {summary['logp_difference']:.4f} nats"
    )


# --- TRL, in a child process ---


def measure_trl(options: argparse.Namespace) -> dict[str, Any] | None:
    """None if it is off, not installed, or fails."""
    if options.trl == "off":
        return None
    found = {
        "trl": importlib.util.find_spec("trl") is not None,
        "vllm": any(
            (Path(path) / "vllm" / "__init__.py").exists() for path in sys.path
        ),  # research/experiments/vllm.py is no vLLM
    }
    if options.trl == "auto" and not all(found.values()):
        print(
            f"TRL's step is not measured: {' and '.join(name for name in found if not found[name])} cannot be imported."
        )
        return None
    num_samples = options.prompts * options.group
    task = {
        "config": plain_config(config_of(options.shape)),
        **{name: getattr(options, name) for name in ("prompts", "group", "prompt_tokens", "new_tokens", "steps")},
        "num_warm_up": NUM_WARM_UP,
        "micro_batch": min(options.trl_micro_batch or TRL_MICRO_BATCH.get(options.shape, 16), num_samples),
        "use_vllm": options.trl != "generate",
        "on_gpu": ON_GPU,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "task.json")
        path.write_text(json.dumps(task))
        rows = list(run_child("trl_grpo.py", [str(path)]))
    return rows[-1] if rows else None


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="135m" if ON_GPU else "tiny")
    parser.add_argument("--prompts", type=int, default=16 if ON_GPU else 4)
    parser.add_argument("--group", type=int, default=8 if ON_GPU else 4)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=256 if ON_GPU else 32)
    parser.add_argument("--steps", type=int, default=4, help="measured ones, per round")
    parser.add_argument("--env-seconds", type=float, default=0.0, help="how long an env waits before it grades")
    parser.add_argument("--max-lag", type=int, choices=[0, 1], default=0, help="1: also with overlapping phases")
    parser.add_argument("--share-prefixes", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--micro-tokens", type=int, default=None, help="tokens of a micro-batch")
    parser.add_argument("--trl", choices=["auto", "vllm", "generate", "off"], default="auto", help="how TRL generates")
    parser.add_argument("--trl-micro-batch", type=int, default=None, help="samples of TRL's micro-batch")
    parser.add_argument("--json", default=None, help="append one record per row to this file")
    options = parser.parse_args(given)
    counts = {name: getattr(options, name) for name in ("prompts", "group", "prompt_tokens", "new_tokens", "steps")}
    print(
        f"GRPO step, {options.shape} shape, {options.prompts} × {options.group} samples, {options.prompt_tokens} → "
        f"{options.new_tokens} tokens; {described()}",
        flush=True,
    )
    theirs = measure_trl(options)  # first: ours keeps memory of the GPU
    if theirs is not None:
        print(
            f"TRL {theirs['version']} ({theirs['generation']}): step {theirs['step_s']:.3f} s (best {theirs['best_s']:.3f}), "
            f"replies of {theirs['mean_new_tokens']:.1f} tokens, peak {theirs['peak_gib']:.1f} GiB",
            flush=True,
        )
        common = {"benchmark": "grpo_step", "shape": options.shape, **counts}
        append_record(options.json, **common, system="trl", versions={"trl": theirs.pop("version")}, **theirs)
    ours = asyncio.run(measure_ours(options))
    for lag, summary in ours.items():
        show(summary, lag)
        append_record(
            options.json, benchmark="grpo_step", shape=options.shape, **counts, system="ludic", max_lag=lag,
            share_prefixes=options.share_prefixes, **summary,
        )  # fmt: skip
    if options.max_lag:
        print(f"  overlapping: {ours[0]['step_s'] / ours[options.max_lag]['step_s']:.2f}x")
    if theirs is not None:
        print(f"  TRL / ours: {theirs['step_s'] / ours[0]['step_s']:.2f}x")


if __name__ == "__main__":
    main()
