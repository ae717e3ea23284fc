"""Reference scores of docs/envs/picture_grid.md: random, constant and reference answers."""

import random
from statistics import mean

from ludic_envs.picture_grid import PictureGridEnv

env, rng = PictureGridEnv(), random.Random(0)
players = {
    "random legal": lambda: rng.choice(env.legal_actions("agent_0")),
    "always 5": lambda: "5",
    "reference": lambda: env.reference_action("agent_0"),
}
for name, choose in players.items():
    rewards = []
    for seed in range(1000):
        env.reset(seed=seed)
        rewards.append(env.step({"agent_0": choose()})["agent_0"].reward)
    print(name, f"{mean(rewards):.3f}")
