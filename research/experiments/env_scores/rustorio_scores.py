"""Reference scores of docs/envs/rustorio.md: three programs for the demo game."""

import asyncio

from ludic_rustorio import RustorioEnv


async def main():
    env = RustorioEnv(par_ticks=26)
    one = env.game.template.replace(
        'todo!("Return the tick and 6 ingots.")',
        """
        let mut smelter = Smelter::build(&tick, ore);
        let six = mine.mine(&mut tick, 6);
        smelter.load(&tick, six);
        tick.advance(30);
        let won = smelter.unload(&tick).take().unwrap();
        (tick, won)""",
    )
    for program in (env.game.template, one, env.game.solution):
        await env.async_reset(seed=0)
        outcome = (await env.async_step({"agent_0": program}))["agent_0"]
        print(outcome.info["status"], outcome.info["ticks"], f"{outcome.reward:.2f}")


asyncio.run(main())
