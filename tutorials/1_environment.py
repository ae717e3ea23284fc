# # An environment in twenty lines
#
# An environment shows a text, reads a reply and pays a reward.

# %%
import random

from ludic.envs import SingleAgentEnv, check_env
from ludic.types import StepOutcome


class Opposite(SingleAgentEnv):
    """Answer a with z and z with a."""

    def env_reset(self, *, seed=None):
        self.letter = random.Random(seed).choice("az")  # every random number comes from the seed
        return self.letter, {}

    def env_step(self, action):
        is_right = action == {"a": "z", "z": "a"}[self.letter]
        return StepOutcome("", reward=float(is_right), terminated=True)


# %% [markdown]
# `check_env` tests the contract: the same seed gives the same episode, any text gets an outcome.

# %%
import asyncio

asyncio.run(check_env(Opposite))

# %% [markdown]
# `tiny` is a small Llama with random weights and one token per character.

# %%
import os

import ludic.run

STEPS = int(os.environ.get("STEPS", "40"))
run = ludic.run.build(
    env=Opposite, model="tiny", name="opposite", max_tokens=1, group_size=16, rollouts_per_update=64, lr=3e-3, logger=()
)
result = run.train(steps=STEPS)
print(f"after {result.step} updates: reward {result.stats['train/avg_total_reward']:.2f}")

# %% [markdown]
# `evaluate` plays new episodes.

# %%
print(f"evaluation: {run.evaluate().metrics['mean_reward']:.2f}")

# %% [markdown]
# In a terminal: `ludic train opposite.py:Opposite --model tiny --max-tokens 1 --group-size 16 --lr 3e-3 --steps 40`. Next: [make it a package](../envs/your_package.md).
