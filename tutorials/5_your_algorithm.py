# # Your own algorithm
#
# An algorithm is a credit rule (rollouts to a weight per step) and a loss (log-probs and weights to a number).

# %%
import os
import random

import ludic.run
from ludic.envs import SingleAgentEnv
from ludic.training import RLAlgorithm
from ludic.training.losses import Loss, Needs
from ludic.types import StepOutcome

STEPS = int(os.environ.get("STEPS", "40"))


class AboveTheMean:
    """Weight 1 for every step of a rollout that earned more than the batch's mean, else -0.1."""

    def compute(self, rollouts):
        mean = sum(rollout.total_reward for rollout in rollouts) / len(rollouts)
        return {
            (rollout.id, step.index): 1.0 if rollout.total_reward > mean else -0.1
            for rollout in rollouts
            for step in rollout.steps
        }


# %% [markdown]
# A loss gets a micro-batch and divides by a fact of the whole batch, so splitting changes nothing. Statistics are (sum, count) pairs.


# %%
class WeightedLogLikelihood(Loss):
    """Minus weight times log-prob, every token of the batch counting the same."""

    needs = Needs(old_logps=False)

    def __call__(self, tokens):
        loss = -(tokens.weights * tokens.logps).sum() / tokens.facts.num_tokens
        return loss, {"probability": (tokens.logps.detach().exp().sum(), float(len(tokens.logps)))}


# %%
class Vowel(SingleAgentEnv):
    """Any vowel earns 1."""

    def env_reset(self, *, seed=None):
        return random.Random(seed).choice("xyz"), {}

    def env_step(self, action):
        return StepOutcome("", reward=float(action in list("aeiou")), terminated=True)


algo = RLAlgorithm(name="above_the_mean", credit_assigner=AboveTheMean(), loss=WeightedLogLikelihood())
run = ludic.run.build(
    env=Vowel,
    model="tiny",
    algo=algo,
    name="vowels",
    max_tokens=1,
    group_size=1,
    rollouts_per_update=128,
    lr=3e-3,
    logger=(),
)
result = run.train(steps=STEPS)
print(
    f"after {result.step} updates: reward {result.stats['train/avg_total_reward']:.2f}, "
    f"mean probability of a sampled token {result.stats['train/probability']:.2f}"
)

# %% [markdown]
# In `ludic train`: `--algo file.py:make_mine`, a function that returns the algorithm. What it keeps between batches needs `state_dict()` and `load_state_dict(state)` ([why](../credit.md#state)). More: [algorithms](../algorithms/README.md), [credit](../credit.md).
