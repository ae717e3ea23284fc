"""Reference scores of docs/envs/prisoners_dilemma.md: random, tit for tat and always defect against each other."""

import random
from statistics import mean

from ludic_envs.prisoners_dilemma import PrisonersDilemmaEnv

rng = random.Random(0)
PLAYERS = {
    "random": lambda env, me: rng.choice(env.legal_actions(me)),
    "tit for tat": lambda env, me: env.reference_action(me),
    "always defect": lambda env, me: "defect",
}
for left, right in [(a, b) for i, a in enumerate(PLAYERS) for b in list(PLAYERS)[i:]]:
    env, scores = PrisonersDilemmaEnv(), []
    for seed in range(1000):
        env.reset(seed=seed)
        while env.active_agents:
            actions = {"player_0": PLAYERS[left](env, "player_0"), "player_1": PLAYERS[right](env, "player_1")}
            outcome = env.step(actions)["player_0"]
        scores.append((outcome.info["score"], outcome.info["opponent_score"]))
    print(left, "-", right, *(f"{mean(column):.2f}" for column in zip(*scores, strict=True)))
