"""A search agent on MuSiQue: GRPO on multi-hop questions, each with its own small knowledge base, in one process.

Shows: tools that belong to the task (a search over the question's paragraphs), several model calls per episode, a
reward for the answer less a penalty for searching in circles, held-out accuracy before and after.
Needs: a model with native tool calling, the extra search; questions from --data, or the hub through `datasets`.
Takes: eight steps of eight episodes by default; meant for one GPU.

    python examples/musique_search/train_musique_search.py --model Qwen/Qwen3.5-4B
    python examples/musique_search/train_musique_search.py --data musique.jsonl --turns 5 --train-limit 100
"""
# ruff: noqa: T201 - a script prints

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.batch_gen.requests.samples import read_samples
from ludic.cli.script import ScriptFlags, parse_script, run_script, train_script
from ludic.run import RunConfig, build
from ludic.types import ConfigError
from ludic_envs.musique_search import MuSiQueSample

HUB = "hub:dgslibisey/MuSiQue"


@dataclass(frozen=True)
class Flags(ScriptFlags):
    """Amounts of training, and the length of an episode."""

    train_limit: int = 32
    """Questions to train on; each is asked once unless --steps says otherwise."""
    eval_limit: int = 16
    """Questions held out; 0 is no evaluation."""
    turns: int = 2
    """Model calls per episode: searches, and in the last one the answer. 1 is the closed book."""


def main(args: list[str]) -> int:
    flags, config = parse_script(
        __doc__, args, Flags, name="musique_search", model="Qwen/Qwen3.5-4B", lora_rank=16, lr=8e-5, steps=8,
        rollouts_per_update=8, group_size=2, max_tokens=256, max_seq_len=4096, too_long="drop", eval_temperature=0.0,
        max_steps=1,
    )  # fmt: skip
    if flags.train_limit < 1 or flags.turns < 1:
        raise ConfigError(f"--train-limit {flags.train_limit}, --turns {flags.turns}; each must be at least 1.")
    train, held_out = questions(flags, config)
    print(f"{len(train)} questions to train on, {len(held_out)} held out", flush=True)
    # The search tool is not the agent's: the env brings it along.
    run = build(
        config, env="musique_search", data=train, eval_data=held_out or None, set={"max_searches": flags.turns - 1},
        agent="react", agent_set={"max_react_steps": flags.turns}, eval_at_start=bool(held_out),
        eval_every=config.train.steps if held_out else 0, eval_episodes=max(1, len(held_out)),
    )  # fmt: skip
    return train_script(run, flags)


def questions(flags: Flags, config: RunConfig) -> tuple[list[Any], list[Any]]:
    """Those to train on, and those held out: of --eval-data, of the hub's validation split, or the rest of --data."""
    first, data, eval_data = flags.train_limit, config.env.data, config.eval.eval_data
    rows = answerable(data or Path(f"{HUB}:train"), "--data")
    if eval_data is None and data is not None:
        others = rows[first:]
    else:
        others = answerable(eval_data or Path(f"{HUB}:validation"), "--eval-data") if flags.eval_limit else []
    train, held_out = rows[:first], others[: flags.eval_limit]
    for sample in (*train, *held_out):
        MuSiQueSample.read(sample)  # one of another form is named now, and not in the middle of the run
    return train, held_out


def answerable(place: Path, flag: str) -> list[Any]:
    return [row for row in read_samples(place, flag) if row.get("answerable", True)]


if __name__ == "__main__":
    run_script(main)
