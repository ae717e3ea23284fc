"""How well a model plays: results, mistakes and optimal moves, each with a 95 % confidence interval.

Shows: ludic.eval on held-out games, and a metric of one's own (optimal moves) from the stored rollouts.
Needs: a model; several are compared on the same games.
Takes: two to three seconds per game with smollm2-135m after some SFT, on two busy CPU cores.

    python examples/tic_tac_toe/eval_tic_tac_toe.py --model smollm2-135m runs/tic_tac_toe/model

A reply without a move is a parse error and a game that is not won; nothing is left out of the shares. A move is optimal if it
keeps the best result that was still possible; their rate is the share of a game's moves, illegal ones included, over games.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from game import Game
from rich.console import Console
from rich.table import Table

from ludic.envs.tic_tac_toe import TicTacToeEnv
from ludic.envs.tic_tac_toe.board import CELLS, position
from ludic.eval import Estimate, make_report, share_estimate
from ludic.inference.local import LocalEngine
from ludic.types import ConfigError, InferenceSpec, LudicError, Rollout, SamplingParams, save_rollouts

FIRST_SEED = 1_000_000
"""Where train_tic_tac_toe.py's training games end."""
GAMES = ("win_rate", "draw_rate", "loss_rate", "illegal_move_rate")


@dataclass(frozen=True, kw_only=True)
class Settings(Game):
    """Whom to evaluate, on how much."""

    model: tuple[str, ...] = ("smollm2-135m",)
    """Folders, hub ids, or smollm2-135m."""
    episodes: int = 200
    """Games per model."""
    seed: int = FIRST_SEED
    """Of the first game."""
    temperature: float = 0.6
    """0 is greedy."""
    max_tokens: int = 32
    """Of one reply."""
    concurrency: int = 64
    """Games at a time."""
    out: Path | None = None
    """A JSONL file for the games; it must not exist yet."""


def main(settings: Settings) -> None:
    if settings.out is not None and settings.out.exists():
        raise ConfigError(f"{settings.out} exists already. Move it away, or choose another --out.")
    columns = {}
    for model in settings.model:
        rollouts = asyncio.run(play(settings, model))
        if settings.out is not None:
            save_rollouts(rollouts, settings.out)
        columns[model] = rates(settings, rollouts)
    Console().print(table(columns, f"{settings.episodes} games against the {settings.opponent} opponent"))


async def play(settings: Settings, model: str) -> list[Rollout]:
    server = LocalEngine(model)
    try:
        engine = settings.rollout_engine(server, server.tokenizer)
        sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
        seeds = range(settings.seed, settings.seed + settings.episodes)
        return await engine.generate_rollouts(
            settings.requests(seeds, InferenceSpec(sampling=sampling)),
            max_steps=settings.max_steps_per_episode,
            concurrency=settings.concurrency,
        )
    finally:
        server.close()


def rates(settings: Settings, rollouts: Sequence[Rollout]) -> dict[str, Estimate]:
    """All that is shown of one model."""
    report = make_report(rollouts)
    nothing = share_estimate([0.0] * len(rollouts))  # a rate that the report does not know, since no game got that far
    found = {name: report.estimates.get(name, nothing) for name in GAMES}
    found["parse_error_rate"] = share_estimate([float(o.has_parse_error) for o in report.outcomes])
    found["truncation_rate"] = share_estimate([float(o.is_truncated) for o in report.outcomes])
    games = [optimal_share(settings, rollout) for rollout in rollouts if rollout.env_steps]
    if games:
        found["optimal_move_rate"] = share_estimate(games, num_samples=sum(len(r.env_steps) for r in rollouts))
    found["mean_reward"] = report.estimates["mean_reward"]
    return found


def optimal_share(settings: Settings, rollout: Rollout) -> float:
    """The share of a game's moves that threw nothing away. The game is played again: one seed, one game."""
    seed = rollout.meta["env_seed"]
    env = TicTacToeEnv(**settings.env_kwargs(seed))
    env.reset(seed=seed)
    num_optimal = 0
    for step in rollout.env_steps:
        faced = position(str(env.snapshot().world["board"]), "X" if env.agent_starts else "O")
        move = str(step.parsed_action)
        num_optimal += move.upper() in {CELLS[cell] for cell in faced.optimal}
        env.step({env.agent_id: move})
    return num_optimal / len(rollout.env_steps)


def table(columns: dict[str, dict[str, Estimate]], title: str) -> Table:
    shown = Table("", *columns, title=title)
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        cells = [column.get(name) for column in columns.values()]
        shown.add_row(name, *("–" if e is None else f"{e.mean:.3f} [{e.low:.3f}, {e.high:.3f}]" for e in cells))
    return shown


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"eval_tic_tac_toe: {mistake}")
