r"""MuSiQue in one file: multi-hop questions, each with its own knowledge base, one search tool (BM25), GRPO over turns.

    python -m rolo.examples.musique_search --model-name Qwen/Qwen3.5-4B --batch-size 4 --samples-per-prompt 2 \
        --max-turns 2 --learning-rate 8e-5 --max-tokens 256 --train-limit 32 --eval-limit 16 --run-dir runs/musique_search
    python -m rolo.examples.musique_search --model-name tiny --data musique.jsonl --max-tokens 16 --train-limit 4

Needs a model with native tool calling and the extras train, search and tensorboard; for --lora-rank also lora, and for the
default data, which is on the hub, datasets.
"""
# ruff: noqa: T201 - a program prints

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ludic.batch_gen.requests.samples import read_samples
from ludic.parsers import xml_tag_parser
from ludic.tools import Tool
from ludic.util.files import parse_json
from ludic_envs.musique_search import MuSiQueSample, exact_match, normalized, token_f1
from ludic_envs.search import DocumentSearch
from rolo import (
    Action,
    Example,
    GRPOConfig,
    GRPOTrainer,
    HuggingFaceDataLoader,
    Message,
    Reward,
    RolloutGenerator,
    State,
    ToolCall,
    Trajectory,
    run_logger,
)  # fmt: skip
from rolo.library import ModelConfig, make_model, run_program

SYSTEM_PROMPT = (
    "You answer a question that takes several steps. Look facts up with the search tool, never twice for the same; then give "
    "the answer in as few words as possible inside <answer></answer>, for example <answer>Marie Curie</answer>."
)
SHOWN = ("train/reward", "train/accuracy", "train/searches", "train/repeated", "eval/accuracy", "perf/step_s")
LOOP_PENALTY = 0.1
"""Subtracted for each repeated search."""
read_answer = xml_tag_parser("answer")


@dataclass(frozen=True, kw_only=True)
class Settings(GRPOConfig, ModelConfig):
    """Settings of the run."""

    model_name: str = "Qwen/Qwen3.5-4B"
    """A folder or a hub id whose chat template shows tools, or tiny (random weights)."""
    backend: Literal["local", "tinker"] = "local"
    """This process, or the Tinker service (TINKER_API_KEY)."""
    lora_rank: int | None = 16
    """Rank of the adapter. In this process 0 trains all weights; use a lower learning rate then, such as 1e-6."""
    data: str = "hub:dgslibisey/MuSiQue:train"
    """Questions in MuSiQue's form: hub:NAME:SPLIT, or a JSON, JSONL or Parquet file."""
    eval_data: str | None = None
    """Evaluation questions; by default those of --data that are not trained on."""
    train_limit: int = 32
    """Questions to train on."""
    eval_limit: int = 16
    """Questions held out; 0 is no evaluation."""
    run_dir: Path = Path("runs/rolo_musique_search")
    """metrics.jsonl, TensorBoard events, the best checkpoint."""
    tensorboard: bool = True
    batch_size: int = 4
    """Questions per step."""
    samples_per_prompt: int = 2
    """Episodes per question; also the k of pass@k."""
    max_steps: int = 0
    """0: each question is trained on once."""
    eval_every_steps: int = 8
    max_turns: int = 2
    """Model calls per episode: searches, and in the last one the answer."""
    max_tokens: int = 256
    max_seq_len: int = 4096
    learning_rate: float = 8e-5


class SearchEnv:
    """A question; a reply with search calls gets their results, any other reply is the answer."""

    def __init__(self, example: Example) -> None:
        sample = MuSiQueSample.read(example)
        self.documents = DocumentSearch([str(paragraph) for paragraph in sample.paragraphs])
        self.tools = (Tool.from_callable(self.search).schema,)
        self.messages: tuple[Message, ...] = (Message("system", SYSTEM_PROMPT), Message("user", sample.question))

    def search(self, query: str) -> str:
        """Search the documents about this question; the three that match best come back.

        Args:
            query: What to look for, in a few words.
        """
        return self.documents(query, k=3)

    def start(self) -> State:
        return State(self.messages, self.tools)

    def step(self, action: Action) -> State | None:
        if not action.tool_calls:
            return None
        self.messages += (action.message, *map(self.answer, action.tool_calls))
        return State(self.messages, self.tools)

    def answer(self, call: ToolCall) -> Message:
        query = query_of(call)
        found = 'Error: the only tool is search, and it takes {"query": text}.' if query is None else self.search(query)
        return Message("tool", found, tool_call_id=call.id, name=call.name)


class SearchEnvBuilder:
    def build(self, example: Example) -> SearchEnv:
        return SearchEnv(example)


class AnswerReward:
    """Mean of exact match and token F1, minus a penalty for repeated searches."""

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        calls = [call for step in trajectory.steps for call in step.action.tool_calls]
        asked = [normalized(query) for call in calls if (query := query_of(call)) is not None]
        repeated = len(asked) - len(set(asked))
        final = trajectory.last_action
        answer = None if final.is_cut_off or final.tool_calls else read_answer(final.text).action
        accepted = MuSiQueSample.read(example).accepted
        exact, f1 = (0.0, 0.0) if answer is None else (exact_match(answer, accepted), token_f1(answer, accepted))
        value = (exact + f1) / 2 - LOOP_PENALTY * repeated
        metrics = {"f1": f1, "answered": float(answer is not None), "searches": len(calls), "repeated": repeated}
        return Reward(value, exact == 1.0, metrics)


def query_of(call: ToolCall) -> str | None:
    """The query of a call; None if it is not a valid search."""
    arguments = parse_json(call.arguments)
    query = arguments.get("query")
    is_proper = call.name == "search" and arguments.keys() == {"query"} and isinstance(query, str)
    return query if is_proper else None


def is_answerable(example: Example) -> bool:
    return bool(example.get("answerable", True))


def main(settings: Settings) -> None:
    size, limit = settings.batch_size, settings.train_limit
    loader = HuggingFaceDataLoader(settings.data, batch_size=size, limit=limit, keep=is_answerable, seed=settings.seed)
    others = list(filter(is_answerable, read_samples(settings.data)))[limit:]
    if settings.eval_data is not None:
        others = list(filter(is_answerable, read_samples(settings.eval_data, "--eval-data")))
    held_out = others[: settings.eval_limit]
    for example in (*loader.examples, *held_out):
        MuSiQueSample.read(example)  # raises for another format before the run starts
    steps = settings.max_steps or -(-len(loader.examples) // size)
    print(f"{len(loader.examples)} questions to train on, {len(held_out)} held out", flush=True)
    logger = run_logger(settings.run_dir, *SHOWN, tensorboard=settings.tensorboard)
    model = make_model(settings.backend, vars(settings))
    try:
        trainer = GRPOTrainer(
            model=model,
            generator=RolloutGenerator(
                env_builder=SearchEnvBuilder(), renderer=model.renderer(), max_turns=settings.max_turns
            ),
            reward_model=AnswerReward(),
            data_loader=loader,
            config=replace(settings, max_steps=steps),
            eval_examples=held_out,
            logger=logger,
        )
        for row in asyncio.run(trainer.train()):
            print(f"step {row['step']:4}: accuracy {row['eval/accuracy']:.1%}, F1 {row['eval/f1']:.1%}")
    finally:
        model.close()
        logger.close()


if __name__ == "__main__":
    run_program(main, Settings, __doc__, "musique_search")
