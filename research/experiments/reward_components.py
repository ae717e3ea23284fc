"""Two rewards of different size: what GRPO and GDPO learn of each, update by update, on one CPU thread.

The task is the two-question bandit of the tests (see presets.py); a scorer adds a second wish, that the answer's token is even,
worth a tenth of the env's reward. Both begin near one half. A row is one preset and seed: shares of right and of even answers.

    OMP_NUM_THREADS=1 PYTHONPATH=.:src .venv/bin/python research/experiments/reward_components.py [SIZE]
"""

import asyncio
import sys

from ludic.rewards import FunctionScorer, Rewards
from ludic.training import RLAlgorithm, make_gdpo, make_grpo
from ludic.types import Rollout
from tests.unit.training.bandit import bandit_trainer, tiny_llama

SHOWN_AT = (5, 10, 20, 30, 40)


async def run(algorithm: RLAlgorithm, size: float, seed: int) -> list[str]:
    def even(rollout: Rollout) -> float:
        return size * (int(rollout.agent_steps[0].trace.completion_token_ids[0]) % 2 == 0)

    trainer, engine = bandit_trainer(
        algorithm, model=tiny_llama(seed), num_prompts=16, rewards=Rewards([FunctionScorer(even)])
    )
    shown = []
    for step in range(1, SHOWN_AT[-1] + 1):
        stats = await trainer.train_step()
        if step in SHOWN_AT:
            shown.append(f"{stats['train/reward/env']:.2f} {stats['train/reward/even'] / size:.2f}")
    engine.close()
    return shown


async def main(size: float) -> None:
    print(f"right and even answers, even ones worth {size:g}".ljust(44), *(f"{step:>9}" for step in SHOWN_AT))
    for seed in range(3):
        for make in (make_grpo, make_gdpo):
            shown = await run(make(group_size=8, reduction="token_mean"), size, seed)
            print(f"{make.__name__.removeprefix('make_')}, seed {seed}".ljust(44), *shown, sep="  ", flush=True)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.1))
