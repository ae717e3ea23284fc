"""Reinforcement learning on programming problems: CISPO, a program that passes all tests earns 1, in one process.

Shows: programs of a model run in a pool of sandboxes, several attempts with the failing test shown in between, LoRA.
Needs: a model; bubblewrap, docker or podman; problems from a file, or from the hub through `datasets`.
Takes: an estimated hour or more per step of 64 programs with smollm2-135m on two CPU cores; meant for a GPU.

    python examples/code_exec/train_apps.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --lora-rank 16 --lr 1e-4
    python examples/code_exec/train_apps.py --env mbpp --data mbpp.jsonl --eval-data humaneval.jsonl --eval-env humaneval
"""
# ruff: noqa: T201 - a script prints

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

from ludic import registry
from ludic.agents import Agent
from ludic.batch_gen import RolloutBatchSource, RolloutEngine, make_dataset_sequence_requests_fn
from ludic.batch_gen.requests.samples import read_samples
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.eval import EngineEvaluator
from ludic.inference import HFChatTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.models.loading import load_model
from ludic.sandbox import SandboxPool, create_sandbox_pool
from ludic.training import (
    CheckpointConfig,
    JSONLLogger,
    RichLiveLogger,
    TeeLogger,
    Trainer,
    TrainerConfig,
    default_reducers,
    make_cispo,
)
from ludic.types import (
    ConfigError,
    EnvSpec,
    InferenceSpec,
    LudicError,
    MissingExtra,
    ProtocolSpec,
    Reducer,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
)

Sample = dict[str, Any]
Task = Literal["apps", "mbpp", "humaneval", "code_exec"]
SHOWN = (
    "avg_total_reward", "pass_rate", "compile_failed", "parse_error_rate", "completion_truncated_rate", "entropy",
    "grad_norm", "step_s", "accuracy", "accuracy_low", "accuracy_high",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who is trained on what, and how."""

    model: str = "smollm2-135m"
    """A folder, a hub id, or smollm2-135m."""
    env: Task = "apps"
    """The form of the problems to train on."""
    data: str = "hub:metr-evals/apps:train"
    """Problems to train on: a JSONL file, or hub:NAME:SPLIT (this one is the original, as files that `datasets` reads)."""
    eval_data: str | None = None
    """Other problems; without them none are held out."""
    eval_env: Task | None = None
    """Their form; without it that of --env."""
    difficulty: Literal["introductory", "interview", "competition"] | None = None
    """Of APPS: only problems of this one."""
    out: Path = Path("runs/apps")
    """The run's folder: metrics.jsonl, rollouts.jsonl, checkpoints, and in the end the model."""
    resume: bool = False
    """Go on with the run in --out."""
    seed: int = 0

    max_attempts: int = 1
    """Programs per episode; after one that fails the agent is shown the failing test and tries again."""
    partial_credit: bool = False
    """Pay the share of tests that pass."""
    timeout_per_test_s: float = 5.0
    max_tests: int = 32
    """Tests per problem; APPS has hundreds for some."""
    sandbox_workers: int = 4
    """Programs that run at the same time."""
    sandbox_backend: Literal["auto", "bubblewrap", "docker", "podman"] = "auto"

    train_steps: int = 100
    rollouts_per_update: int = 64
    """Episodes per step."""
    group_size: int = 8
    """Episodes per problem, which are compared with each other."""
    concurrency: int = 64
    """Episodes at a time."""
    train_temperature: float = 1.0
    max_completion_tokens: int = 1024
    """Of one reply."""
    lr: float = 1e-5
    lora_rank: int = 0
    """0 trains all weights; an adapter wants a higher --lr, such as 1e-4."""
    kl_coeff: float = 0.0
    """Weight of a KL term that holds the policy near the one that sampled."""
    max_seq_len: int = 4096
    """Problem, programs and feedback."""
    micro_token_budget: int = 8192
    """Tokens in one forward pass; the gradient does not depend on it."""

    eval_before_start: bool = True
    eval_every: int = 20
    """Steps between evaluations; 0 is never."""
    eval_limit: int = 200
    """Problems per evaluation."""
    eval_temperature: float = 0.0
    """0 is greedy."""
    checkpoint_every: int = 20
    max_to_keep: int = 2

    @property
    def grading(self) -> dict[str, Any]:
        return {
            "max_attempts": self.max_attempts,
            "partial_credit": self.partial_credit,
            "timeout_per_test_s": self.timeout_per_test_s,
            "max_tests": self.max_tests,
        }

    @property
    def held_out_env(self) -> Task:
        return self.eval_env or self.env


def main(settings: Settings) -> None:
    if settings.rollouts_per_update % settings.group_size:
        raise ConfigError(
            f"--rollouts-per-update {settings.rollouts_per_update} is not a multiple of --group-size "
            f"{settings.group_size}; a step takes whole groups."
        )
    if not settings.resume and (settings.out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {settings.out} already. Go on with --resume, or choose another --out.")
    train = load_problems(settings, settings.data, "--data", settings.env)
    held_out = []
    if settings.eval_data is not None:
        held_out = load_problems(settings, settings.eval_data, "--eval-data", settings.held_out_env)
    print(f"{len(train)} problems to train on, {len(held_out[: settings.eval_limit])} held out", flush=True)
    asyncio.run(run(settings, train, held_out[: settings.eval_limit]))


async def run(settings: Settings, train: Sequence[Sample], held_out: Sequence[Sample]) -> None:
    pool = await create_sandbox_pool(n_workers=settings.sandbox_workers, backend=settings.sandbox_backend)
    loaded = load_model(settings.model)
    model = with_adapter(loaded.model, settings.lora_rank) if settings.lora_rank else loaded.model
    server = LocalEngine(model, loaded.tokenizer, seed=settings.seed)
    try:
        trainer = make_trainer(settings, model, server, pool, train, held_out)
        await trainer.train(max(0, settings.train_steps - trainer.step))
    finally:
        server.close()
        await pool.shutdown()
    stats = pool.cache_stats
    print(f"{stats['hits']} of {stats['hits'] + stats['misses']} programs had been graded before")
    if trainer.stop.is_set:
        print(f"Stopped after step {trainer.step} of {settings.train_steps}. Go on with --resume --out {settings.out}")
        return
    whole = model.merge_and_unload() if settings.lora_rank else model
    whole.save_pretrained(settings.out / "model")
    loaded.tokenizer.save_pretrained(settings.out / "model")
    print(f"The model is in {settings.out / 'model'}. Next: ludic eval humaneval --model that folder --data …")


# --- the problems ----------------------------------------------------------------------------------------------


def load_problems(settings: Settings, place: str, flag: str, env: Task) -> list[Sample]:
    """Those that can be graded: some of APPS ask for a function, or have no tests."""
    rows = read_samples(place, flag)
    if settings.difficulty is not None:
        rows = [row for row in rows if row.get("difficulty") == settings.difficulty]
    kept = [row for row in rows if is_gradable(row, env)]
    if not kept:
        raise ConfigError(f"None of the {len(rows)} problems of {flag} {place} can be graded as {env}.")
    if len(kept) < len(rows):
        print(
            f"{len(rows) - len(kept)} of {len(rows)} problems are left out: they cannot be graded as {env}", flush=True
        )
    return kept


def is_gradable(sample: Sample, env: Task) -> bool:
    try:
        registry.envs.make(env, sample=sample)
    except ValueError:  # ConfigError, or a text that is no JSON
        return False
    return True


# --- who solves them -------------------------------------------------------------------------------------------


def rollout_engine(
    settings: Settings, server: LocalEngine, pool: SandboxPool, env: Task, jsonl: Path | None = None
) -> RolloutEngine:
    template = HFChatTemplate(server.tokenizer)
    suggested = registry.envs.spec(env).suggested

    def programmer() -> SingleAgentProtocol:
        agent = Agent(
            client=server,
            model=settings.model,
            ctx=FullDialog(),
            parser=registry.parsers.make(suggested.parser, **suggested.parser_args),
            chat_template=template,
        )
        return SingleAgentProtocol(agent, stop_on_parse_error=True)

    return RolloutEngine(
        env_registry={env: partial(registry.envs.make, env, sandbox_pool=pool)},
        protocol_registry={"programmer": programmer},
        jsonl_path=jsonl,
        seed=settings.seed,
    )


def make_trainer(
    settings: Settings,
    model: Any,
    server: LocalEngine,
    pool: SandboxPool,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
) -> Trainer:
    algo = make_cispo(group_size=settings.group_size, kl_coeff=settings.kl_coeff)
    sampling = SamplingParams(temperature=settings.train_temperature, max_tokens=settings.max_completion_tokens)
    episodes = RolloutBatchSource(
        rollout_engine(settings, server, pool, settings.env, settings.out / "rollouts.jsonl"),
        requests_fn=make_dataset_sequence_requests_fn(
            train,
            batch_size=settings.rollouts_per_update // settings.group_size,
            group_size=settings.group_size,
            env_kind=settings.env,
            protocol_kind="programmer",
            env_kwargs_fn=lambda sample: {"sample": sample, "config": settings.grading},
            inference=InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl()),
            shuffle=True,
            rng_seed=settings.seed,
        ),
        algorithm=algo,
        max_steps=settings.max_attempts,
        concurrency=settings.concurrency,
    )
    judge = evaluator(settings, server, pool, held_out) if held_out else None
    facts = {name: Reducer(kind="mean", source=name) for name in ("pass_rate", "compile_failed")}
    return Trainer(
        model=model,
        algo=algo,
        batch_source=episodes,
        cfg=TrainerConfig(
            lr=settings.lr,
            max_seq_len=settings.max_seq_len,
            too_long="drop",  # a problem that leaves no room for its program
            micro_token_budget=max(settings.micro_token_budget, settings.max_seq_len),
            seed=settings.seed,
            eval_at_start=settings.eval_before_start and judge is not None,
            eval_every_n_steps=(settings.eval_every or None) if judge is not None else None,
            eval_concurrency=settings.concurrency,
        ),
        publisher=SharedWeightsPublisher(server),
        checkpoint_config=CheckpointConfig(
            settings.out / "checkpoints",
            every_n_steps=settings.checkpoint_every,
            max_to_keep=settings.max_to_keep,
            best_metric="eval/accuracy",
        ),
        resume_from="latest" if settings.resume else None,
        train_logger=TeeLogger(JSONLLogger(settings.out / "metrics.jsonl"), RichLiveLogger(keys=SHOWN)),
        reducers={**default_reducers(), **facts},
        evaluator=judge,
        tokenizer=server.tokenizer,
    )


def evaluator(settings: Settings, server: LocalEngine, pool: SandboxPool, samples: Sequence[Sample]) -> EngineEvaluator:
    """How many of the held-out problems the first program solves, without feedback."""
    sampling = SamplingParams(temperature=settings.eval_temperature, max_tokens=settings.max_completion_tokens)
    grading = {**settings.grading, "max_attempts": 1, "partial_credit": False}
    asked = [
        RolloutRequest(
            env=EnvSpec(settings.held_out_env, {"sample": sample, "config": grading}),
            protocol=ProtocolSpec("programmer"),
            env_seed=index,
            sampling_seed=index,
            inference=InferenceSpec(sampling=sampling),
            meta={"sample_index": index},
        )
        for index, sample in enumerate(samples)
    ]
    return EngineEvaluator(rollout_engine(settings, server, pool, settings.held_out_env), lambda: asked)


def with_adapter(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", f"--lora-rank {rank}") from error
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"train_apps: {mistake}")
