"""A Game Boy game, played with the harness for long games: notes, a map of where it has been, summaries of the past.

Shows: GameBoyEnv and GameBoyAgent together, a scripted policy on the same interface as a model, milestones and rollouts.
Needs: the package of environments/game_boy (`make` installs it); a cartridge file of your own, or the small game that is built in.
Takes: two seconds for the script on the built-in game.

    python examples/game_boy/play_game_boy.py --show
    ludic eval game_boy --set rom=PokemonRed.gb --agent game_boy --context summarised --model Qwen/Qwen3.5-4B --num-tasks 1

`ludic train` with the same flags trains the agent.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import random
import re
from dataclasses import dataclass
from pathlib import Path

import tyro

from ludic.cli.script import run_script
from ludic.context import SummarisedDialog
from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import EnvironmentStep, Rollout, TokenCompletionRequest, save_rollouts
from ludic_game_boy import GameBoyAgent, GameBoyEnv
from ludic_game_boy.agent import MOVES, in_buttons


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The game that is played. The script walks to the key and the door of the built-in game; elsewhere it presses at random."""

    rom: str = "demo"
    """A cartridge file, or demo."""
    max_turns: int = 64
    """Replies per episode."""
    max_presses: int = 2000
    """Button presses per episode."""
    summarise_after: int = 16
    """Turns after which the past is summed up."""
    seed: int = 0
    show: bool = False
    """Print what is seen and pressed."""
    output: Path | None = None
    """Write the rollout here."""


def main(settings: Settings) -> None:
    rollout = asyncio.run(play(settings))
    if settings.show:
        tell(rollout)
    last = rollout.env_steps[-1].info if rollout.env_steps else {}
    reached = [name for step in rollout.env_steps for name in step.info["milestones"]]
    print(
        f"reward {rollout.total_reward:g}, {rollout.stop}, {len(rollout.env_steps)} turns, "
        f"milestones: {', '.join(reached) or 'none'}, presses left: {last.get('presses_left')}"
    )
    if settings.output is not None:
        save_rollouts([rollout], settings.output)
        print(f"wrote {settings.output}")


def tell(rollout: Rollout) -> None:
    for step in rollout.steps:
        if isinstance(step, EnvironmentStep):
            print(f"{step.prev_obs}\n> {step.parsed_action}\n")
        for result in [] if isinstance(step, EnvironmentStep) else step.tool_results or ():
            print(f"[{result['tool_name']} {result['arguments_json']}] {result['content']}\n")


async def play(settings: Settings) -> Rollout:
    agent = GameBoyAgent(
        client=ScriptedClient(scripted_reply),
        model="script",
        ctx=SummarisedDialog(max_turns=settings.summarise_after),
        parser=raw_parser,
        chat_template=ByteTemplate(tool_parser=HermesToolParser()),
    )
    env = GameBoyEnv(rom=settings.rom, max_presses=settings.max_presses)
    (rollout,) = await SingleAgentProtocol(agent).run(
        env=env, max_steps=settings.max_turns, env_seed=settings.seed, sampling_seed=settings.seed
    )
    return rollout


# --- the script --------------------------------------------------------------------------------------------------


def scripted_reply(request: TokenCompletionRequest) -> str:
    """The kind of reply that the last message calls for: a summary, a note about the key, or buttons."""
    said = ByteTemplate().decode(request.prompt_token_ids)
    newest = said[max(said.rfind("<user>"), said.rfind("<tool>")) :]
    if "Before you go on" in newest:
        return "I walk to the key, then to the door."
    if "Milestone: found the key!" in newest:
        return '<tool_call>{"name": "write_note", "arguments": {"title": "key", "text": "I have it."}}</tool_call>'
    view = said[said.rfind("Screen:\n") :].split("\n")[1:]
    return way(view) or random.Random(len(said)).choice(["up", "down", "left", "right", "a"])


def way(view: list[str]) -> str:
    """Buttons from @ to the key, or to the door if there is no key to be seen; at most 16."""
    room = [row for row in view if re.fullmatch(r"[#.@kD]+", row)]
    cells = {(x, y): tile for y, row in enumerate(room) for x, tile in enumerate(row) if tile != "#"}
    places = {tile: cell for cell, tile in cells.items()}
    goal, start = places.get("k") or places.get("D"), places.get("@")
    if goal is None or start is None:
        return ""
    came, queue = {start: []}, [start]
    for x, y in queue:
        for button, (dx, dy) in MOVES.items():
            then = (x + dx, y + dy)
            if then in cells and then not in came:
                came[then] = [*came[x, y], button]
                queue.append(then)
    return in_buttons(came.get(goal, [])[:16])


if __name__ == "__main__":
    run_script(lambda args: main(tyro.cli(Settings, args=args, description=__doc__)))
