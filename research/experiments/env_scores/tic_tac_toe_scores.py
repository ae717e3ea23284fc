"""Reference scores of docs/envs/tic_tac_toe.md: random legal moves and the reference against both opponents."""

import random
from statistics import mean

from ludic.envs.tic_tac_toe import TicTacToeEnv

for opponent in ("random", "minimax"):
    for starts in (True, False):
        for player in ("random legal", "reference"):
            env, rng, ends = TicTacToeEnv(agent_starts=starts, opponent=opponent), random.Random(0), []
            for seed in range(1000):
                env.reset(seed=seed)
                while env.active_agents:
                    best = env.reference_action("agent_0")
                    move = best if player == "reference" else rng.choice(env.legal_actions("agent_0"))
                    outcome = env.step({"agent_0": move})["agent_0"]
                ends.append(outcome)
            shares = [mean(end.info["result"] == result for end in ends) for result in ("win", "draw", "loss")]
            print(opponent, "X" if starts else "O", player, f"{mean(end.reward for end in ends):.3f}", shares)
