"""Reference scores of docs/envs/pettingzoo.md: tic-tac-toe and connect four: random and perfect play."""

import random
from collections import Counter

from ludic.envs.tic_tac_toe.board import best_moves
from ludic_envs.adapters.pettingzoo import PettingZooEnv

TTT, FOUR = "classic.tictactoe_v3", "classic.connect_four_v3"
for game, players in [(TTT, "rr"), (TTT, "pr"), (TTT, "rp"), (TTT, "pp"), (FOUR, "rr")]:
    env, rng, results = PettingZooEnv(game), random.Random(0), Counter()
    for seed in range(1000):
        env.reset(seed=seed)
        board = "." * 9
        while env.active_agents:
            (mover,) = env.active_agents
            seat = env.agent_ids.index(mover)
            mark, perfect = "XO"[seat], players[seat] == "p"
            move = rng.choice(best_moves(board, mark)) if perfect else int(rng.choice(env.legal_actions(mover)))
            if game == TTT:
                board = board[:move] + mark + board[move + 1 :]
            told = env.step({mover: str(move)})
        results[told[env.agent_ids[0]].reward] += 1
    print(game, players, {reward: f"{count / 10:.1f} %" for reward, count in sorted(results.items())})
