"""Games to learn from: a script plays, the wins are kept and written down.

Shows: the agents and the protocol of training without a model, and the JSONL that OfflineBatchSource reads.
Needs: nothing. (A model's own games: rejection_sampling.py.)
Takes: five seconds for 5000 games.

    python examples/tic_tac_toe/generate_synth_data.py --output runs/synth/games.jsonl
    python examples/sft.py --data runs/synth/games.jsonl
"""
# ruff: noqa: T201 - a script prints

import asyncio
from collections import Counter
from pathlib import Path
from typing import Literal

import tyro
from game import BothSeats, Player, play_scripted

from ludic.cli.script import run_script
from ludic.inference import ByteTemplate
from ludic.types import ConfigError, Rollout, save_rollouts


def main(
    *,
    player: Player = "minimax",
    keep: Literal["wins", "all"] = "wins",
    view: Literal["text", "compact"] = "text",
    episodes: int = 5000,
    seed: int = 0,
    output: Path = Path("runs/synth/games.jsonl"),
) -> None:
    """Args:
    player: Perfect play, or any legal move.
    keep: Which games are written.
    view: How the board is shown; compact is for models with a small vocabulary.
    episodes: Games to play.
    seed: Of the first game; each game has its own.
    output: The file to write; it must not exist yet.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already. Move it away, or choose another --output.")

    async def play() -> list[Rollout]:
        seeds = range(seed, seed + episodes)
        return [await play_scripted(BothSeats(view=view), player, each, ByteTemplate()) for each in seeds]

    rollouts = asyncio.run(play())
    kept = rollouts if keep == "all" else [rollout for rollout in rollouts if result(rollout) == "win"]
    save_rollouts(kept, output)
    print(f"{len(rollouts)} games: {dict(Counter(map(result, rollouts)).most_common())}")
    print(f"{len(kept)} of them, with {sum(len(r.agent_steps) for r in kept)} moves, are in {output}")


def result(rollout: Rollout) -> str:
    return str(rollout.env_steps[-1].info["result"])


if __name__ == "__main__":
    run_script(lambda args: tyro.cli(main, args=args, description=__doc__))
