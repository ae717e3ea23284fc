"""Batches that close before their slowest episodes: what `Stragglers` saves, and what it costs in reward.

A tiny Llama learns to write lines of which half are letters (letter_lines.py), 8 groups of 4 per batch. Grading a line takes as
long as its group's seed says: log-normal with a median of 0.1 s, up to 3 s, as tests and tools do. "never" waits for all of a
batch. Every row trains with GRPO on as many batches, and drops nothing; the waits are the same. A batch that closes early is
smaller.

    OMP_NUM_THREADS=1 PYTHONPATH=.:src python research/experiments/stragglers.py [--seeds 0 1] [--batches 30]
"""

import argparse
import asyncio
import copy
import random
import time
from statistics import fmean
from typing import Any

import torch
from letter_lines import LetterLine, engine_of, lines, tiny_model
from stale_data import LaggingPublisher, preset

from ludic.batch_gen import Stragglers
from ludic.training import Trainer, TrainerConfig
from ludic.types import Info, StepOutcome, derive_seed

GROUP_SIZE, NUM_GROUPS = 4, 8
MEDIAN_S, SPREAD, MOST_S = 0.1, 1.3, 3.0
CLOSE_AT = (None, 0.875, 0.75, 0.5)
"""All, 7, 6 and 4 of the groups."""


class SlowlyGraded(LetterLine):
    """The wait depends on the seed, so it is that of a whole group: some tasks are slow."""

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        chance = random.Random(derive_seed(seed or 0, 7))
        self._wait_s = min(MOST_S, MEDIAN_S * chance.lognormvariate(0, SPREAD))
        return super().env_reset(seed=seed)

    async def async_env_step(self, action: str) -> StepOutcome:
        await asyncio.sleep(self._wait_s)
        return self.env_step(action)


async def run(close_at: float | None, seed: int, num_batches: int) -> dict[str, float]:
    model = tiny_model(seed)
    engine = engine_of(copy.deepcopy(model))
    algorithm = preset("grpo", group_size=GROUP_SIZE)
    publisher = LaggingPublisher(engine, lag=0, noise=0.0, seed=seed)
    publisher.publish(model.state_dict(), 0)
    source = lines(
        engine,
        algorithm,
        seed=seed,
        num_prompts=NUM_GROUPS,
        group_size=GROUP_SIZE,
        env=SlowlyGraded,
        stragglers=None if close_at is None else Stragglers(close_at=close_at, max_carries=2),
    )
    trainer = Trainer(
        model=model,
        algo=algorithm,
        batch_source=source,
        cfg=TrainerConfig(max_seq_len=64, weight_decay=0.0, seed=seed, lr=1e-2),
        publisher=publisher,
    )
    began = time.perf_counter()
    history = [await trainer.train_step() for _ in range(num_batches)]
    seconds = time.perf_counter() - began
    await source.close()
    engine.close()
    late = history[-max(1, num_batches // 5) :]
    return {
        "seconds": seconds,
        "s/episode": seconds / sum(stats["train/num_rollouts"] for stats in history),
        "fetch_s": fmean(stats["perf/fetch_s"] for stats in history),
        "carried": fmean(stats.get("train/num_carried", 0.0) for stats in history),
        "lag_mean": fmean(stats["train/lag_mean"] for stats in history),
        "episodes": fmean(stats["train/num_rollouts"] for stats in history),
        "late_reward": fmean(stats["train/avg_total_reward"] for stats in late),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--batches", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names: list[str] = []
    for close_at in CLOSE_AT:
        results: list[dict[str, Any]] = [asyncio.run(run(close_at, seed, args.batches)) for seed in args.seeds]
        if not names:
            names = list(results[0])
            print(f"{'close_at':>10}" + "".join(f"{name:>13}" for name in names) + "  late reward of each seed")
        each = " ".join(f"{result['late_reward']:.2f}" for result in results)
        means = "".join(f"{fmean(result[name] for result in results):13.3f}" for name in names)
        print(f"{'never' if close_at is None else close_at:>10}{means}  {each}", flush=True)


if __name__ == "__main__":
    main()
