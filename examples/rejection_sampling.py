"""Rejection sampling: play, keep what earned enough, write training data.

Shows: any registered env with any parser, a filter by total reward, and data that needs no conversion: the rollouts keep
their own tokens, so OfflineBatchSource trains on exactly what was sampled.
Needs: a model.
Takes: 50 games with smollm2-135m: an estimated few minutes on two CPU cores.

    python examples/rejection_sampling.py --env tic_tac_toe --min-reward 1.0 --output runs/kept.jsonl
    python examples/rejection_sampling.py --env key_door --parser xml_tag --parser-args '{"tag": "move"}' --max-steps 32
"""
# ruff: noqa: T201 - a script prints

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro

from ludic import registry
from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine
from ludic.context import FullDialog
from ludic.inference import HFChatTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.types import (
    ConfigError,
    EnvSpec,
    InferenceSpec,
    LudicError,
    ProtocolSpec,
    Rollout,
    RolloutRequest,
    SamplingParams,
    save_rollouts,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is played, and what of it is kept."""

    env: str = "tic_tac_toe"
    """A registered env for one agent; `ludic envs` lists them."""
    env_args: str = "{}"
    """Its arguments, as JSON."""
    parser: str = "raw"
    """How a reply is read: raw, xml_tag, boxed, final_number, …"""
    parser_args: str = "{}"
    """Its arguments, as JSON."""
    model: str = "smollm2-135m"
    """A folder, a hub id, or smollm2-135m."""
    min_reward: float = 1.0
    """Keep rollouts whose total reward is at least this."""
    episodes: int = 50
    max_steps: int = 9
    """Turns per episode."""
    seed: int = 0
    """Of the first episode; each has its own."""
    temperature: float = 1.0
    max_tokens: int = 64
    """Of one reply."""
    concurrency: int = 32
    """Episodes at a time."""
    output: Path = Path("runs/rejection_sampling/kept.jsonl")
    """The file to write; it must not exist yet."""


def main(settings: Settings) -> None:
    if settings.output.exists():
        raise ConfigError(f"{settings.output} exists already. Move it away, or choose another --output.")
    rollouts = asyncio.run(play(settings))
    kept = [r for r in rollouts if r.failure is None and r.total_reward >= settings.min_reward]
    rewards = [rollout.total_reward for rollout in rollouts]
    print(
        f"{len(rollouts)} rollouts with rewards from {min(rewards):g} to {max(rewards):g}, {fmean(rewards):.3f} on average"
    )
    print(
        f"kept {len(kept)} of {len(rollouts)} ({len(kept) / len(rollouts):.1%}) with at least {settings.min_reward:g}"
    )
    if not kept:
        raise ConfigError(f"No rollout earned {settings.min_reward:g}: lower --min-reward, or raise --episodes.")
    save_rollouts(kept, settings.output)
    print(f'Training data: OfflineBatchSource("{settings.output}", algorithm=make_sft())')


async def play(settings: Settings) -> list[Rollout]:
    env = EnvSpec(settings.env, arguments("--env-args", settings.env_args))
    parser = registry.parsers.make(settings.parser, **arguments("--parser-args", settings.parser_args))
    server = LocalEngine(settings.model)
    template = HFChatTemplate(server.tokenizer)

    def new_protocol() -> SingleAgentProtocol:  # called once per episode: an agent remembers one conversation
        agent = Agent(client=server, model=server.name, ctx=FullDialog(), parser=parser, chat_template=template)
        return SingleAgentProtocol(agent)

    sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
    requests = [
        RolloutRequest(
            env=env,
            protocol=ProtocolSpec("player"),
            env_seed=seed,
            sampling_seed=seed,
            inference=InferenceSpec(sampling=sampling),
        )
        for seed in range(settings.seed, settings.seed + settings.episodes)
    ]
    try:
        engine = RolloutEngine(protocol_registry={"player": new_protocol})
        return await engine.generate_rollouts(requests, max_steps=settings.max_steps, concurrency=settings.concurrency)
    finally:
        server.close()


def arguments(flag: str, text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag} {text!r} is not JSON: {error}.") from error
    if not isinstance(read, dict):
        raise ConfigError(f'{flag} {text!r} is not a JSON object, such as \'{{"tag": "move"}}\'.')
    return read


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"rejection_sampling: {mistake}")
