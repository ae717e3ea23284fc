"""Reference scores of docs/envs/game_boy.md: the demo cartridge: random buttons, random directions, the written route."""

import random
from statistics import mean

from ludic_game_boy import GameBoyEnv

env = GameBoyEnv("demo", max_presses=200, hold_frames=2, settle_frames=2)
for player in ("random button", "random direction", "route"):
    rewards, presses = [], []
    for seed in range(100 if player != "route" else 1):
        rng, total = random.Random(seed), 0.0
        env.reset(seed=seed)
        while env.active_agents:
            buttons = ["up", "down", "left", "right"] + ["a", "b", "start", "select"] * (player == "random button")
            press = env.reference_action("agent_0") if player == "route" else rng.choice(buttons)
            outcome = env.step({"agent_0": press})["agent_0"]
            total += outcome.reward
        rewards.append(total)
        presses.append(200 - outcome.info["presses_left"])
    print(player, f"{mean(rewards):.3f}, {mean(presses):.1f} presses")
