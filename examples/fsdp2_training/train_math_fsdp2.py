"""Reinforcement learning on competition math over several GPUs: GRPO, one GPU generates with vLLM, the others train with FSDP2.

Shows: a model spread over ranks, one source of rollouts for all of them, weights published from shards, sharded checkpoints.
Needs: torchrun; a vLLM server (see README.md beside this file), or --engine local; MATH from --data, or the hub through `datasets`.
Takes: on 2 CPU processes with --model tiny, within a minute. On 4 GPUs it has not been run; `ludic plan` has the memory.

    CUDA_VISIBLE_DEVICES=0 ludic serve --engine vllm --model Qwen/Qwen2.5-1.5B-Instruct --port 8000
    CUDA_VISIBLE_DEVICES=1,2,3 torchrun --standalone --nproc-per-node 3 examples/fsdp2_training/train_math_fsdp2.py

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_training/train_math_fsdp2.py \
        --model tiny --engine local --device cpu --data math.jsonl --train-steps 2
"""
# ruff: noqa: T201 - a script prints

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from ludic import registry
from ludic.agents import Agent
from ludic.batch_gen import (
    AsyncRolloutBatchSource,
    RolloutBatchSource,
    RolloutEngine,
    make_dataset_sequence_requests_fn,
)
from ludic.batch_gen.requests.samples import read_samples
from ludic.context import FullDialog
from ludic.distributed import ClientPublisher, create_vllm_publisher
from ludic.distributed.fsdp import FSDPSettings, load_sharded
from ludic.distributed.ranks import Ranks, join_ranks, leave_ranks
from ludic.eval import EngineEvaluator
from ludic.inference import ChatTemplate, HFChatTemplate
from ludic.inference.local import LocalEngine
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.control_token import read_control_token
from ludic.interaction import SingleAgentProtocol
from ludic.models.loading import LoadedModel, load_model
from ludic.models.tiny import character_tokenizer, tiny_llama
from ludic.training import CheckpointConfig, JSONLLogger, PrintLogger, TeeLogger, Trainer, TrainerConfig, make_grpo
from ludic.training.algorithms import RLAlgorithm
from ludic.training.checkpoint.export import export_checkpoint
from ludic.training.checkpoint.manager import CheckpointManager
from ludic.types import (
    ChatClient,
    ConfigError,
    EnvSpec,
    InferenceSpec,
    LudicError,
    PolicyPublisher,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    TrainingLogger,
)

Sample = dict[str, Any]
TINY = "tiny"
SHOWN = (
    "avg_total_reward", "parse_error_rate", "completion_truncated_rate", "avg_completion_length", "entropy", "grad_norm",
    "lag_mean", "fetch_s", "update_s", "publish_s", "tokens_per_s", "accuracy", "accuracy_low", "accuracy_high",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who is trained on what, where, and how. Every rank is given the same."""

    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """A folder, a hub id, smollm2-135m; or tiny: random weights and a token per character, to try the script."""
    device: Literal["cuda", "cpu"] = "cuda"
    engine: Literal["vllm", "local"] = "vllm"
    """What generates: servers, or the embedded engine beside the first rank, with a copy of the weights."""
    server: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Addresses of the vLLM servers; all of them get every new version."""
    control_token: Path = Path("runs/vllm-8000")
    """The file, or its folder, with the token that lets us push weights; the server says where it is."""

    data: Path | None = None
    """A JSONL file of problems to train on; without it the training split of --dataset."""
    eval_data: Path | None = None
    """A JSONL file of other problems, such as MATH-500; without it there is no evaluation."""
    dataset: str = "DigitalLearningGmbH/MATH-lighteval"
    """On the hub; with `problem` and `solution`."""
    parser: Literal["boxed", "final_number"] = "boxed"
    out: Path = Path("runs/math_fsdp2")
    """The run's folder, on a disk that all ranks see."""
    resume: bool = False
    """Go on with the run in --out if there is one; for restarts (torchrun --max-restarts, Slurm's --requeue)."""
    seed: int = 0

    train_steps: int = 200
    rollouts_per_update: int = 512
    group_size: int = 8
    concurrency: int = 256
    """Answers at a time."""
    max_completion_tokens: int = 2048
    max_lag: int = 1
    """Generate the next batches while training: up to so many versions behind. 0 takes turns."""
    lr: float = 1e-6
    max_seq_len: int = 4096
    micro_token_budget: int = 16_384
    """Tokens in one forward pass of one rank."""

    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    sync_gradients: Literal["last", "every"] = "last"
    """"every" needs far less memory with large models; see docs/scaling.md."""
    compile: bool = False

    eval_every: int = 20
    eval_limit: int = 500
    checkpoint_every: int = 20
    max_to_keep: int = 2
    timeout_s: float = 7200.0
    """How long a rank waits for another; longer than an evaluation takes."""

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=self.max_completion_tokens)

    @property
    def solver(self) -> ProtocolSpec:
        return ProtocolSpec("solver", {"model": self.model, "parser": self.parser})


def main(settings: Settings) -> None:
    ranks = join_ranks(timeout_s=settings.timeout_s, device=settings.device)
    try:
        with ranks.watching(), contextlib.ExitStack() as stack:  # what fails on one rank is said on all
            finished = train(settings, ranks, stack)
    finally:
        leave_ranks()
    if finished is not None and ranks.is_first:
        export(finished, settings.out / f"model_{finished.name}")


def export(checkpoint: Path, target: Path) -> None:
    """As a folder that everything reads, by one process and without a GPU."""
    if not target.exists():
        export_checkpoint(checkpoint, target)
    print(f"The model is in {target}. Next: ludic eval math --model {target}", flush=True)


def train(settings: Settings, ranks: Ranks, stack: contextlib.ExitStack) -> Path | None:
    """The newest checkpoint when all steps are done; None if the run was stopped before."""
    check(settings, ranks)
    # Only the first rank reads files: the others get their part of each weight, and the tokenizer, from it.
    loaded = load(settings) if ranks.is_first else None
    tokenizer = ranks.broadcast(None if loaded is None else loaded.tokenizer)
    spread = FSDPSettings(
        gradient_checkpointing=settings.gradient_checkpointing,
        cpu_offload=settings.cpu_offload,
        sync_gradients=settings.sync_gradients,
        compile=settings.compile,
    )
    model = load_sharded(lambda: None if loaded is None else loaded.model, ranks, spread, device=settings.device)
    served = None if loaded is None else serve(settings, loaded, stack)
    loaded = None  # the whole model; from now on each rank has its part
    trainer = make_trainer(settings, ranks, model, tokenizer, served)
    asyncio.run(until_done(trainer, settings.train_steps))
    if trainer.stop.is_set or trainer.step < settings.train_steps:
        say(
            ranks,
            f"Ended after step {trainer.step} of {settings.train_steps}. Go on with --resume --out {settings.out}",
        )
        return None
    return trainer.checkpointer.latest() if trainer.checkpointer is not None else None


async def until_done(trainer: Trainer, num_steps: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(trainer.batch_source, AsyncRolloutBatchSource):
            await stack.enter_async_context(trainer.batch_source)
        await trainer.train(max(0, num_steps - trainer.step))


def say(ranks: Ranks, text: str) -> None:
    if ranks.is_first:
        print(text, flush=True)


def check(settings: Settings, ranks: Ranks) -> None:
    """On every rank: an error of the first alone would leave the others waiting."""
    if ranks.world_size == 1:
        raise ConfigError(
            "This script trains on several ranks: torchrun --standalone --nproc-per-node 2 … For one process, use `ludic train`."
        )
    if settings.rollouts_per_update % settings.group_size:
        raise ConfigError(
            f"--rollouts-per-update {settings.rollouts_per_update} is not a multiple of --group-size "
            f"{settings.group_size}; a step takes whole groups."
        )
    has_run = ranks.broadcast((settings.out / "metrics.jsonl").exists() if ranks.is_first else None)
    if has_run and not settings.resume:
        raise ConfigError(f"There is a run in {settings.out} already. Go on with --resume, or choose another --out.")


# --- the policy ---


def load(settings: Settings) -> LoadedModel:
    """In the host's memory; on GPUs the weights are bf16, and the optimizer keeps fp32 copies of its part."""
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    if settings.model != TINY:
        return load_model(settings.model, dtype=dtype, device="cpu", seed=settings.seed)
    tokenizer = character_tokenizer()
    model = tiny_llama(len(tokenizer), width=64, layers=2, max_length=settings.max_seq_len, seed=settings.seed)
    return LoadedModel(model.to(dtype), tokenizer, TINY)


@dataclass(frozen=True, slots=True)
class Served:
    """What samples the policy, and what brings new weights there; on the first rank."""

    client: ChatClient
    publisher: PolicyPublisher


def serve(settings: Settings, loaded: LoadedModel, stack: contextlib.ExitStack) -> Served:
    if settings.engine == "vllm":
        servers = VLLMChatClient(servers=settings.server, control_token=read_control_token(settings.control_token))
        stack.callback(lambda: asyncio.run(servers.close()))
        return Served(servers, create_vllm_publisher(servers))
    whole = loaded.model.to(settings.device).eval()
    engine = LocalEngine(whole, loaded.tokenizer, max_model_len=settings.max_seq_len, seed=settings.seed)
    stack.callback(engine.close)
    return Served(engine, ClientPublisher(engine))


# --- problems, and who is asked them ---


def load_problems(data: Path | None, dataset: str, limit: int | None = None) -> list[Sample]:
    """From a JSONL file with `problem` and `solution` (or `answer`), or from the hub."""
    rows = read_samples(f"hub:{dataset}:train" if data is None else data)
    name = "train" if data is None else data.stem
    return [{"id": f"{name}:{number}", **row} for number, row in enumerate(rows)][:limit]


def solver(client: ChatClient, template: ChatTemplate, *, model: str, parser: str) -> SingleAgentProtocol:
    agent = Agent(
        client=client, model=model, ctx=FullDialog(), parser=registry.parsers.make(parser), chat_template=template
    )
    return SingleAgentProtocol(agent)


def rollout_engine(client: ChatClient, tokenizer: Any, seed: int) -> RolloutEngine:
    return RolloutEngine(protocol_registry={"solver": partial(solver, client, HFChatTemplate(tokenizer))}, seed=seed)


def make_source(
    settings: Settings, client: ChatClient, tokenizer: Any, algo: RLAlgorithm
) -> RolloutBatchSource | AsyncRolloutBatchSource:
    problems = load_problems(settings.data, settings.dataset)
    print(f"{len(problems)} problems to train on", flush=True)
    source = RolloutBatchSource(
        rollout_engine(client, tokenizer, settings.seed),
        requests_fn=make_dataset_sequence_requests_fn(
            problems,
            batch_size=settings.rollouts_per_update // settings.group_size,
            group_size=settings.group_size,
            env_kind="math",
            protocol_kind=settings.solver.kind,
            protocol_kwargs=settings.solver.kwargs,
            inference=InferenceSpec(sampling=settings.sampling(1.0), return_=ReturnSpec.for_rl()),
            shuffle=True,
            rng_seed=settings.seed,
        ),
        algorithm=algo,
        max_steps=1,
        concurrency=settings.concurrency,
    )
    return AsyncRolloutBatchSource(source, max_lag=settings.max_lag) if settings.max_lag else source


def make_evaluator(settings: Settings, client: ChatClient, tokenizer: Any) -> EngineEvaluator | None:
    if settings.eval_data is None:
        return None
    inference = InferenceSpec(sampling=settings.sampling(0.0))
    asked = [
        RolloutRequest(
            env=EnvSpec("math", {"sample": sample}),
            protocol=settings.solver,
            env_seed=index,
            sampling_seed=index,
            inference=inference,
        )
        for index, sample in enumerate(load_problems(settings.eval_data, settings.dataset, settings.eval_limit))
    ]
    return EngineEvaluator(rollout_engine(client, tokenizer, settings.seed), lambda: asked)


# --- training ---


def make_trainer(settings: Settings, ranks: Ranks, model: Any, tokenizer: Any, served: Served | None) -> Trainer:
    """`served` is on the first rank only, and with it everything that knows of rollouts."""
    algo = make_grpo(group_size=settings.group_size, reduction="token_mean")
    checkpoints = CheckpointConfig(
        settings.out / "checkpoints", every_n_steps=settings.checkpoint_every, max_to_keep=settings.max_to_keep
    )
    is_evaluated = settings.eval_data is not None and settings.eval_every > 0
    resumes = ranks.broadcast(CheckpointManager(checkpoints).latest() is not None if ranks.is_first else None)
    return Trainer(
        model=model,
        algo=algo,
        batch_source=None if served is None else make_source(settings, served.client, tokenizer, algo),
        cfg=TrainerConfig(
            lr=settings.lr,
            max_seq_len=settings.max_seq_len,
            too_long="drop",  # a problem that leaves no room for its answer
            micro_token_budget=settings.micro_token_budget,
            max_lag=settings.max_lag,
            seed=settings.seed,
            eval_at_start=is_evaluated,
            eval_every_n_steps=settings.eval_every if is_evaluated else None,
            eval_concurrency=settings.concurrency,
        ),
        publisher=None if served is None else served.publisher,
        checkpoint_config=checkpoints,
        resume_from="latest" if resumes and settings.resume else None,
        train_logger=make_logger(settings.out) if ranks.is_first else None,
        evaluator=None if served is None else make_evaluator(settings, served.client, tokenizer),
        tokenizer=tokenizer,
        ranks=ranks,
    )


def make_logger(out: Path) -> TrainingLogger:
    return TeeLogger(JSONLLogger(out / "metrics.jsonl"), PrintLogger(keys=SHOWN))


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"train_math_fsdp2: {mistake}")
