"""The GRPO loop: sample a group of trajectories per problem, compute group advantages, update.

Before it, what the loop is given: a model that samples and learns, a data loader, a logger.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Protocol, TypeAlias, runtime_checkable

from ludic.batch_gen.external_rollouts import ExternalCall, rollout_of_calls, weighted_batch
from ludic.batch_gen.requests.dataset import EpochOrder
from ludic.batch_gen.requests.samples import read_samples
from ludic.eval.statistics import pass_at_k
from ludic.minimal.generation import Generator, Policy
from ludic.minimal.rl import Example, Reward, RewardModel, Trajectory
from ludic.training.loggers import JSONLLogger, PrintLogger, TeeLogger, TensorBoardLogger
from ludic.types import ConfigError, Rollout, SAWBatch, TrainingLogger, derive_seed

TrainingBatch: TypeAlias = SAWBatch
"""Per item: token ids, the mask of sampled tokens, their log-probs, and one advantage (`weight`)."""
MetricsLogger: TypeAlias = TrainingLogger
"""Anything with `log(step, metrics)`."""

_TRAIN, _EVAL = 0, 1  # separate seed streams
_NO_DIFFERENCE = 1e-4  # advantages below this count as zero, as in the library's presets


@dataclass(frozen=True, slots=True)
class UpdateResult:
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Model(Protocol):
    def policy(self) -> Policy:
        """A policy that samples from the current weights at each call."""
        ...

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        """One optimizer step; when it returns, policies sample from the new weights."""
        ...


@runtime_checkable
class SavesWeights(Protocol):
    async def save(self, folder: Path) -> str:
        """Save the current weights, replacing earlier ones in `folder`; returns their path."""
        ...


def as_rollout(trajectory: Trajectory, reward: Reward, group_id: str) -> Rollout:
    """The trajectory as a library rollout, for stitching, credit rules and `ludic view`."""
    calls = [ExternalCall(step.state.messages, step.action.text, step.completion) for step in trajectory.steps]
    return rollout_of_calls(calls, reward=reward.value, is_finished=trajectory.is_finished, group_id=group_id)


class DataLoader(Protocol):
    def batches(self) -> Iterator[list[Example]]: ...


class HuggingFaceDataLoader:
    """Endless shuffled epochs over a hub dataset (hub:NAME:SPLIT) or a JSON, JSONL or Parquet file."""

    def __init__(
        self,
        place: str | Path,
        *,
        batch_size: int,
        limit: int | None = None,
        keep: Callable[[Example], bool] = bool,
        seed: int = 0,
    ) -> None:
        """Uses the first `limit` examples for which `keep` is true."""
        if batch_size < 1 or (limit is not None and limit < 1):
            raise ConfigError(f"batch_size={batch_size}, limit={limit}: both are at least 1.")
        self.examples: Sequence[Example] = [row for row in read_samples(place) if keep(row)][:limit]
        self.batch_size = batch_size
        self.passes = EpochOrder(len(self.examples), shuffle=True, seed=seed)
        """Position, with `state_dict` and `load_state_dict`."""

    def batches(self) -> Iterator[list[Example]]:
        while True:
            yield [self.examples[self.passes.next_index()] for _ in range(self.batch_size)]


def run_logger(run_dir: Path, *shown: str, tensorboard: bool = True) -> TeeLogger:
    """run_dir/metrics.jsonl, TensorBoard events beside it, and the metrics named in `shown` on the screen."""
    if any(file.stat().st_size for file in run_dir.glob("metrics.jsonl")):  # an empty file is a run without a step
        raise ConfigError(f"There is a run in {run_dir} already. Choose another run_dir.")
    events = [TensorBoardLogger(run_dir)] if tensorboard else []
    return TeeLogger(JSONLLogger(run_dir / "metrics.jsonl"), *events, PrintLogger(prefix=run_dir.name, keys=shown))


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    samples_per_prompt: int = 8
    """Trajectories per problem (the group size); also the k of pass@k."""
    max_steps: int = 100
    eval_on_start: bool = False
    eval_every_steps: int = 10
    """0 is never."""
    save_best_checkpoint: bool = False
    """Keep the weights of the evaluation with the highest accuracy, in run_dir/best."""
    run_dir: Path = Path("runs/minimal")
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
            pairs = [(n, t, r) for n in useful for t, r in zip(groups[n], rewards[n], strict=True)]
            rollouts = [as_rollout(t, r, group_id=f"{self.step}:{n}") for n, t, r in pairs]
            result = await self.model.update(weighted_batch(rollouts, [a for n in useful for a in advantages[n]]))
            metrics |= {**result.metrics, "train/loss": result.loss}
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
        if (
            self.config.save_best_checkpoint
            and metrics["eval/accuracy"] > best
            and isinstance(self.model, SavesWeights)
        ):
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
