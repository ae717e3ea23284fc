"""Reference scores of docs/envs/openenv.md: tic-tac-toe in process and behind an OpenEnv server."""

import asyncio
import random
from statistics import mean

from ludic.envs.adapters.openenv import OpenEnvEnv
from ludic.envs.adapters.openenv.server import LocalServer
from ludic.envs.tic_tac_toe import TicTacToeEnv


async def score(env):
    rng, totals = random.Random(0), []
    for seed in range(200):
        await env.async_reset(seed=seed)
        total = 0.0
        while env.active_agents:
            total += (await env.async_step({"agent_0": rng.choice(env.legal_actions("agent_0"))}))["agent_0"].reward
        totals.append(total)
    await env.async_close()
    return mean(totals)


async def main():
    server = await LocalServer.start("tic_tac_toe")
    print("in process", f"{await score(TicTacToeEnv()):.3f}")
    print("OpenEnv", f"{await score(OpenEnvEnv(server.url)):.3f}")
    await server.stop()


asyncio.run(main())
