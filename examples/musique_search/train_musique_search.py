"""A search agent on MuSiQue: GRPO on multi-hop questions, each with a small knowledge base of its own, in one process.

Shows: tools that belong to the task (a search over the question's paragraphs), several model calls per episode, a
reward for the answer less a penalty for searching in circles, held-out accuracy before and after.
Needs: a model with native tool calling, the extra search; questions from --data, or the hub through `datasets`.
Takes: eight steps of eight episodes by default; meant for one GPU.

    python examples/musique_search/train_musique_search.py --model-name Qwen/Qwen3.5-4B --lora-rank 16
    python examples/musique_search/train_musique_search.py --data musique.jsonl --max-turns 5 --train-limit 100
"""
# ruff: noqa: T201 - a script prints

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tyro

from ludic.agents import ReActAgent
from ludic.batch_gen import RolloutBatchSource, RolloutEngine, make_dataset_sequence_requests_fn
from ludic.batch_gen.requests.samples import read_samples
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs.musique_search import MuSiQueSample
from ludic.eval import EngineEvaluator
from ludic.inference import HFChatTemplate, tool_parser_for
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.models.loading import load_model
from ludic.parsers import xml_tag_parser
from ludic.training import JSONLLogger, RichLiveLogger, TeeLogger, Trainer, TrainerConfig, make_grpo
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
HUB = "dgslibisey/MuSiQue"
SHOWN = (
    "avg_total_reward", "avg_turns", "parse_error_rate", "avg_completion_length", "entropy", "grad_norm", "step_s",
    "accuracy", "accuracy_low", "accuracy_high", "f1", "num_searches", "support_found",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who is trained on what, and how."""

    model_name: str = "Qwen/Qwen3.5-4B"
    """A folder or a hub id; its chat template must show tools."""
    run_dir: Path = Path("runs/musique_search")
    """metrics.jsonl, every episode of the training, and in the end the model."""
    data: Path | None = None
    """A JSONL file of questions in MuSiQue's form; without it the training split from the hub."""
    eval_data: Path | None = None
    """Other questions; without it those of --data that are not trained on, or the validation split from the hub."""
    train_limit: int = 32
    """Questions to train on, each once."""
    eval_limit: int = 16
    """Questions held out; 0 is no evaluation."""
    seed: int = 0

    batch_size: int = 4
    """Questions per step."""
    samples_per_prompt: int = 2
    """Episodes per question, which are compared with each other."""
    max_turns: int = 2
    """Model calls per episode: searches, and in the last one the answer. 1 is the closed book."""
    max_tokens: int = 256
    """Of one reply."""
    temperature: float = 1.0
    learning_rate: float = 8e-5
    """For an adapter; full training (--lora-rank 0) wants less, such as 1e-6."""
    lora_rank: int = 16
    """0 trains all weights."""
    max_seq_len: int = 4096
    """Of a whole episode, what the searches found included."""
    micro_token_budget: int = 8192
    """Tokens in one forward pass; the gradient does not depend on it."""


def main(settings: Settings) -> None:
    if min(settings.train_limit, settings.batch_size, settings.max_turns) < 1 or settings.samples_per_prompt < 2:
        raise ConfigError(
            f"--train-limit {settings.train_limit}, --batch-size {settings.batch_size}, --max-turns {settings.max_turns}, "
            f"--samples-per-prompt {settings.samples_per_prompt}; each must be at least 1, the last at least 2: GRPO compares."
        )
    if (settings.run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {settings.run_dir} already. Choose another --run-dir.")
    train, held_out = load_questions(settings)
    print(f"{len(train)} questions to train on, {len(held_out)} held out", flush=True)
    loaded = load_model(settings.model_name)
    model = with_adapter(loaded.model, settings.lora_rank) if settings.lora_rank else loaded.model
    server = LocalEngine(model, loaded.tokenizer, seed=settings.seed)
    try:
        trainer = make_trainer(settings, model, server, train, held_out)
        trainer.train_sync(-(-len(train) // settings.batch_size))
    finally:
        server.close()
    whole = model.merge_and_unload() if settings.lora_rank else model
    whole.save_pretrained(settings.run_dir / "model")
    loaded.tokenizer.save_pretrained(settings.run_dir / "model")
    print(f"The model is in {settings.run_dir / 'model'}. Next: ludic eval musique_search --model that folder --data …")


# --- the questions ---------------------------------------------------------------------------------------------


def load_questions(settings: Settings) -> tuple[list[Sample], list[Sample]]:
    """Those to train on, and those that are held out."""
    first, limit = settings.train_limit, settings.eval_limit
    if settings.data is None:
        train = from_hub("train", first)
        held_out = (
            from_hub("validation", limit)
            if settings.eval_data is None
            else read_samples(settings.eval_data, "--eval-data")[:limit]
        )
    else:
        rows = read_samples(settings.data)
        others = rows[first:] if settings.eval_data is None else read_samples(settings.eval_data, "--eval-data")
        train, held_out = rows[:first], others[:limit]
    for sample in (*train, *held_out):
        MuSiQueSample.read(sample)  # one of another form is named now, and not in the middle of the run
    return train, held_out


def from_hub(split: str, limit: int) -> list[Sample]:
    return list(islice((row for row in read_samples(f"hub:{HUB}:{split}") if row.get("answerable", True)), limit))


# --- who answers them ------------------------------------------------------------------------------------------


def make_searcher(settings: Settings, server: LocalEngine) -> Callable[[], SingleAgentProtocol]:
    """A new agent for each episode. The search tool is not its own: the env brings it along."""
    tokenizer = server.tokenizer
    template = HFChatTemplate(tokenizer, tool_parser=tool_parser_for(tokenizer))

    def searcher() -> SingleAgentProtocol:
        agent = ReActAgent(
            client=server,
            model=settings.model_name,
            ctx=FullDialog(),
            parser=xml_tag_parser("answer", success_reward=0.0, error_reward=-1.0),
            chat_template=template,
            max_react_steps=settings.max_turns,
        )
        return SingleAgentProtocol(agent)

    return searcher


def rollout_engine(settings: Settings, server: LocalEngine, jsonl: Path | None = None) -> RolloutEngine:
    return RolloutEngine(
        protocol_registry={"searcher": make_searcher(settings, server)}, jsonl_path=jsonl, seed=settings.seed
    )


def env_arguments(settings: Settings, sample: Sample) -> dict[str, Any]:
    return {"sample": sample, "max_searches": settings.max_turns - 1}


def evaluator(settings: Settings, server: LocalEngine, samples: Sequence[Sample]) -> EngineEvaluator | None:
    """Greedy answers to the held-out questions: how many are right, and how they were searched for."""
    if not samples:
        return None
    inference = InferenceSpec(sampling=SamplingParams(temperature=0.0, max_tokens=settings.max_tokens))
    asked = [
        RolloutRequest(
            env=EnvSpec("musique_search", env_arguments(settings, sample)),
            protocol=ProtocolSpec("searcher"),
            env_seed=index,
            inference=inference,
            meta={"sample_index": index},
        )
        for index, sample in enumerate(samples)
    ]
    facts = {name: Reducer(kind="mean", source=f"info.{name}") for name in ("f1", "num_searches", "support_found")}
    return EngineEvaluator(rollout_engine(settings, server), lambda: asked, facts)


# --- training --------------------------------------------------------------------------------------------------


def with_adapter(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", f"--lora-rank {rank}") from error
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def make_trainer(
    settings: Settings, model: Any, server: LocalEngine, train: Sequence[Sample], held_out: Sequence[Sample]
) -> Trainer:
    algo = make_grpo(group_size=settings.samples_per_prompt, reduction="token_mean")
    sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
    episodes = RolloutBatchSource(
        rollout_engine(settings, server, settings.run_dir / "rollouts.jsonl"),
        requests_fn=make_dataset_sequence_requests_fn(
            train,
            batch_size=min(settings.batch_size, len(train)),
            group_size=settings.samples_per_prompt,
            env_kind="musique_search",
            protocol_kind="searcher",
            env_kwargs_fn=lambda sample: env_arguments(settings, sample),
            inference=InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl()),
            shuffle=True,
            rng_seed=settings.seed,
        ),
        algorithm=algo,
        max_steps=1,
        concurrency=settings.batch_size * settings.samples_per_prompt,
    )
    judge = evaluator(settings, server, held_out)
    return Trainer(
        model=model,
        algo=algo,
        batch_source=episodes,
        cfg=TrainerConfig(
            lr=settings.learning_rate,
            max_seq_len=settings.max_seq_len,
            too_long="drop",  # searches may find more than fits
            micro_token_budget=max(settings.micro_token_budget, settings.max_seq_len),
            seed=settings.seed,
            eval_at_start=judge is not None,
            eval_every_n_steps=-(-len(train) // settings.batch_size) if judge else None,  # once more in the end
        ),
        publisher=SharedWeightsPublisher(server),
        train_logger=TeeLogger(JSONLLogger(settings.run_dir / "metrics.jsonl"), RichLiveLogger(keys=SHOWN)),
        evaluator=judge,
        tokenizer=server.tokenizer,
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"train_musique_search: {mistake}")
