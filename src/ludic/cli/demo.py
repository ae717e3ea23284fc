"""`ludic demo`: the whole rollout stack at work without a model; the job behind `make train` until there is training.

Scripted agents play Tic-Tac-Toe through the same agents, templates and protocols that a model uses. The rollouts are
written as JSONL, read back, and checked: every prompt must extend what was sent and sampled before it.
"""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ludic import registry
from ludic.cli.scripted import Chooser, random_legal, reference_or_random, scripted_protocol
from ludic.types import ConfigError, Rollout, derive_seed, load_rollouts, save_rollouts

RESULTS = ("win", "draw", "loss", "illegal")


def demo(
    games: Annotated[int, typer.Option(help="Games per scripted agent.", min=1)] = 500,
    seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the rollouts.")] = Path("runs/demo"),
) -> None:
    """Play Tic-Tac-Toe with scripted agents, and check the rollouts."""
    console = Console(highlight=False)
    console.print("[bold]Scripted-agent demo[/bold]: no model, nothing is trained; all else is the real thing.\n")
    table = Table("agent", "games", *RESULTS, "mean reward", "model calls/s", box=None, pad_edge=False)
    rollouts: list[Rollout] = []
    players = {
        "random legal": random_legal(random.Random(derive_seed(seed, 1))),
        "minimax": reference_or_random(random.Random(derive_seed(seed, 2))),
    }
    for name, choose in players.items():
        started = time.perf_counter()
        played = asyncio.run(_play_games(choose, range(seed, seed + games)))
        _add_row(table, name, played, time.perf_counter() - started)
        rollouts += played
    console.print(table)
    path = out / "rollouts.jsonl"
    num_calls = _write_and_check(rollouts, path)
    console.print("\nOne game of the minimax agent:\n")
    for step in rollouts[-1].env_steps:
        console.print(escape(f"{step.prev_obs}\n> {step.action}\n"))
    console.print(escape(f"{rollouts[-1].env_steps[-1].info['final_obs']}\n"))
    console.print(
        f"{len(rollouts)} rollouts in {path} ({path.stat().st_size / 1e6:.1f} MB); read back: all {num_calls} model "
        "calls are token-exact.\nNext: [bold]ludic play tic_tac_toe[/bold] (in .venv/bin) to play it yourself."
    )


async def _play_games(choose: Chooser, seeds: range) -> list[Rollout]:
    async def one(seed: int) -> Rollout:
        env = registry.envs.make("tic_tac_toe", agent_starts=seed % 2 == 0)
        (rollout,) = await scripted_protocol(env, choose).run(env=env, max_steps=5, env_seed=seed, sampling_seed=seed)
        return rollout

    return list(await asyncio.gather(*(one(seed) for seed in seeds)))


def _add_row(table: Table, name: str, rollouts: list[Rollout], seconds: float) -> None:
    counts = Counter(_result(rollout) for rollout in rollouts)
    num_calls = sum(len(rollout.agent_steps) for rollout in rollouts)
    mean = sum(rollout.total_reward for rollout in rollouts) / len(rollouts)
    shares = [f"{counts[result] / len(rollouts):.1%}" for result in RESULTS]
    table.add_row(name, str(len(rollouts)), *shares, f"{mean:.3f}", f"{num_calls / seconds:,.0f}")


def _result(rollout: Rollout) -> str:
    info = rollout.env_steps[-1].info
    return "illegal" if info["illegal_move"] else str(info["result"])


def _write_and_check(rollouts: list[Rollout], path: Path) -> int:
    try:
        path.unlink(missing_ok=True)
        save_rollouts(rollouts, path)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}. Choose another folder with --out.") from error
    num_calls = 0
    for again, rollout in zip(load_rollouts(path), rollouts, strict=True):
        assert again == rollout, "a rollout read back differs from the one written"
        so_far: list[int] = []
        for step in again.agent_steps:
            prompt = step.trace.prompt_token_ids.tolist()
            assert prompt[: len(so_far)] == so_far, "a prompt does not extend what was sent and sampled before it"
            so_far = [*prompt, *step.trace.completion_token_ids.tolist()]
            num_calls += 1
    return num_calls
