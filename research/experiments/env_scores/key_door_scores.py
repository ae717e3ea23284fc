"""Reference scores of docs/envs/key_door.md: random legal moves and the reference."""

import random
from statistics import mean

from ludic.envs.key_door import KeyDoorEnv

for player in ("random legal", "reference"):
    env, rng, rewards, moves = KeyDoorEnv(), random.Random(0), [], []
    for seed in range(1000):
        env.reset(seed=seed)
        while env.active_agents:
            move = (
                env.reference_action("agent_0") if player == "reference" else rng.choice(env.legal_actions("agent_0"))
            )
            outcome = env.step({"agent_0": move})["agent_0"]
        rewards.append(outcome.reward)
        moves.append(env.max_moves - outcome.info["moves_left"])
    print(player, f"{mean(rewards):.3f}", f"{mean(moves):.1f} moves, at most {max(moves)}")
