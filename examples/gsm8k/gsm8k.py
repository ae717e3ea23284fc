r"""GSM8K in one file: a one-shot prompt, boxed answers, math-verify, GRPO; accuracy and pass@8 on held-out questions.

Shows: the whole loop on the library's parts, without a shared module; pass@k while training, the best checkpoint kept.
Needs: a model; the questions from --data and --eval-data, or from the hub through `datasets` (the extra datasets).
Takes: an estimated hour or more per step of 512 answers with smollm2-135m on two CPU cores; take fewer there, or use a GPU.

    python examples/gsm8k/gsm8k.py --model-name meta-llama/Llama-3.2-1B-Instruct --batch-size 64 --samples-per-prompt 8 \
        --max-steps 100 --eval-on-start --eval-every-steps 10 --eval-limit 100 --run-dir runs/gsm8k --save-best-checkpoint
    python examples/gsm8k/gsm8k.py --data gsm8k_train.jsonl --eval-data gsm8k_test.jsonl --batch-size 4 --max-steps 2
"""
# ruff: noqa: T201 - a script prints

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ludic.agents import Agent
from ludic.batch_gen import RolloutBatchSource, RolloutEngine, make_dataset_sequence_requests_fn
from ludic.batch_gen.requests.samples import read_samples
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.eval import EngineEvaluator, Grading
from ludic.inference import HFChatTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.models.loading import load_model
from ludic.parsers import boxed_parser
from ludic.training import (
    CheckpointConfig,
    JSONLLogger,
    RichLiveLogger,
    TeeLogger,
    Trainer,
    TrainerConfig,
    make_grpo,
)
from ludic.types import (
    ConfigError,
    EnvSpec,
    InferenceSpec,
    Info,
    LudicError,
    Observation,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
)

Sample = dict[str, Any]
SOLVER = ProtocolSpec("solver", {})
EXAMPLE_QUESTION = "A baker fills 6 trays with 12 rolls each and sells 50 of the rolls. How many rolls are left?"
EXAMPLE_ANSWER = "There are 6 * 12 = 72 rolls. After selling 50, 72 - 50 = 22 are left. The answer is \\boxed{22}."
SHOWN = ("avg_total_reward", "parse_error_rate", "completion_truncated_rate", "grad_norm", "step_s", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who is trained on what, and how."""

    model_name: str = "smollm2-135m"
    """A folder, a hub id, or smollm2-135m; it needs a chat template."""
    data: Path | None = None
    """A JSONL file of questions to train on; without it the training split from the hub."""
    eval_data: Path | None = None
    """A JSONL file of other questions; without it the test split from the hub, or with --data no evaluation."""
    run_dir: Path = Path("runs/gsm8k")
    """metrics.jsonl, the best checkpoint, and in the end the model."""
    seed: int = 0

    batch_size: int = 64
    """Questions per step."""
    samples_per_prompt: int = 8
    """Answers per question, which are compared with each other; also the k of pass@k."""
    max_steps: int = 100
    max_tokens: int = 512
    """Of one answer; one that is cut off is wrong."""
    temperature: float = 1.0
    learning_rate: float = 1e-5
    max_seq_len: int = 1024
    """Prompt and answer."""
    micro_token_budget: int = 8192
    """Tokens in one forward pass; the gradient does not depend on it."""

    eval_on_start: bool = False
    eval_every_steps: int = 10
    """Steps between evaluations; 0 is never."""
    eval_limit: int = 100
    """Questions per evaluation."""
    save_best_checkpoint: bool = False
    """Keep the weights of the evaluation with the highest accuracy."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)


def main(settings: Settings) -> None:
    check(settings)
    train = load_questions(settings.data, "train")
    is_evaluated = settings.data is None or settings.eval_data is not None
    held_out = load_questions(settings.eval_data, "test")[: settings.eval_limit] if is_evaluated else []
    print(f"{len(train)} questions to train on, {len(held_out)} held out", flush=True)
    loaded = load_model(settings.model_name)
    server = LocalEngine(loaded.model, loaded.tokenizer, seed=settings.seed)
    try:
        trainer = make_trainer(settings, loaded.model, server, train, held_out)
        trainer.train_sync(settings.max_steps)
    finally:
        server.close()
    loaded.model.save_pretrained(settings.run_dir / "model")
    loaded.tokenizer.save_pretrained(settings.run_dir / "model")
    print_results(settings)


def check(settings: Settings) -> None:
    if settings.batch_size < 1 or settings.samples_per_prompt < 2:
        raise ConfigError(
            f"--batch-size {settings.batch_size} --samples-per-prompt {settings.samples_per_prompt}: a step needs a question, "
            "and GRPO two answers to compare."
        )
    if (settings.run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {settings.run_dir} already. Choose another --run-dir.")
    is_evaluated = 0 < settings.eval_every_steps <= settings.max_steps
    if settings.save_best_checkpoint and not (
        is_evaluated and (settings.data is None or settings.eval_data is not None)
    ):
        raise ConfigError(
            "--save-best-checkpoint needs evaluations: give --eval-data, and --eval-every-steps from 1 to --max-steps."
        )


# --- the questions ---------------------------------------------------------------------------------------------


def load_questions(path: Path | None, split: str) -> list[Sample]:
    """Records of {"question": …, "answer": "… #### 42"} from a JSONL file, or without one from the hub."""
    rows = read_samples(f"hub:openai/gsm8k:main:{split}" if path is None else path)
    if not all({"question", "answer"} <= row.keys() for row in rows):
        raise ConfigError(f'{path} is not lines of {{"question": …, "answer": "… #### 42"}}.')
    return [{"id": f"{split}:{number}", **row} for number, row in enumerate(rows)]


# --- who answers them ------------------------------------------------------------------------------------------


class OneShot(FullDialog):
    """Every conversation begins with a worked problem, so that a model sees the format before it must use it."""

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        super().on_env_reset(EXAMPLE_QUESTION, {})
        self.add_assistant_step(EXAMPLE_ANSWER)
        super().on_env_reset(obs, info)


def rollout_engine(settings: Settings, server: LocalEngine) -> RolloutEngine:
    template = HFChatTemplate(server.tokenizer)

    def solver() -> SingleAgentProtocol:
        agent = Agent(
            client=server, model=settings.model_name, ctx=OneShot(), parser=boxed_parser, chat_template=template
        )
        return SingleAgentProtocol(agent)

    return RolloutEngine(protocol_registry={SOLVER.kind: solver}, seed=settings.seed)


# --- the training ----------------------------------------------------------------------------------------------


def make_trainer(
    settings: Settings, model: Any, server: LocalEngine, train: list[Sample], held_out: list[Sample]
) -> Trainer:
    algo = make_grpo(group_size=settings.samples_per_prompt, reduction="token_mean")
    answers = RolloutBatchSource(
        rollout_engine(settings, server),
        requests_fn=make_dataset_sequence_requests_fn(
            train,
            batch_size=settings.batch_size,
            group_size=settings.samples_per_prompt,
            env_kind="gsm8k",
            protocol_kind=SOLVER.kind,
            inference=InferenceSpec(sampling=settings.sampling, return_=ReturnSpec.for_rl()),
            shuffle=True,
            rng_seed=settings.seed,
        ),
        algorithm=algo,
        max_steps=1,
        concurrency=256,
    )
    every = settings.eval_every_steps if held_out else 0
    best = CheckpointConfig(
        settings.run_dir / "checkpoints", every_n_steps=every, max_to_keep=1, best_metric="eval/accuracy"
    )
    return Trainer(
        model=model,
        algo=algo,
        batch_source=answers,
        cfg=TrainerConfig(
            lr=settings.learning_rate,
            max_seq_len=settings.max_seq_len,
            too_long="drop",  # a question that leaves no room for its answer
            micro_token_budget=settings.micro_token_budget,
            seed=settings.seed,
            eval_at_start=settings.eval_on_start and bool(held_out),
            eval_every_n_steps=every or None,
            eval_concurrency=256,
        ),
        publisher=SharedWeightsPublisher(server),
        checkpoint_config=best if settings.save_best_checkpoint else None,
        train_logger=TeeLogger(JSONLLogger(settings.run_dir / "metrics.jsonl"), RichLiveLogger(keys=SHOWN)),
        evaluator=make_evaluator(settings, server, held_out) if held_out else None,
        tokenizer=server.tokenizer,
    )


def make_evaluator(settings: Settings, server: LocalEngine, held_out: list[Sample]) -> EngineEvaluator:
    """Asks every question as often as training does: accuracy is the mean of its answers, pass@k whether one is right."""
    k = settings.samples_per_prompt
    requests = [
        RolloutRequest(
            env=EnvSpec("gsm8k", {"sample": sample}),
            protocol=SOLVER,
            env_seed=index,
            sampling_seed=index,
            num_episodes=k,
            inference=InferenceSpec(sampling=settings.sampling),
        )
        for index, sample in enumerate(held_out)
    ]
    return EngineEvaluator(rollout_engine(settings, server), lambda: requests, grading=Grading(pass_k=(k,)))


def print_results(settings: Settings) -> None:
    rows = [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()]
    pass_k = f"pass@{settings.samples_per_prompt}"
    evaluations = [row for row in rows if "eval/accuracy" in row]
    if evaluations:
        print(f"step  accuracy  {pass_k}")
    for row in evaluations:
        print(f"{row['step']:4}  {row['eval/accuracy']:8.1%}  {row[f'eval/{pass_k}']:6.1%}")
    best = settings.run_dir / "checkpoints" / "best.json"
    if settings.save_best_checkpoint and best.exists():  # a run that was stopped early may not have got there
        print(f"The best checkpoint is {best.parent / json.loads(best.read_text())['path']}")
    print(f"The model is in {settings.run_dir / 'model'}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"gsm8k: {mistake}")
