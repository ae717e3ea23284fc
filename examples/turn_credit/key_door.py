"""Key and door for a model of one token per character: how a reply is read, credit per turn, and games to start from.

Shows: a parser and a credit rule from a file (`--parser`, `--algo`), and rollouts of a script in the model's own tokens.
Needs: nothing. The page research/results/turn_credit.md has all commands.
Takes: 20 seconds for 1500 games.

    python examples/turn_credit/key_door.py --output runs/key_door_games.jsonl
    ludic train examples/configs/key_door_warm_up.toml --rollouts runs/key_door_games.jsonl --name key_door_warm_up
    ludic train examples/configs/key_door.toml --model runs/key_door_warm_up --algo gigpo
"""
# ruff: noqa: T201 - a script prints

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import tyro

from ludic.agents import Agent
from ludic.cli.script import run_script
from ludic.context import SlidingWindow
from ludic.envs.key_door import MOVES, KeyDoorEnv
from ludic.inference import HFChatTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.models.loading import character_tokenizer
from ludic.parsers import ParseResult
from ludic.training import RLAlgorithm, TurnLeaveOneOutReturn, make_grpo
from ludic.types import ConfigError, Rollout, derive_seed, save_rollouts

LETTERS = {move[0]: move for move in MOVES}


def letter(reply: str) -> ParseResult:
    """u, d, l or r; the env counts any other reply as a wasted move."""
    return ParseResult(LETTERS.get(reply, reply), 0.0, None)


def make_turns(*, group_size: int = 8, gamma: float = 0.9) -> RLAlgorithm:
    """GRPO's loss with credit per turn: the discounted return from the turn on, less that of the siblings at the same turn."""
    rule = TurnLeaveOneOutReturn(group_size, gamma=gamma)
    return replace(make_grpo(group_size=group_size, reduction="token_mean"), name="turns", credit_assigner=rule)


def main(
    *,
    output: Path,
    episodes: int = 1500,
    size: int = 5,
    view_radius: int = 4,
    max_moves: int = 20,
    noise: float = 0.5,
    max_turns: int = 1,
    seed: int = 2_000_000,
) -> None:
    """Args:
    output: The file to write; it must not exist yet.
    episodes: Games to play.
    size: Of the world.
    view_radius: How far the agent sees.
    max_moves: Of a game.
    noise: Share of moves that are random; the others are the first of a shortest path.
    max_turns: That a prompt shows; `max_moves` of them are all.
    seed: Of the first game.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already. Move it away, or choose another --output.")
    tokenizer = character_tokenizer()
    template = HFChatTemplate(tokenizer)

    async def play(game_seed: int) -> Rollout:
        env, dice = (
            KeyDoorEnv(size=size, view_radius=view_radius, max_moves=max_moves, view="compact"),
            random.Random(derive_seed(game_seed, 1)),
        )

        def move(_: object) -> str:
            best = env.reference_action(env.agent_id)
            assert best is not None, "the game is not over"
            return dice.choice(list(LETTERS)) if dice.random() < noise else best[0]

        agent = Agent(
            client=ScriptedClient(move, tokenizer=tokenizer), model="script", ctx=SlidingWindow(max_turns=max_turns),
            parser=letter, chat_template=template,
        )  # fmt: skip
        (rollout,) = await SingleAgentProtocol(agent).run(env=env, max_steps=max_moves, env_seed=game_seed)
        return rollout

    async def play_all() -> list[Rollout]:
        return [await play(seed + number) for number in range(episodes)]

    rollouts = asyncio.run(play_all())
    output.parent.mkdir(parents=True, exist_ok=True)
    save_rollouts(rollouts, output)
    solved = sum(rollout.total_reward for rollout in rollouts) / len(rollouts)
    print(f"{len(rollouts)} games, {solved:.0%} solved, are in {output}")


if __name__ == "__main__":
    run_script(lambda args: tyro.cli(main, args=args, description=__doc__))
