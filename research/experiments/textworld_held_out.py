"""Can a small model learn TextWorld's quests of one command so that it wins games that it was not trained on?

The model has random weights and a token per word; its reply is one of the listed commands. This program generates games, and writes
a config with a tokenizer of their words and the rollouts of the reference player, which sees each game with its commands in several
orders. `ludic train` imitates them. `ludic eval` plays other games: their numbers are drawn below 2**31, those of the trained games
are below --games.

    E=research/experiments/textworld_held_out.py:Words
    python research/experiments/textworld_held_out.py --output runs/textworld     # needs the extra textworld; 5 CPU minutes for 600 games
    ludic train $E --model runs/textworld/config.json --algo sft --rollouts runs/textworld/games.jsonl --rollouts-per-update 32 \
        --steps 400 --lr 3e-3 --schedule cosine --max-tokens 16 --max-steps 1 --system-prompt '' --name textworld_sft
    ludic eval $E --model runs/textworld_sft --num-tasks 200 --temperature 0 --max-tokens 16 --max-steps 1 --system-prompt '' \
        --env-workers 2 --name textworld
    python research/experiments/textworld_held_out.py --chance runs/eval/textworld
"""

import argparse
import asyncio
import random
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import DatasetQAEnv
from ludic.inference import HFChatTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.models.loading import tiny_llama, word_tokenizer
from ludic.parsers import raw_parser
from ludic.types import Info, Observation, Rollout, load_rollouts, save_rollouts
from ludic_envs.adapters.textworld import TextWorldEnv

BETWEEN = " ; "


def spaced(text: str) -> str:
    """With blanks between words and signs, as the tokenizer divides them."""
    return " ".join(re.findall(r"\w+|[^\w\s]", text))


class Words(TextWorldEnv):
    """A game of one room and one command, in words; the commands stand in the order of the episode's seed."""

    def __init__(self, *, num_games: int | None = None) -> None:
        super().__init__(rooms=1, objects=3, quest_length=1, max_moves=1, view="short", num_games=num_games)

    def _begin(self, seed: int) -> dict[str, tuple[Observation, Info]]:
        self._order = random.Random(seed)
        return super()._begin(seed)

    def _shown(self) -> str:
        told = super()._shown().split("\n")
        commands = [spaced(each) for each in told[-len(self._live.commands) :]]
        self._order.shuffle(commands)
        return f"{spaced(' '.join(told[: -len(commands)]))} : {BETWEEN.join(commands)}"

    def _read(self, said: str) -> str | None:
        return next((each for each in self._live.commands if spaced(each) == said.strip()), None)

    def legal_actions(self, agent_id: str) -> list[str] | None:
        return [spaced(each) for each in super().legal_actions(agent_id) or ()]

    def reference_action(self, agent_id: str) -> str | None:
        command = super().reference_action(agent_id)
        return None if command is None else spaced(command)


def look_at(seed: int, num_games: int, num_orders: int) -> list[tuple[str, str]]:
    """What is shown and the reference's reply, for several orders of the commands of one game."""
    env = Words(num_games=num_games)
    seen = []
    for number in range(num_orders):
        ((shown, _),) = env.reset(seed=seed + number * num_games).values()
        seen.append((str(shown), str(env.reference_action("agent_0"))))
    return seen


async def told(seen: Sequence[tuple[str, str]], tokenizer: Any) -> list[Rollout]:
    """Rollouts of a player who says the reference's reply."""
    rollouts = []
    for shown, reply in seen:
        agent = Agent(
            client=ScriptedClient([reply], tokenizer=tokenizer), model="reference", ctx=FullDialog(system_prompt=""),
            parser=raw_parser, chat_template=HFChatTemplate(tokenizer),
        )  # fmt: skip
        env = DatasetQAEnv({"question": shown, "answer": reply}, system_prompt="")
        rollouts += await SingleAgentProtocol(agent).run(env=env, max_steps=1, env_seed=0)
    return rollouts


def make(output: Path, num_games: int, num_orders: int, processes: int) -> None:
    output.mkdir(parents=True)
    with ProcessPoolExecutor(processes) as pool:
        jobs = [pool.submit(look_at, seed, num_games, num_orders) for seed in range(num_games)]
        seen = [each for job in jobs for each in job.result()]
    tokenizer = word_tokenizer(sorted({word for shown, reply in seen for word in (*shown.split(), *reply.split())}))
    tiny_llama(len(tokenizer), layers=2).config.save_pretrained(output)
    tokenizer.save_pretrained(output)
    random.Random(0).shuffle(seen)
    save_rollouts(asyncio.run(told(seen, tokenizer)), output / "games.jsonl")
    print(f"{num_games} games, {len(seen)} rollouts, {len(tokenizer)} tokens; a random command wins {chance(seen):.1%}")


def chance(seen: Sequence[tuple[str, str]]) -> float:
    """How often a random listed command is the reference's."""
    return sum(1 / (shown.count(BETWEEN) + 1) for shown, _ in seen) / len(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/textworld"))
    parser.add_argument("--games", type=int, default=600)
    parser.add_argument("--orders", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--chance", type=Path, help="folder of an evaluation: how often would a random command have won?"
    )
    given = parser.parse_args()
    if given.chance is None:
        make(given.output, given.games, given.orders, given.processes)
        return
    played = [rollout for file in (given.chance / "rollouts").iterdir() for rollout in load_rollouts(file)]
    seen = [(str(rollout.agent_steps[0].prompt_messages[-1]["content"]), "") for rollout in played]
    print(f"{len(seen)} episodes; a random command wins {chance(seen):.1%}")


if __name__ == "__main__":
    main()
