"""Reference scores of docs/envs/verifiers.md: the example taskset: random numbers and the oracle."""

import asyncio
import random
from statistics import mean

from ludic_envs.adapters.verifiers import VerifiersEnv


async def score(player):
    env, rng, rewards = VerifiersEnv("ludic_envs.adapters.sums_taskset", answer_field="answer"), random.Random(0), []
    for index in range(100):
        env.index = index
        await env.async_reset()
        said = env.reference_action("agent") if player == "oracle" else str(rng.randint(0, 198))
        rewards.append((await env.async_step({"agent": said}))["agent"].reward)
    return mean(rewards)


for player in ("random number", "oracle"):
    print(player, f"{asyncio.run(score(player)):.3f}")
