"""Every preset trains the same tiny model on the same task to a stated reward: speed of learning, entropy kept, cost.

The task is the two-question bandit of the tests: a tiny Llama with random weights answers x with an ASCII character and y with
anything else; chance is about one half. A row is one preset with its defaults, over three seeds of the weights: updates, CPU
seconds per run, the reward over 512 new questions before and after (mean; the lowest seed must reach STATED_REWARD), the
update at which 128 new questions first earn 0.9 (mean; looked at after every second update), and the entropy of the answers that
is left. Answers are worth the same, 128 each, so a policy that is right and keeps all variety has 4.85 nats. Presets with a
teacher get the policy that GRPO trained, SFT the right answers, mix_objectives (GRPO, and 0.1 × SFT) three played samples
to one right answer. A preset that misses its reward, or two minutes, fails the program.

    OMP_NUM_THREADS=1 PYTHONPATH=.:src .venv/bin/python benchmarks/presets.py [NAME ...]
"""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ludic import registry
from ludic.batch_gen import (
    DomainTeachers,
    MixedBatchSource,
    MixedPart,
    PrioritisedCurriculum,
    RolloutBatchSource,
    TeacherAnnotatedBatchSource,
)
from ludic.eval import evaluate
from ludic.inference import ByteTemplate, LocalTeacher, tokenizer_fingerprint
from ludic.inference.local import LocalEngine
from ludic.training import Objective, RLAlgorithm, Trainer, TrainerConfig, make_grpo, make_sft, mix_objectives
from ludic.training.learner.batches import NothingToTrainOn
from ludic.training.losses import (
    CorrectedLoss,
    DivergenceMask,
    Loss,
    NegativeSequenceMask,
    Regularized,
    TokenKLLoss,
)
from ludic.types import BatchSource, SampleOrigin, SAWBatch, SAWItem
from tests.unit.training.bandit import BanditRequests, ByteTokenizer, bandit_trainer, rollout_engine, tiny_llama

STATED_REWARD, MAX_SECONDS = 0.85, 120.0
FAST_REWARD, LOOK_EVERY = 0.9, 2
SEEDS = (0, 1, 2)
BATCH_SIZE, GROUP_SIZE, NUM_NEW_QUESTIONS = 64, 8, 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of one preset's run, if its defaults do not fit groups of 8 from one policy."""

    steps: int = 40
    preset: str | None = None
    """Registered name, if the row has another."""
    make: Callable[[], RLAlgorithm] | None = None
    """Instead of a registered preset."""
    is_grouped: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    """Of `TrainerConfig`."""
    wrap: Callable[[Loss], Loss] = lambda loss: loss
    """Around the preset's loss."""
    choose: Callable[[RLAlgorithm], Any] = lambda algorithm: None
    """A curriculum; None: new questions in every batch."""
    feed: Callable[[RolloutBatchSource, LocalTeacher], BatchSource] = lambda source, teacher: source
    """Between the rollouts and the trainer; the teacher is the policy that GRPO trained."""


# --- batch sources ---


class Vocabulary(ByteTokenizer):
    """The byte tokenizer with the names of its tokens, which the check of teacher against student compares."""

    def get_vocab(self) -> dict[str, int]:
        return {f"<{number}>": number for number in range(264)}


def annotated(source: RolloutBatchSource, teacher: Any) -> BatchSource:
    return TeacherAnnotatedBatchSource(source, teacher, tokenizer_fingerprint=tokenizer_fingerprint(Vocabulary()))


def annotated_by_domain(source: RolloutBatchSource, teacher: LocalTeacher) -> BatchSource:
    return annotated(source, DomainTeachers({"x": teacher, "y": teacher}, domain_of=_question))


def _question(item: SAWItem) -> str:
    return "x" if ord("x") in item.input_ids[~item.action_mask] else "y"


def prioritised(algorithm: Any) -> PrioritisedCurriculum:
    """The questions with SPO's least certain values, one sample each."""
    requests = BanditRequests(2 * BATCH_SIZE)()
    return PrioritisedCurriculum(requests, algorithm.credit_assigner.tracker, batch_size=BATCH_SIZE)


class RightAnswers:
    """Target answers for SFT."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    async def next_batch(self) -> SAWBatch:
        return SAWBatch(items=[self._item() for _ in range(BATCH_SIZE)])

    def _item(self) -> SAWItem:
        question = "xy"[self._rng.integers(2)]
        prompt = ByteTemplate().apply([{"role": "user", "content": question}]).prompt_token_ids.tolist()
        answer = int(self._rng.integers(128)) + (0 if question == "x" else 128)
        return SAWItem([*prompt, answer], None, [0] * len(prompt) + [1], 1.0, origin=SampleOrigin(total_reward=1.0))


def grpo_and_sft() -> RLAlgorithm:
    """The example of docs/algorithms/mixed.md."""
    rl, imitate = make_grpo(group_size=GROUP_SIZE), make_sft(length_normalize=True)
    return mix_objectives(
        {"rl": Objective(algorithm=rl), "sft": Objective(algorithm=imitate, weight=0.1)}, default="rl"
    )


def with_right_answers(source: RolloutBatchSource, teacher: Any) -> BatchSource:
    return MixedBatchSource(
        [
            MixedPart(name="played", source=source, share=3, objective="rl"),
            MixedPart(name="demos", source=RightAnswers(), share=1, objective="sft"),
        ]
    )


class Preferences(RightAnswers):
    """A right and a wrong answer to each question: as pairs, or (KTO) labelled answers, each beside that of another question."""

    def __init__(self, *, labelled: bool = False) -> None:
        super().__init__()
        self._labelled, self._number = labelled, 0

    async def next_batch(self) -> SAWBatch:
        return SAWBatch(items=[item for _ in range(BATCH_SIZE // 2) for item in self._comparison()])

    def _comparison(self) -> list[SAWItem]:
        self._number += 1
        origin = SampleOrigin(comparison=str(self._number))
        answered = [self._item() for _ in range(4 if self._labelled else 1)]
        if not self._labelled:
            return [replace(item, weight=weight, origin=origin) for item, weight in self._both(answered[0])]
        labelled = [self._both(item)[number % 2] for number, item in enumerate(answered)]
        others = [
            self._answered(item, int(other.input_ids[-1]))
            for item, other in zip(answered, answered[1:] + answered[:1], strict=True)
        ]
        weighed = [*labelled, *((item, 0.0) for item in others)]
        return [replace(item, weight=weight, origin=origin) for item, weight in weighed]

    def _both(self, item: SAWItem) -> list[tuple[SAWItem, float]]:
        return [(item, 1.0), (self._answered(item, int(item.input_ids[-1]) ^ 128), -1.0)]

    def _answered(self, item: SAWItem, answer: int) -> SAWItem:
        return replace(item, input_ids=np.append(item.input_ids[:-1], answer))


UNGROUPED = Recipe(is_grouped=False)
RECIPES = {
    "grpo": Recipe(),
    "dr_grpo": Recipe(),
    "maxrl": Recipe(),
    "echo": Recipe(),
    "gdpo": Recipe(),
    "dapo": Recipe(),
    "gspo": Recipe(settings={"clip_eps_low": 0.2, "clip_eps_high": 0.2}),  # of one token; 3e-4 is meant for long ones
    "cispo": Recipe(),
    "sapo": Recipe(),
    "gmpo": Recipe(),
    "gigpo": Recipe(),
    "rloo": Recipe(),
    "scalerl": Recipe(),
    "reinforce": UNGROUPED,
    "reinforce_baseline": UNGROUPED,
    "reinforce_pp": UNGROUPED,
    "ppo": UNGROUPED,
    "spo": Recipe(is_grouped=False, choose=prioritised),
    "sft": Recipe(is_grouped=False, feed=lambda source, teacher: RightAnswers()),
    "rft": UNGROUPED,
    "proposer_solver": Recipe(),
    "fold_grpo": Recipe(),
    "dpo": Recipe(is_grouped=False, feed=lambda source, teacher: Preferences()),
    "ipo": Recipe(is_grouped=False, feed=lambda source, teacher: Preferences()),
    "kto": Recipe(is_grouped=False, feed=lambda source, teacher: Preferences(labelled=True)),
    "opd": Recipe(is_grouped=False, feed=annotated),
    "grpo_opd": Recipe(feed=annotated),
    "mopd": Recipe(feed=annotated_by_domain),
    "mix_objectives": Recipe(make=grpo_and_sft, feed=with_right_answers),
}
FOUR_STEPS = {"updates_per_batch": 2, "mini_batches": 2, "lr": 3e-3}
VARIANTS = {
    "ppo_detached": Recipe(preset="ppo", is_grouped=False, settings={"critic": "detached"}),
    "ppo_separate": Recipe(preset="ppo", is_grouped=False, settings={"critic": "separate", "over": "turns"}),
    "grpo_mini_batches": Recipe(preset="grpo", steps=80, trainer=FOUR_STEPS),
    "grpo_decoupled": Recipe(preset="grpo", steps=80, trainer=FOUR_STEPS, settings={"behavior_cap": 2.0}),
    "ppo_decoupled": Recipe(
        preset="ppo", is_grouped=False, steps=80, trainer=FOUR_STEPS, settings={"behavior_cap": 2.0}
    ),
    "grpo_negative_mask": Recipe(
        preset="grpo", steps=80, trainer=FOUR_STEPS, wrap=lambda loss: CorrectedLoss(loss, [NegativeSequenceMask(0.05)])
    ),
    "dppo": Recipe(
        preset="grpo",
        steps=80,
        trainer=FOUR_STEPS,
        settings={"clip_eps_low": 1e6, "clip_eps_high": 1e6},
        wrap=lambda loss: CorrectedLoss(loss, [DivergenceMask(0.01)]),  # of 264 tokens each is rare
    ),
    "grpo_weighted_kl": Recipe(
        preset="grpo",
        steps=80,
        trainer=FOUR_STEPS,
        wrap=lambda loss: Regularized(loss, {"kl": TokenKLLoss(coeff=0.01, to="reference", importance_weighted=True)}),
    ),
}
"""Presets with other settings than their defaults; only on request."""


# --- one run ---


@dataclass(frozen=True, slots=True)
class Result:
    num_updates: int
    seconds: float
    before: float
    after: float
    fast_at: int | None
    """The update that first earned FAST_REWARD; None if none did."""
    entropy: float
    """Nats, mean over both questions."""


async def run(name: str, teacher: LocalTeacher | None, seed: int) -> tuple[Result, Trainer]:
    trainer, engine = trainer_of(name, teacher, seed)
    before, fast_at, seconds = await reward_of(engine), None, 0.0
    with suppress(NothingToTrainOn):  # all solved, for those that leave out groups without variance
        while trainer.step < (RECIPES | VARIANTS)[name].steps:
            began = time.process_time()
            await trainer.train_step()
            seconds += time.process_time() - began
            if fast_at is None and trainer.step % LOOK_EVERY == 0 and await reward_of(engine, 128) >= FAST_REWARD:
                fast_at = trainer.step
    result = Result(trainer.step, seconds, before, await reward_of(engine), fast_at, entropy_of(trainer.model))
    engine.close()
    return result, trainer


def trainer_of(name: str, teacher: LocalTeacher | None, seed: int) -> tuple[Trainer, LocalEngine]:
    """The trainer of a preset or variant, and the engine on its weights; `teacher` for presets that learn from one."""
    recipe = (RECIPES | VARIANTS)[name]
    if recipe.make is not None:
        algorithm = recipe.make()
    else:
        algorithm = registry.make("algorithm", recipe.preset or name, **_groups(recipe), **recipe.settings)
    algorithm = replace(algorithm, loss=recipe.wrap(algorithm.loss))
    size = GROUP_SIZE if recipe.is_grouped else 1
    return bandit_trainer(
        algorithm,
        group_size=size,
        num_prompts=BATCH_SIZE // size,
        model=tiny_llama(seed),
        curriculum=recipe.choose(algorithm),
        make_source=lambda source: recipe.feed(source, teacher),  # type: ignore[arg-type]
        cfg=TrainerConfig(**{"lr": 1e-2, "max_seq_len": 64, "weight_decay": 0.0, **recipe.trainer}),
        reference=tiny_llama(seed) if algorithm.loss.needs.reference else None,
        critic=tiny_llama(seed + 100) if recipe.settings.get("critic") == "separate" else None,
    )


def _groups(recipe: Recipe) -> dict[str, int]:
    return {"group_size": GROUP_SIZE} if recipe.is_grouped else {}


async def reward_of(engine: LocalEngine, num_questions: int = NUM_NEW_QUESTIONS) -> float:
    requests = BanditRequests(num_questions)()
    report = await evaluate(rollout_engine(engine), requests, concurrency=64)
    return float(report.metrics["mean_total_reward"])


@torch.no_grad()
def entropy_of(model: Any) -> float:
    prompts = [ByteTemplate().apply([{"role": "user", "content": q}]).prompt_token_ids.tolist() for q in "xy"]
    return float(torch.distributions.Categorical(logits=model(torch.tensor(prompts)).logits[:, -1]).entropy().mean())


async def main(names: list[str]) -> None:
    titles = ("updates", "seconds", "before", "after", "lowest", "to 0.9", "entropy")
    print(f"{'preset':20}" + "".join(f"{title:>9}" for title in titles))
    firsts = {seed: await run("grpo", None, seed) for seed in SEEDS}
    teachers = {
        seed: LocalTeacher(LocalEngine(made.model, Vocabulary(), max_model_len=64, kv_tokens=1024))
        for seed, (_, made) in firsts.items()
    }
    failed = []
    for name in names:
        results = [firsts[s][0] if name == "grpo" else (await run(name, teachers[s], s))[0] for s in SEEDS]
        lowest, seconds = min(r.after for r in results), fmean(r.seconds for r in results)
        fast = [r.fast_at for r in results]
        to_fast = "never" if None in fast else f"{fmean(f for f in fast if f is not None):.0f}"
        print(
            f"{name:20}{fmean(r.num_updates for r in results):9.0f}{seconds:9.1f}{fmean(r.before for r in results):9.2f}"
            f"{fmean(r.after for r in results):9.2f}{lowest:9.2f}{to_fast:>9}{fmean(r.entropy for r in results):9.2f}",
            flush=True,
        )
        if lowest < STATED_REWARD or seconds > MAX_SECONDS:
            failed.append(name)
    if failed:
        raise SystemExit(f"Missed the stated reward or the time: {', '.join(failed)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(RECIPES)))
