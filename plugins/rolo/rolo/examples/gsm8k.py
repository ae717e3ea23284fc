r"""GSM8K in one file: a one-shot prompt, boxed answers, semantic grading with math-verify, GRPO.

    python -m rolo.examples.gsm8k --model-name smollm2-135m --batch-size 64 --samples-per-prompt 8 --max-steps 100 \
        --eval-on-start --eval-every-steps 10 --eval-limit 100 --run-dir runs/gsm8k --save-best-checkpoint
    python -m rolo.examples.gsm8k --model-name tiny --data train.jsonl --eval-data test.jsonl --batch-size 4 --max-steps 2

Needs the extras train, math and tensorboard, and for the default data, which is on the hub, datasets.
"""
# ruff: noqa: T201 - a program prints

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ludic.batch_gen.requests.samples import read_samples
from ludic.envs.gsm8k import SYSTEM_PROMPT
from ludic.envs.gsm8k import GSM8KEnv as LibraryEnv
from ludic.envs.math_grading import is_equivalent
from ludic.parsers import boxed_parser
from ludic.types import ConfigError
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
    Trajectory,
    run_logger,
)  # fmt: skip
from rolo.library import ModelConfig, make_model, run_program

WORKED_PROBLEM = (
    Message("user", "A baker fills 6 trays with 12 rolls each and sells 50 of the rolls. How many rolls are left?"),
    Message(
        "assistant", r"There are 6 * 12 = 72 rolls. After selling 50, 72 - 50 = 22 are left. The answer is \boxed{22}."
    ),
)
SHOWN = ("train/reward", "train/accuracy", "train/boxed", "train/groups_without_spread", "eval/accuracy", "perf/step_s")


@dataclass(frozen=True, kw_only=True)
class Settings(GRPOConfig, ModelConfig):
    """Settings of the run."""

    model_name: str = "smollm2-135m"
    backend: Literal["local", "tinker"] = "local"
    """This process, or the Tinker service (TINKER_API_KEY)."""
    data: str = "hub:openai/gsm8k:main:train"
    """Training data: hub:NAME:SPLIT, or a JSON, JSONL or Parquet file with `question` and `answer` (… #### 42)."""
    eval_data: str = "hub:openai/gsm8k:main:test"
    eval_limit: int = 100
    """Problems per evaluation; 0 is no evaluation."""
    run_dir: Path = Path("runs/rolo_gsm8k")
    """metrics.jsonl, TensorBoard events, the best checkpoint."""
    tensorboard: bool = True
    batch_size: int = 64
    """Problems per step."""
    format_reward: float = 0.1
    """Reward of a wrong boxed answer, so that groups of a model that rarely boxes differ. Accuracy ignores it."""


class GSM8KEnv:
    """One question and one answer; the prompt starts with a worked problem that shows the format."""

    def __init__(self, example: Example) -> None:
        self.question = str(example["question"])

    def start(self) -> State:
        return State((Message("system", SYSTEM_PROMPT), *WORKED_PROBLEM, Message("user", self.question)))

    def step(self, action: Action) -> None:
        return None


class GSM8KEnvBuilder:
    def build(self, example: Example) -> GSM8KEnv:
        return GSM8KEnv(example)


@dataclass(frozen=True)
class GSM8KReward:
    """1 for a boxed answer that means the same as the target, `for_format` for any other boxed answer, else 0."""

    for_format: float = 0.1

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        action = trajectory.last_action
        answer = None if action.is_cut_off else boxed_parser(action.text).action
        is_right = answer is not None and is_equivalent(answer, LibraryEnv(example).target)
        value = 1.0 if is_right else self.for_format * (answer is not None)
        return Reward(value, is_right, {"boxed": float(answer is not None), "cut_off": float(action.is_cut_off)})


def main(settings: Settings) -> None:
    limit = settings.eval_limit
    held_out = checked(read_samples(settings.eval_data, "--eval-data")[:limit]) if limit else []
    loader = HuggingFaceDataLoader(settings.data, batch_size=settings.batch_size, seed=settings.seed)
    checked(loader.examples)
    print(f"{len(loader.examples)} problems to train on, {len(held_out)} held out", flush=True)
    logger = run_logger(settings.run_dir, *SHOWN, tensorboard=settings.tensorboard)
    model = make_model(settings.backend, vars(settings))
    try:
        trainer = GRPOTrainer(
            model=model,
            generator=RolloutGenerator(env_builder=GSM8KEnvBuilder(), renderer=model.renderer()),
            reward_model=GSM8KReward(settings.format_reward),
            data_loader=loader,
            config=settings,
            eval_examples=held_out,
            logger=logger,
        )
        print_table(asyncio.run(trainer.train()), settings.samples_per_prompt)
    finally:
        model.close()
        logger.close()


def checked(examples: Sequence[Example]) -> Sequence[Example]:
    """Raise ConfigError for an example in another format, before the run starts."""
    for number, example in enumerate(examples):
        try:
            LibraryEnv(example)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"Problem {number} is not of GSM8K's form: {error}") from error
    return examples


def print_table(evaluations: list[dict[str, float]], k: int) -> None:
    if evaluations:
        print(f"| Step | Eval accuracy | Pass@{k} |\n|---|---|---|")
    for row in evaluations:
        print(f"| {row['step']} | {row['eval/accuracy']:.1%} | {row[f'eval/pass@{k}']:.0%} |")


if __name__ == "__main__":
    run_program(main, Settings, __doc__, "gsm8k")
