"""An actor: plays games with the newest weights it can get, and pushes every group of them to Redis.

Shows: `run_pipeline_actor`, an engine that follows the trainer's weights while it plays, pacing, a clean end.
Needs: Redis (see README.md), run_trainer.py beside it. Start as many as you like, in any order.
Takes: until it is stopped (Ctrl-C).

    python examples/pipeline_rl/run_actor.py
    python examples/pipeline_rl/run_actor.py --server http://127.0.0.1:8000 --model runs/first_run/warm_up
"""
# ruff: noqa: T201 - a script prints

import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import tyro
from shared import GAME, GROUP_SIZE, MAX_LENGTH, TRAINING, Meeting, make_algorithm

from ludic.batch_gen import make_dataset_sequence_requests_fn
from ludic.batch_gen.pipeline import ActorReport, run_pipeline_actor
from ludic.distributed import FolderFollower
from ludic.inference.local import LocalEngine
from ludic.models.loading import load_model
from ludic.types import ChatClient, LudicError

NUM_GAMES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Settings(Meeting):
    """Who plays, and how much at a time."""

    seed: int | None = None
    """Of the games; by default another one in every life, so that no two actors play the same."""
    concurrency: int = 64
    """Games at a time."""
    groups: int | None = None
    """End after so many groups; by default when stopped."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What plays, and what keeps it up to date."""

    client: ChatClient
    tokenizer: Any
    follow: Callable[[], Awaitable[None]] | None = None


async def main(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        policy = await (on_servers(settings, stack) if settings.server else with_own_engine(settings, stack, stop))
        if policy is None:
            print("Stopped before there were weights to play with.")
            return
        print(f"Playing for the queue {settings.queue!r}.", flush=True)
        report = await play(settings, policy, stop)
    print(
        f"{report.actor} pushed {report.num_items} items in {report.num_groups} groups; {report.num_failed} groups failed, "
        f"{report.num_abandoned} were given up."
    )


async def play(settings: Settings, policy: Policy, stop: asyncio.Event) -> ActorReport:
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    return await run_pipeline_actor(
        GAME.rollout_engine(policy.client, policy.tokenizer, seed=seed),
        make_dataset_sequence_requests_fn(
            range(NUM_GAMES),
            batch_size=16,
            group_size=GROUP_SIZE,
            env_kind="tic_tac_toe",
            env_kwargs_fn=GAME.env_kwargs,
            protocol_kind="player",
            inference=TRAINING,
            rng_seed=seed,
        ),
        redis_url=settings.redis,
        queue_key=settings.queue,
        max_steps=GAME.max_steps_per_episode,
        concurrency=settings.concurrency,
        client=policy.client,
        algorithm=make_algorithm(),
        max_groups=settings.groups,
        follow=policy.follow,
        stop=stop,
    )


async def with_own_engine(settings: Settings, stack: AsyncExitStack, stop: asyncio.Event) -> Policy | None:
    """An engine in this process; None when it was stopped before the trainer had published anything."""
    loaded = load_model(settings.model)
    engine = await stack.enter_async_context(LocalEngine(loaded.model, loaded.tokenizer, max_model_len=MAX_LENGTH))
    follower = FolderFollower(settings.weights, engine)
    print(f"Waiting for weights in {settings.weights}.", flush=True)
    first, stopped = asyncio.create_task(follower.first_version()), asyncio.create_task(stop.wait())
    await asyncio.wait([first, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not first.done():
        first.cancel()
        return None
    print(f"Begins with version {first.result()}.", flush=True)
    return Policy(client=engine, tokenizer=loaded.tokenizer, follow=follower.run)


async def on_servers(settings: Settings, stack: AsyncExitStack) -> Policy:
    """vLLM, started with --served-model-name player; the trainer brings it its weights."""
    from transformers import AutoTokenizer

    client = await asyncio.to_thread(settings.servers)
    stack.push_async_callback(client.close)
    return Policy(client=client, tokenizer=AutoTokenizer.from_pretrained(settings.model, trust_remote_code=False))


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(main(tyro.cli(Settings, description=__doc__)))
    except LudicError as mistake:
        sys.exit(f"run_actor: {mistake}")
