"""Games to learn from: play, keep the wins, write them down.

Shows: rollouts of a model or of a script, filtering, the JSONL that OfflineBatchSource reads.
Needs: nothing for --player random or minimax; a model for --player model.
Takes: five seconds for 5000 scripted games. smollm2-135m samples some 40 tokens a second on a busy CPU core.

    python examples/tic_tac_toe/generate_synth_data.py --player minimax --output runs/synth/games.jsonl
    python examples/tic_tac_toe/generate_synth_data.py --player model --model smollm2-135m --episodes 200
"""
# ruff: noqa: T201 - a script prints

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from game import Game

from ludic.envs.tic_tac_toe import TicTacToeEnv
from ludic.inference import ByteTemplate, ChatTemplate, ScriptedClient
from ludic.types import ConfigError, InferenceSpec, LudicError, Rollout, SamplingParams, derive_seed, save_rollouts


@dataclass(frozen=True, kw_only=True)
class Settings(Game):
    """Whose games, and which of them."""

    player: Literal["minimax", "random", "model"] = "minimax"
    """Perfect play, any legal move, or --model."""
    model: str = "smollm2-135m"
    """For --player model: a folder, a hub id, or smollm2-135m."""
    keep: Literal["wins", "all"] = "wins"
    """Which games are written."""
    episodes: int = 5000
    """Games to play."""
    seed: int = 0
    """Of the first game; each game has its own."""
    concurrency: int = 32
    """Games at a time, with a model."""
    temperature: float = 0.8
    """Of the model's sampling."""
    max_tokens: int = 250
    """Of one reply of the model."""
    output: Path = Path("runs/synth/games.jsonl")
    """The file to write; it must not exist yet."""


def main(settings: Settings) -> None:
    if settings.output.exists():
        raise ConfigError(f"{settings.output} exists already. Move it away, or choose another --output.")
    play = play_model if settings.player == "model" else play_script
    rollouts = asyncio.run(play(settings))
    kept = rollouts if settings.keep == "all" else [rollout for rollout in rollouts if result(rollout) == "win"]
    if not kept:
        raise ConfigError(f"None of {len(rollouts)} games was won, so there is nothing to keep; see --keep all.")
    save_rollouts(kept, settings.output)
    print(f"{len(rollouts)} games: {dict(Counter(map(result, rollouts)).most_common())}")
    print(f"{len(kept)} of them, with {sum(len(r.agent_steps) for r in kept)} moves, are in {settings.output}")
    print(f"Next: python examples/tic_tac_toe/sft_tic_tac_toe.py --data {settings.output}")


def result(rollout: Rollout) -> str:
    """win, draw or loss; else what became of the game instead."""
    if not rollout.env_steps:
        return "failed" if rollout.failure else "unreadable"
    info = rollout.env_steps[-1].info
    return "illegal" if info["illegal_move"] else info["result"] or "unfinished"


async def play_model(settings: Settings) -> list[Rollout]:
    """A local model, many games at a time."""
    from ludic.inference.local import LocalEngine

    server = LocalEngine(settings.model)
    try:
        engine = settings.rollout_engine(server, server.tokenizer)
        sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
        requests = settings.requests(
            range(settings.seed, settings.seed + settings.episodes), InferenceSpec(sampling=sampling)
        )
        return await engine.generate_rollouts(
            requests, max_steps=settings.max_steps_per_episode, concurrency=settings.concurrency
        )
    finally:
        server.close()


async def play_script(settings: Settings) -> list[Rollout]:
    """The same agents and protocol without a model: the client knows the game and names a move."""
    return [await play_one(settings, seed) for seed in range(settings.seed, settings.seed + settings.episodes)]


async def play_one(
    settings: Settings, seed: int, template: ChatTemplate | None = None, tokenizer: Any = None
) -> Rollout:
    """With a tokenizer and its template, the game is recorded in its tokens: a model can learn from it as one sequence."""
    env = TicTacToeEnv(**settings.env_kwargs(seed))
    dice = random.Random(derive_seed(seed, 1))  # not the opponent's

    def move(_: object) -> str:
        best = env.reference_action(env.agent_id) if settings.player == "minimax" else None
        return best or dice.choice(env.legal_actions(env.agent_id))

    protocol = settings.protocol(ScriptedClient(move, tokenizer=tokenizer), template or ByteTemplate())
    (rollout,) = await protocol.run(env=env, max_steps=settings.max_steps_per_episode, env_seed=seed)
    return rollout


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"generate_synth_data: {mistake}")
