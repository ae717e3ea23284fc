"""The GRPO loop: sample a group of trajectories per problem, compute group advantages, update."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean

from ludic.eval.statistics import pass_at_k
from ludic.training.loggers import TeeLogger
from ludic.types import ConfigError, derive_seed
from rolo.data import DataLoader
from rolo.generation import Generator
from rolo.logging import MetricsLogger
from rolo.model import Model, SavesWeights, TrainingBatch
from rolo.rewards import RewardModel
from rolo.rl import Example, Reward, Trajectory

_TRAIN, _EVAL = 0, 1  # separate seed streams
_NO_DIFFERENCE = 1e-4  # advantages below this count as zero, as in the library's presets


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    samples_per_prompt: int = 8
    """Trajectories per problem (the group size); also the k of pass@k."""
    max_steps: int = 100
    eval_on_start: bool = False
    eval_every_steps: int = 10
    """0 is never."""
    save_best_checkpoint: bool = False
    """Keep the weights of the evaluation with the highest accuracy, in run_dir/best."""
    run_dir: Path = Path("runs/rolo")
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 2 or self.max_steps < 0 or self.eval_every_steps < 0:
            raise ConfigError(f"{self}: a group has at least 2 trajectories, and there are no negative steps.")


def compute_advantages(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each reward minus its group's mean, not divided by the standard deviation; exactly 0 in a group of equal rewards."""
    return [[r - fmean(group) for r in group] if min(group) < max(group) else [0.0] * len(group) for group in rewards]


@dataclass(kw_only=True)
class GRPOTrainer:
    """The loop. It logs means over all trajectories of a step before the update (`train/reward`, `train/accuracy`, the metrics of
    `Reward`), the share of problems left out because their samples all earned the same (`train/groups_without_spread`), what
    `Model.update` returns, and `eval/pass@k`: the share of problems that one of k = `samples_per_prompt` samples solves."""

    model: Model
    generator: Generator
    reward_model: RewardModel
    data_loader: DataLoader
    config: GRPOConfig
    eval_examples: Sequence[Example] = ()
    logger: MetricsLogger = field(default_factory=TeeLogger)  # without loggers it does nothing
    step: int = field(default=0, init=False)
    evaluations: list[dict[str, float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        is_judged = self.eval_examples and 0 < self.config.eval_every_steps <= self.config.max_steps
        if self.config.save_best_checkpoint and not (is_judged and isinstance(self.model, SavesWeights)):
            raise ConfigError(
                "save_best_checkpoint: give eval_examples, eval_every_steps <= max_steps, a model with save()."
            )

    async def train(self) -> list[dict[str, float]]:
        """Run all steps and return the evaluations."""
        every = self.config.eval_every_steps if self.eval_examples else 0
        if self.config.eval_on_start and self.eval_examples:
            await self.evaluate()
        for examples in islice(self.data_loader.batches(), max(0, self.config.max_steps - self.step)):
            await self.train_step(examples)
            if every and self.step % every == 0:
                await self.evaluate()
        return self.evaluations

    async def train_step(self, examples: Sequence[Example]) -> dict[str, float]:
        started = time.perf_counter()
        groups, rewards = await self._run_episodes(examples, derive_seed(self.config.seed, _TRAIN, self.step))
        metrics = {**_means("train", rewards), "perf/generate_s": time.perf_counter() - started}
        advantages = compute_advantages([[reward.value for reward in group] for group in rewards])
        useful = [n for n, group in enumerate(advantages) if max(map(abs, group)) > _NO_DIFFERENCE]
        metrics["train/groups_without_spread"] = 1 - len(useful) / len(groups)
        if useful:
            trajectories = [trajectory for n in useful for trajectory in groups[n]]
            result = await self.model.update(TrainingBatch(trajectories, [a for n in useful for a in advantages[n]]))
            metrics = {**result.metrics, **metrics, "train/loss": result.loss}
        self.step += 1
        metrics["perf/step_s"] = time.perf_counter() - started
        self.logger.log(self.step, metrics)
        return metrics

    async def evaluate(self) -> dict[str, float]:
        """Accuracy and pass@k: the share of problems solved by at least one of k samples."""
        k, best = self.config.samples_per_prompt, max((row["eval/accuracy"] for row in self.evaluations), default=-1.0)
        _, rewards = await self._run_episodes(self.eval_examples, derive_seed(self.config.seed, _EVAL))
        solved = fmean(pass_at_k(k, sum(reward.is_correct for reward in group), k) for group in rewards)
        metrics = {**_means("eval", rewards), f"eval/pass@{k}": solved}
        self.logger.log(self.step, metrics)
        self.evaluations.append({"step": self.step, **metrics})
        is_best = metrics["eval/accuracy"] > best
        if self.config.save_best_checkpoint and is_best and isinstance(self.model, SavesWeights):
            note = {"path": await self.model.save(self.config.run_dir / "best"), **self.evaluations[-1]}
            self.config.run_dir.mkdir(parents=True, exist_ok=True)
            (self.config.run_dir / "best.json").write_text(json.dumps(note))
        return metrics

    async def _run_episodes(
        self, examples: Sequence[Example], seed: int
    ) -> tuple[list[list[Trajectory]], list[list[Reward]]]:
        size, score, policy = self.config.samples_per_prompt, self.reward_model.score, self.model.policy()
        groups = await self.generator.generate(examples, policy=policy, samples_per_prompt=size, seed=seed)
        return groups, [[score(e, t) for t in group] for e, group in zip(examples, groups, strict=True)]


def _means(kind: str, groups: Sequence[Sequence[Reward]]) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group]
    means = {name: fmean(reward.metrics[name] for reward in rewards) for name in rewards[0].metrics}
    means |= {"reward": fmean(r.value for r in rewards), "accuracy": fmean(r.is_correct for r in rewards)}
    return {f"{kind}/{name}": value for name, value in means.items()}
