"""Two recipes of tinker_cookbook, unchanged, one after the other: SmolLM2 learns to add on a laptop. See docs/tinker-server.md.

    python examples/tinker_cookbook/learn_sums.py
    python examples/tinker_cookbook/learn_sums.py learning_rate=1e-3 max_steps=10      # settings of the second recipe

SmolLM2-135M answers one sum in two hundred, and RL has nothing to reinforce. So `chat_sl.train` shows it some answers first, and
`math_rl.train env=arithmetic` continues from the checkpoint by RL.

Shows: RL on a Tinker-compatible server from a supervised checkpoint; a reward that rises.
Needs: what run.py needs.
Takes: eight minutes on two CPU cores.
"""
# ruff: noqa: T201 - a script prints

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from run import HUB, RENDERER, run_recipe

SUPERVISED = {
    "dataset": "tulu3",  # of stand_ins.py: sums
    "batch_size": "32",
    "learning_rate": "1e-3",
    "lr_schedule": "constant",
    "lora_rank": "16",
    "eval_every": "0",
    "max_steps": "10",
}
RL = {
    "env": "arithmetic",
    "groups_per_batch": "16",
    "group_size": "8",
    "learning_rate": "2e-4",
    "lora_rank": "16",
    "eval_every": "0",
    "max_steps": "20",
}


def learn(supervised: Mapping[str, str], rl: Mapping[str, str], *, hub: Path, logs: Path, renderer: str) -> None:
    """The supervised recipe, then the RL recipe from its last checkpoint. Their logs are in logs/supervised and logs/rl."""
    _run("chat_sl.train", supervised, hub, logs / "supervised", renderer)
    start = _read(logs / "supervised/checkpoints.jsonl")[-1]["state_path"]
    _run("math_rl.train", {**rl, "load_checkpoint_path": start}, hub, logs / "rl", renderer)


def _run(recipe: str, settings: Mapping[str, str], hub: Path, logs: Path, renderer: str) -> None:
    words = [f"{name}={value}" for name, value in {**settings, "log_path": str(logs)}.items()]
    run_recipe(recipe, words, hub=hub, renderer=renderer)


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def show(steps: Sequence[Mapping[str, Any]]) -> None:
    """The reward of each step: 1 for a right sum, less 0.1 if the reply does not end in time."""
    print("step  reward  right  ended")
    for number, step in enumerate(steps):
        values = [step[f"env/all/{name}"] for name in ("reward/total", "correct", "format")]
        print(f"{number:4}  {values[0]:6.3f}  {values[1]:5.3f}  {values[2]:5.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hub", type=Path, default=HUB, help=f"as run.py's (default: {HUB})")
    parser.add_argument("settings", nargs="*", help="name=value, for the RL recipe")
    given = parser.parse_args()
    asked = dict(word.split("=", 1) for word in given.settings)
    logs = Path("runs/tinker_cookbook", datetime.now().strftime("sums-%Y-%m-%d-%H-%M-%S")).absolute()
    learn(SUPERVISED, RL | asked, hub=given.hub.absolute(), logs=logs, renderer=RENDERER)
    show(_read(logs / "rl/metrics.jsonl"))
    print(f"logs: {logs}")


if __name__ == "__main__":
    main()
