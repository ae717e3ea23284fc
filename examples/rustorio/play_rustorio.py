"""Rustorio: write Rust until it compiles and wins, in a sandbox.

Shows: RustorioEnv over several turns, with the compiler's words as observations; a scripted player that makes three
mistakes on the way, or a model; the reward with and without the clock.
Needs: the package of environments/rustorio (`make` installs it); cargo and rustc (`apt-get install cargo`, or rustup) and
bubblewrap; the game's crate, or the small one that is
built in.
Takes: five seconds for the script on two busy CPU cores.

    python examples/rustorio/play_rustorio.py --show
    python examples/rustorio/play_rustorio.py --game rustorio/rustorio --harness my_harness --player model \\
        --model Qwen/Qwen3.5-4B --par-ticks 200 --output runs/rustorio.jsonl

`ludic train rustorio --set game=…` trains on it.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine
from ludic.context import FullDialog
from ludic.inference import ByteTemplate, ChatTemplate, HFChatTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import (
    ChatClient,
    ConfigError,
    EnvSpec,
    InferenceSpec,
    LudicError,
    ProtocolSpec,
    Rollout,
    RolloutRequest,
    SamplingParams,
    TokenCompletionRequest,
    save_rollouts,
)
from ludic_rustorio import RustorioEnv


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is played, and by whom."""

    game: str = "demo"
    """Folder of the game's crate, or demo."""
    harness: Path | None = None
    """Folder with main.rs, player.rs and RULES.md, if not in the crate's own `ludic`."""
    toolchain: Path | None = None
    """Folder with bin/cargo and bin/rustc, if not those on the PATH."""
    player: Literal["script", "model"] = "script"
    """The script only knows games that bring a solution.rs."""
    model: str = "smollm2-135m"
    """For --player model: a folder or a hub id."""
    episodes: int = 1
    attempts: int = 5
    """Programs per episode."""
    par_ticks: int | None = None
    """Pay half of the reward for speed: all of it up to so many ticks."""
    max_tokens: int = 4096
    """Of one reply."""
    seed: int = 0
    show: bool = False
    """Print programs and answers."""
    output: Path | None = None
    """Write the rollouts here."""


def main(settings: Settings) -> None:
    rollouts = asyncio.run(play(settings))
    for rollout in rollouts:
        if settings.show:
            for step in rollout.env_steps:
                print(f"{step.parsed_action}\n> {step.next_obs or step.info['final_obs']}\n")
        tries = ", ".join(step.info["status"] for step in rollout.env_steps)
        ticks = rollout.env_steps[-1].info["ticks"] if rollout.env_steps else None
        print(f"reward {rollout.total_reward:g}, {rollout.stop}, programs: {tries}, ticks: {ticks}")
    if settings.output is not None:
        save_rollouts(rollouts, settings.output)
        print(f"wrote {settings.output}")


async def play(settings: Settings) -> list[Rollout]:
    arguments: dict[str, Any] = {
        "game": settings.game,
        "harness": settings.harness and str(settings.harness),
        "toolchain": settings.toolchain and str(settings.toolchain),
        "max_attempts": settings.attempts,
        "par_ticks": settings.par_ticks,
    }
    env = RustorioEnv(**arguments)  # a wrong path is found now
    client, template, close = player(settings, env)

    def new_protocol() -> SingleAgentProtocol:  # called once per episode: an agent remembers one conversation
        agent = Agent(client=client, model=settings.model, ctx=FullDialog(), parser=raw_parser, chat_template=template)
        return SingleAgentProtocol(agent)

    requests = [
        RolloutRequest(
            env=EnvSpec("rustorio", arguments),
            protocol=ProtocolSpec("player"),
            env_seed=seed,
            sampling_seed=seed,
            inference=InferenceSpec(sampling=SamplingParams(max_tokens=settings.max_tokens)),
        )
        for seed in range(settings.seed, settings.seed + settings.episodes)
    ]
    try:
        engine = RolloutEngine(protocol_registry={"player": new_protocol})
        return await engine.generate_rollouts(requests, max_steps=settings.attempts, concurrency=8)
    finally:
        close()


# --- players -----------------------------------------------------------------------------------------------------


def player(settings: Settings, env: RustorioEnv) -> tuple[ChatClient, ChatTemplate, Callable[[], None]]:
    if settings.player == "script":
        return ScriptedClient(scripted(env)), ByteTemplate(), lambda: None
    from ludic.inference.local import LocalEngine

    server = LocalEngine(settings.model)
    return server, HFChatTemplate(server.tokenizer), server.close


def scripted(env: RustorioEnv) -> Callable[[TokenCompletionRequest], str]:
    """Without its first line, with a typo, unfinished, and at last as it should be."""
    template, solution = env.game.template, env.game.solution
    if solution is None:
        raise ConfigError("This game has no solution.rs for the script to write; use --player model.")
    typo = solution.replace("user_main(", "user_main((", 1)
    programs = [template.partition("\n")[2], typo, template, solution]

    def reply(request: TokenCompletionRequest) -> str:
        said = ByteTemplate().decode(request.prompt_token_ids)
        number = min(said.count("<assistant>") - 1, len(programs) - 1)
        return f"```rust\n{programs[number]}```"

    return reply


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"play_rustorio: {mistake}")
