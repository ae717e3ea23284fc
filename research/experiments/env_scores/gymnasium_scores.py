"""Reference scores of docs/envs/gymnasium.md: FrozenLake and Taxi: random and optimal play."""

import random
from statistics import mean

from ludic_envs.adapters.gymnasium import AGENT, GymnasiumEnv


def best_moves(table, gamma=0.9999):
    def worth(state, action):
        return sum(p * (r + gamma * value[then] * (not end)) for p, then, r, end in table[state][action])

    value = dict.fromkeys(table, 0.0)
    for _ in range(2000):
        value = {state: max(worth(state, action) for action in table[state]) for state in table}
    return {state: max(table[state], key=lambda action: worth(state, action)) for state in table}


for env_id in ("FrozenLake-v1", "Taxi-v4"):
    env, rng = GymnasiumEnv(env_id), random.Random(0)
    best = best_moves(env._live.unwrapped.P)
    for player in ("random legal", "optimal"):
        totals = []
        for seed in range(1000):
            env.reset(seed=seed)
            total = 0.0
            while env.active_agents:
                move = rng.choice(env.legal_actions(AGENT)) if player == "random legal" else str(best[int(env._seen)])
                total += env.step({AGENT: move})[AGENT].reward
            totals.append(total)
        print(env_id, player, f"{mean(totals):.3f}")
