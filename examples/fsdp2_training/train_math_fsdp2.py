"""Reinforcement learning on competition math over several GPUs: GRPO, one GPU generates with vLLM, the others train with FSDP2.

Shows: a model spread over ranks, one source of rollouts for all of them, weights published from shards, sharded checkpoints; the
parts of `ludic.run` put together by hand. Settings are those of `ludic train`.
Needs: torchrun; a vLLM server (see README.md beside this file), or --engine local; MATH from --data, or the hub through `datasets`.
Takes: on 2 CPU processes with --model tiny, within a minute. On 4 GPUs it has not been run; `ludic plan` has the memory.

    CUDA_VISIBLE_DEVICES=0 ludic serve --engine vllm --model Qwen/Qwen2.5-1.5B-Instruct --port 8000
    CUDA_VISIBLE_DEVICES=1,2,3 torchrun --standalone --nproc-per-node 3 examples/fsdp2_training/train_math_fsdp2.py

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_training/train_math_fsdp2.py \
        --model tiny --engine local --device cpu --data math.jsonl --steps 2
"""
# ruff: noqa: T201 - a script prints

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ludic.batch_gen import AsyncRolloutBatchSource
from ludic.cli.script import ScriptFlags, parse_script, run_script
from ludic.distributed import ClientPublisher
from ludic.distributed.fsdp import FSDPSettings, load_sharded
from ludic.distributed.ranks import Ranks, join_ranks, leave_ranks
from ludic.models.loading import LoadedModel
from ludic.run import RunConfig, build
from ludic.run.folder import latest_checkpoint, write_config
from ludic.run.model import ServedPolicy, load_policy, local_engine, make_template
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import make_episode_setup
from ludic.run.parts.loggers import make_loggers
from ludic.run.parts.requests import make_evaluator
from ludic.run.parts.source import make_source
from ludic.run.resolve import ResolvedRun
from ludic.training import Trainer
from ludic.training.checkpoint.export import export_checkpoint
from ludic.types import ConfigError
from ludic_vllm.generation import serve_on_vllm


@dataclass(frozen=True)
class Flags(ScriptFlags):
    """The sharding of the model. Every rank is given the same flags; --resume is also right for a run that has not begun."""

    cpu_offload: bool = False
    sync_gradients: Literal["last", "every"] = "last"
    """"every" needs far less memory with large models; see docs/scaling.md."""
    timeout_s: float = 7200.0
    """Seconds that a rank waits for another; longer than an evaluation takes."""


def settings(args: Sequence[str]) -> tuple[Flags, RunConfig]:
    flags, config = parse_script(
        __doc__, args, Flags, name="math_fsdp2", model="Qwen/Qwen2.5-1.5B-Instruct", device="cuda", engine="vllm",
        server=("http://127.0.0.1:8000",), control_token=Path("runs/vllm-8000"),
        data=Path("hub:DigitalLearningGmbH/MATH-lighteval:train"), parser="boxed", max_tokens=2048, max_seq_len=4096,
        too_long="drop", micro_token_budget=16_384, steps=200, lr=1e-6, rollouts_per_update=512, concurrency=256,
        max_lag=1, eval_temperature=0.0, eval_episodes=500, eval_concurrency=256, logger=("print",),
    )  # fmt: skip
    if config.rollouts.engine == "local":
        config = replace(config, rollouts=replace(config.rollouts, server=()))
    return flags, config


def main(args: Sequence[str]) -> int:
    flags, config = settings(args)
    ranks = join_ranks(timeout_s=flags.timeout_s, device=config.model.device)
    try:
        with ranks.watching(), contextlib.ExitStack() as stack:  # what fails on one rank is said on all
            run = checked(flags, config, ranks)
            is_done = train(run, flags, ranks, stack)
    finally:
        leave_ranks()
    if is_done and ranks.is_first:
        export(run.folder)
    return 0


def checked(flags: Flags, config: RunConfig, ranks: Ranks) -> ResolvedRun:
    """On every rank: an error of the first alone would leave the others waiting."""
    if ranks.world_size == 1:
        raise ConfigError(
            "This script trains on several ranks: torchrun --standalone --nproc-per-node 2 … For one process, use `ludic train`."
        )
    run = build(config, env="math").resolved
    has_run = ranks.broadcast((run.folder / "metrics.jsonl").exists() if ranks.is_first else None)
    if has_run and not flags.resume:
        raise ConfigError(f"There is a run in {run.folder} already. Go on with --resume, or choose another --name.")
    return run


def train(run: ResolvedRun, flags: Flags, ranks: Ranks, stack: contextlib.ExitStack) -> bool:
    """True if all steps are done; False if the run was stopped before."""
    # Only the first rank reads files: the others get their part of each weight, and the tokenizer, from it.
    loaded = load(run) if ranks.is_first else None
    tokenizer = ranks.broadcast(None if loaded is None else loaded.tokenizer)
    spread = FSDPSettings(
        gradient_checkpointing=run.trainer.gradient_checkpointing,
        cpu_offload=flags.cpu_offload,
        sync_gradients=flags.sync_gradients,
        compile=run.trainer.compile,
    )
    device = run.config.model.device
    model = load_sharded(lambda: None if loaded is None else loaded.model, ranks, spread, device=device)
    served = None if loaded is None else serve(run, loaded, stack)
    loaded = None  # the whole model; from now on each rank has its part
    trainer = make_trainer(run, ranks, model, tokenizer, served)
    asyncio.run(until_done(trainer, run.steps))
    is_done = not trainer.stop.is_set and trainer.step >= run.steps
    if ranks.is_first and not is_done:
        print(f"Ended after step {trainer.step} of {run.steps}. Go on with --resume, in {run.folder}.", flush=True)
    return is_done


async def until_done(trainer: Trainer, num_steps: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(trainer.batch_source, AsyncRolloutBatchSource):
            await stack.enter_async_context(trainer.batch_source)
        await trainer.train(max(0, num_steps - trainer.step))


def export(folder: Path) -> None:
    """Write a folder that every tool reads, in one process and without a GPU."""
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None, "a run saves at its end"
    target = folder / f"model_{checkpoint.name}"
    if not target.exists():
        export_checkpoint(checkpoint, target)
    print(f"The model is in {target}. Next: ludic eval math --model {target}", flush=True)


# --- the policy ---


def load(run: ResolvedRun) -> LoadedModel:
    """In the host's memory; on GPUs the weights are bf16, and the optimizer keeps fp32 copies of its part."""
    model = run.config.model
    return load_policy(
        replace(model, device="cpu", dtype="bfloat16" if model.device == "cuda" else "float32"), seed=run.seed
    )


def serve(run: ResolvedRun, loaded: LoadedModel, stack: contextlib.ExitStack) -> ServedPolicy:
    """The client that samples the policy and the publisher that brings new weights there; on the first rank."""
    if run.config.rollouts.engine == "vllm":
        served = serve_on_vllm(run, loaded)
    else:
        whole = replace(loaded, model=loaded.model.to(run.config.model.device).eval())
        engine = local_engine(whole, max_length=run.trainer.max_seq_len)
        served = ServedPolicy(client=engine, publisher=ClientPublisher(engine), close=engine.close, model=loaded.name)
    stack.callback(served.close)
    return served


# --- training ---


def make_trainer(run: ResolvedRun, ranks: Ranks, model: Any, tokenizer: Any, served: ServedPolicy | None) -> Trainer:
    """`served` is on the first rank only, and with it everything that knows of rollouts."""
    algorithm, parts = make_algorithm(run), dict[str, Any]()
    if served is not None:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_config(run)
        setup = make_episode_setup(
            run.config.env, run.config.agent, run.env, served.client, make_template(tokenizer), served.model, run.parts
        )
        source = make_source(run, setup, algorithm, jsonl_path=None)
        parts = {
            "publisher": served.publisher,
            "train_logger": make_loggers(run),
            "evaluator": make_evaluator(run, setup) if run.config.is_evaluated else None,
            "batch_source": AsyncRolloutBatchSource(source, max_lag=run.max_lag) if run.max_lag else source,
        }
    resumes = ranks.broadcast(latest_checkpoint(run.folder) is not None if ranks.is_first else None)
    return Trainer(
        model=model,
        algo=algorithm,
        cfg=replace(run.trainer, gradient_checkpointing=False, compile=False),  # load_sharded has done both
        checkpoint_config=run.checkpoint,
        resume_from="latest" if resumes else None,
        tokenizer=tokenizer,
        ranks=ranks,
        **{"batch_source": None, **parts},
    )


if __name__ == "__main__":
    run_script(main)
