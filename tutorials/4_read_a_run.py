# # Reading a run
#
# Metrics say whether a run learns, rollouts what it learned. Here both come from Python.

# %%
import os
import random

import ludic.run
from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome

STEPS = int(os.environ.get("STEPS", "30"))


class Opposite(SingleAgentEnv):
    """Answer a with z and z with a."""

    def env_reset(self, *, seed=None):
        self.letter = random.Random(seed).choice("az")
        return self.letter, {}

    def env_step(self, action):
        is_right = action == {"a": "z", "z": "a"}[self.letter]
        return StepOutcome("", reward=float(is_right), terminated=True)


run = ludic.run.build(
    env=Opposite, model="tiny", name="to_read", max_tokens=1, group_size=16, rollouts_per_update=64, lr=3e-3, logger=()
)
run.train(steps=STEPS)

# %% [markdown]
# First what looks wrong. Here replies are cut by design: each is one token.

# %%
from ludic_view.api import answer
from ludic_view.index import Runs

runs = Runs("runs")
for advisory in answer(runs, "/api/runs/to_read/health")["advisories"]:
    print(f"{advisory['level']}: {advisory['title']}")  # 'advice' says what to do

# %% [markdown]
# The curve. Only groups whose members earned different rewards teach anything.

# %%
for step in answer(runs, "/api/runs/to_read/steps")["steps"][-3:]:
    spread = f"{step['num_zero_spread']} of {step['num_groups']} groups without spread"
    print(f"update {step['step']}: reward {step['reward_mean']:.2f}, {spread}")

# %% [markdown]
# The best rollout, turn by turn.

# %%
(best,) = answer(runs, "/api/runs/to_read/rollouts?sort=-reward&limit=1")["rollouts"]
rollout = answer(runs, f"/api/runs/to_read/rollouts/{best['id']}")
print(f"reward {rollout['reward']}, {len(rollout['turns'])} turns, ended by {rollout['stop']}")
for turn in rollout["turns"]:
    for step in turn["steps"]:
        if step["kind"] == "call":
            print(f"  turn {turn['number']}: the model wrote {step['action']!r}")

# %% [markdown]
# In a terminal: `ludic show runs/to_read --worst`, `ludic plot runs/to_read`. In a browser: [`ludic view`](../viewer.md).
