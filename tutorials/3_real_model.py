# # GRPO on a real model
#
# SmolLM2-135M comes from a PyPI wheel, so this needs no hub, no GPU and a few minutes.

# %%
import json
import os
import random

import ludic.run
from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome

STEPS = int(os.environ.get("STEPS", "6"))
MODEL = os.environ.get("MODEL", "smollm2-135m")


class ShortSum(SingleAgentEnv):
    """A sum of two digits; the reply must be the number and nothing else."""

    def env_reset(self, *, seed=None):
        dice = random.Random(seed)
        self.a, self.b = dice.randint(1, 4), dice.randint(1, 4)
        return f"What is {self.a} + {self.b}? Reply with the number only.", {}

    def env_step(self, action):
        text = action.strip().rstrip(".")
        is_right = str(self.a + self.b) in text.split()
        is_short = len(text) <= 2
        return StepOutcome("", reward=0.5 * is_right + 0.5 * (is_right and is_short), terminated=True)


# %% [markdown]
# LoRA trains a small adapter over frozen weights. GRPO compares the eight replies to one question.

# %%
run = ludic.run.build(
    env=ShortSum, model=MODEL, lora_rank=16, name="short_sum", algo="grpo", group_size=8, rollouts_per_update=16,
    max_tokens=24, max_steps=1, lr=3e-4, logger=(),
)  # fmt: skip
result = run.train(steps=STEPS)
lines = (run.folder / "metrics.jsonl").read_text().splitlines()
rewards = [json.loads(line)["train/avg_total_reward"] for line in lines]
print("reward by update:", " ".join(f"{reward:.2f}" for reward in rewards))

# %% [markdown]
# `ludic export runs/short_sum my-model` writes a Hugging Face model. A 1.5B model on a GPU: [GSM8K](../../research/results/gsm8k_qwen.md).
