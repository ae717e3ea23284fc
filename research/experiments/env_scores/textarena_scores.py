"""Reference scores of docs/envs/textarena.md: GuessTheNumber, TicTacToe and PigDice: random play and halving."""

import random
from statistics import mean

from ludic_envs.adapters.textarena import TextArenaEnv

for player in ("random", "halving"):
    env, rng, rewards = TextArenaEnv("GuessTheNumber-v0"), random.Random(0), []
    for seed in range(1000):
        env.reset(seed=seed)
        low, high = 1, 20
        while env.active_agents:
            number = (low + high) // 2 if player == "halving" else rng.randint(1, 20)
            told = env.step({"player_0": f"[{number}]"})["player_0"]
            low, high = (number + 1, high) if "higher" in told.obs else (low, number - 1)
        rewards.append(told.reward)
    print("GuessTheNumber-v0", player, f"{mean(rewards):.3f}")

for game in ("TicTacToe-v0", "PigDice-v0"):
    env, rng, rewards = TextArenaEnv(game, num_players=2), random.Random(0), []
    for seed in range(1000):
        env.reset(seed=seed)
        while env.active_agents:
            (mover,) = env.active_agents
            told = env.step({mover: rng.choice(env.legal_actions(mover))})
        rewards.append(told["player_0"].reward)
    print(game, f"{mean(rewards):.3f}", [rewards.count(reward) for reward in (1, 0, -1)])
