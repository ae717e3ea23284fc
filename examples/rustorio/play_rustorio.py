"""Rustorio: write Rust until it compiles and wins, in a sandbox.

Shows: RustorioEnv over several turns, with the compiler's words as observations; a scripted player that makes three
mistakes on the way; the reward with and without the clock.
Needs: the package of environments/rustorio (`make` installs it); cargo and rustc (`apt-get install cargo`, or rustup) and
bubblewrap; the game's crate, or the small one that is built in.
Takes: five seconds for the script on two busy CPU cores.

    python examples/rustorio/play_rustorio.py --show
    ludic eval rustorio --set game=rustorio/rustorio --set harness=my_harness --model Qwen/Qwen3.5-4B --num-tasks 1

`ludic train rustorio --set game=…` trains on it.
"""
# ruff: noqa: T201 - a script prints

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from ludic.agents import Agent
from ludic.cli.script import run_script
from ludic.context import FullDialog
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import ConfigError, InferenceSpec, Rollout, SamplingParams, TokenCompletionRequest, save_rollouts
from ludic_rustorio import RustorioEnv

LONG_ENOUGH = InferenceSpec(sampling=SamplingParams(max_tokens=4096))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The game that is played. The script only knows games that bring a solution.rs."""

    game: str = "demo"
    """Folder of the game's crate, or demo."""
    harness: str | None = None
    """Folder with main.rs, player.rs and RULES.md, if not in the crate's own `ludic`."""
    toolchain: str | None = None
    """Folder with bin/cargo and bin/rustc, if not those on the PATH."""
    attempts: int = 5
    """Programs per episode."""
    par_ticks: int | None = None
    """Pay half of the reward for speed: all of it up to so many ticks."""
    show: bool = False
    """Print programs and answers."""
    output: Path | None = None
    """Write the rollout here."""


def main(settings: Settings) -> None:
    rollout = asyncio.run(play(settings))
    if settings.show:
        for step in rollout.env_steps:
            print(f"{step.parsed_action}\n> {step.next_obs or step.info['final_obs']}\n")
    tries = ", ".join(step.info["status"] for step in rollout.env_steps)
    ticks = rollout.env_steps[-1].info["ticks"] if rollout.env_steps else None
    print(f"reward {rollout.total_reward:g}, {rollout.stop}, programs: {tries}, ticks: {ticks}")
    if settings.output is not None:
        save_rollouts([rollout], settings.output)
        print(f"wrote {settings.output}")


async def play(settings: Settings) -> Rollout:
    env = RustorioEnv(
        game=settings.game,
        harness=settings.harness,
        toolchain=settings.toolchain,
        max_attempts=settings.attempts,
        par_ticks=settings.par_ticks,
    )
    client = ScriptedClient(scripted(env))
    agent = Agent(client=client, model="script", ctx=FullDialog(), parser=raw_parser, chat_template=ByteTemplate())
    (rollout,) = await SingleAgentProtocol(agent).run(env=env, max_steps=settings.attempts, inference=LONG_ENOUGH)
    return rollout


def scripted(env: RustorioEnv) -> Callable[[TokenCompletionRequest], str]:
    """Without its first line, with a typo, unfinished, and at last as it should be."""
    template, solution = env.game.template, env.game.solution
    if solution is None:
        raise ConfigError(
            "This game has no solution.rs for the script to write; a model plays it with `ludic eval rustorio`."
        )
    typo = solution.replace("user_main(", "user_main((", 1)
    programs = [template.partition("\n")[2], typo, template, solution]

    def reply(request: TokenCompletionRequest) -> str:
        said = ByteTemplate().decode(request.prompt_token_ids)
        number = min(said.count("<assistant>") - 1, len(programs) - 1)
        return f"```rust\n{programs[number]}```"

    return reply


if __name__ == "__main__":
    run_script(lambda args: main(tyro.cli(Settings, args=args, description=__doc__)))
