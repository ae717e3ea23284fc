"""A Game Boy game, played with the harness for long games: notes, a map of where it has been, summaries of the past.

Shows: GameBoyEnv and GameBoyAgent together, a scripted policy on the same interface as a model, milestones and rollouts.
Needs: the package of environments/game_boy (`make` installs it); a cartridge file of your own, or the small game that is built
in; for --player model a model with native tool calling.
Takes: two seconds for the script on the built-in game.

    python examples/game_boy/play_game_boy.py --show
    python examples/game_boy/play_game_boy.py --rom PokemonRed.gb --start-state after_intro.state --player model \\
        --model Qwen/Qwen3.5-4B --max-turns 500 --output runs/red.jsonl

`ludic train game_boy --set rom=… --agent game_boy --context summarised` trains the same agent.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ludic.batch_gen import RolloutEngine
from ludic.context import SummarisedDialog
from ludic.inference import (
    ByteTemplate,
    ChatTemplate,
    HermesToolParser,
    HFChatTemplate,
    ScriptedClient,
    tool_parser_for,
)
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import (
    ChatClient,
    EnvironmentStep,
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
from ludic_game_boy import GameBoyAgent, GameBoyEnv
from ludic_game_boy.agent import MOVES, in_buttons


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is played, and by whom."""

    rom: str = "demo"
    """A cartridge file, or demo."""
    game: str | None = None
    """Memory map: a built-in name or a JSON file; by the cartridge's title if not given."""
    start_state: Path | None = None
    """A PyBoy save state to begin in."""
    player: Literal["script", "model"] = "script"
    """The script walks to the key and the door of the built-in game; elsewhere it presses at random."""
    model: str = "smollm2-135m"
    """For --player model: a folder or a hub id."""
    episodes: int = 1
    max_turns: int = 64
    """Replies per episode."""
    max_presses: int = 2000
    """Button presses per episode."""
    summarise_after: int = 16
    """Turns after which the past is summed up."""
    max_tokens: int = 256
    """Of one reply."""
    seed: int = 0
    show: bool = False
    """Print what is seen and pressed."""
    output: Path | None = None
    """Write the rollouts here."""


def main(settings: Settings) -> None:
    rollouts = asyncio.run(play(settings))
    for rollout in rollouts:
        if settings.show:
            tell(rollout)
        last = rollout.env_steps[-1].info if rollout.env_steps else {}
        reached = [name for step in rollout.env_steps for name in step.info["milestones"]]
        print(
            f"reward {rollout.total_reward:g}, {rollout.stop}, {len(rollout.env_steps)} turns, "
            f"milestones: {', '.join(reached) or 'none'}, presses left: {last.get('presses_left')}"
        )
    if settings.output is not None:
        save_rollouts(rollouts, settings.output)
        print(f"wrote {settings.output}")


def tell(rollout: Rollout) -> None:
    for step in rollout.steps:
        if isinstance(step, EnvironmentStep):
            print(f"{step.prev_obs}\n> {step.parsed_action}\n")
        for result in [] if isinstance(step, EnvironmentStep) else step.tool_results or ():
            print(f"[{result['tool_name']} {result['arguments_json']}] {result['content']}\n")


async def play(settings: Settings) -> list[Rollout]:
    client, template, close = player(settings)

    def new_protocol() -> SingleAgentProtocol:  # called once per episode: an agent remembers one conversation
        agent = GameBoyAgent(
            client=client,
            model=settings.model,
            ctx=SummarisedDialog(max_turns=settings.summarise_after),
            parser=raw_parser,
            chat_template=template,
        )
        return SingleAgentProtocol(agent)

    arguments = {"rom": settings.rom, "max_presses": settings.max_presses}
    if settings.game is not None:
        arguments["game"] = settings.game
    if settings.start_state is not None:
        arguments["start_state"] = str(settings.start_state)
    GameBoyEnv(**arguments)  # a wrong path is found now
    requests = [
        RolloutRequest(
            env=EnvSpec("game_boy", arguments),
            protocol=ProtocolSpec("player"),
            env_seed=seed,
            sampling_seed=seed,
            inference=InferenceSpec(sampling=SamplingParams(max_tokens=settings.max_tokens)),
        )
        for seed in range(settings.seed, settings.seed + settings.episodes)
    ]
    try:
        engine = RolloutEngine(protocol_registry={"player": new_protocol})
        return await engine.generate_rollouts(requests, max_steps=settings.max_turns, concurrency=8)
    finally:
        close()


# --- players -----------------------------------------------------------------------------------------------------


def player(settings: Settings) -> tuple[ChatClient, ChatTemplate, Callable[[], None]]:
    if settings.player == "script":
        return ScriptedClient(scripted_reply), ByteTemplate(tool_parser=HermesToolParser()), lambda: None
    from ludic.inference.local import LocalEngine

    server = LocalEngine(settings.model)
    parser = tool_parser_for(server.tokenizer)
    return server, HFChatTemplate(server.tokenizer, tool_parser=parser), server.close


def scripted_reply(request: TokenCompletionRequest) -> str:
    """What the last message calls for: a summary, a note about the key, or buttons."""
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
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"play_game_boy: {mistake}")
