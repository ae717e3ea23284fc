"""Reference scores of docs/envs/twenty_forty_eight.md: random legal moves and a corner rule."""

import random
from collections import Counter
from statistics import mean

from ludic_envs.twenty_forty_eight import TwentyFortyEightEnv

for player in ("random legal", "corner"):
    env, rng, returns, moves, tiles = TwentyFortyEightEnv(), random.Random(0), [], [], Counter()
    for seed in range(1000):
        env.reset(seed=seed)
        total = 0.0
        while env.active_agents:
            legal = env.legal_actions("agent_0")
            corner = next(move for move in ("left", "down", "right", "up") if move in legal)
            outcome = env.step({"agent_0": corner if player == "corner" else rng.choice(legal)})["agent_0"]
            total += outcome.reward
        returns.append(total)
        moves.append(env.max_moves - outcome.info["moves_left"])
        tiles[outcome.info["max_tile"]] += 1
    print(player, f"return {mean(returns):.3f}, {mean(moves):.0f} moves, best tiles {sorted(tiles.items())}")
