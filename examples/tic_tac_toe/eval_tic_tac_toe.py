"""Measures how well models play: results, mistakes and optimal moves, each with a 95 % confidence interval.

Shows: `Run.play` and ludic.eval on held-out games, and your own metric (optimal moves) from the rollouts.
Needs: a model; several are compared on the same games.
Takes: two to three seconds per game with smollm2-135m after some SFT, on two busy CPU cores.

    python examples/tic_tac_toe/eval_tic_tac_toe.py --model smollm2-135m runs/tic_tac_toe

A reply without a move is a parse error and a game that is not won; nothing is left out of the shares. A move is optimal if it
keeps the best result that was still possible; their rate is the share of a game's moves, illegal ones included, over games.
`ludic eval tic_tac_toe` has all but the optimal moves.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro
from game import MAX_MOVES, BothSeats, last_cell
from rich.console import Console
from rich.table import Table

from ludic.cli.script import run_script
from ludic.envs.tic_tac_toe.board import CELLS, position
from ludic.eval import Estimate, make_report, share_estimate
from ludic.run import build
from ludic.types import ConfigError, Rollout, save_rollouts

GAMES = ("win_rate", "draw_rate", "loss_rate", "illegal_move_rate")


def main(
    *,
    model: tuple[str, ...] = ("smollm2-135m",),
    episodes: int = 200,
    view: Literal["text", "compact"] = "text",
    temperature: float = 0.6,
    max_tokens: int = 32,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Args:
    model: Folders, runs, hub ids, or smollm2-135m.
    episodes: Games per model.
    view: How the board is shown; compact is for models with a small vocabulary.
    temperature: 0 is greedy.
    max_tokens: Of one reply.
    seed: Of the games.
    out: A JSONL file for the games; it must not exist yet.
    """
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already. Move it away, or choose another --out.")
    columns = {}
    for name in model:
        with build(
            env=BothSeats, model=name, parser=last_cell, set={"view": view}, max_steps=MAX_MOVES, unreadable="stop",
            max_tokens=max_tokens, eval_episodes=episodes, eval_temperature=temperature, seed=seed,
        ) as run:  # fmt: skip
            rollouts = run.play()
        if out is not None:
            save_rollouts(rollouts, out)
        columns[name] = rates(rollouts, view)
    Console().print(table(columns, f"{episodes} games against a random opponent"))


def rates(rollouts: Sequence[Rollout], view: Literal["text", "compact"]) -> dict[str, Estimate]:
    """All that is shown of one model."""
    report = make_report(rollouts)
    nothing = share_estimate([0.0] * len(rollouts))  # a rate that the report does not have, since no game got that far
    found = {name: report.estimates.get(name, nothing) for name in GAMES}
    found["parse_error_rate"] = share_estimate([float(o.has_parse_error) for o in report.outcomes])
    found["truncation_rate"] = share_estimate([float(o.is_truncated) for o in report.outcomes])
    games = [optimal_share(rollout, view) for rollout in rollouts if rollout.env_steps]
    if games:
        found["optimal_move_rate"] = share_estimate(games, num_samples=sum(len(r.env_steps) for r in rollouts))
    found["mean_reward"] = report.estimates["mean_reward"]
    return found


def optimal_share(rollout: Rollout, view: Literal["text", "compact"]) -> float:
    """The share of a game's moves that kept the best possible result. The game is played again: one seed, one game."""
    env, num_optimal = BothSeats(view=view), 0
    env.reset(seed=rollout.meta["env_seed"])
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
    run_script(lambda args: tyro.cli(main, args=args, description=__doc__))
