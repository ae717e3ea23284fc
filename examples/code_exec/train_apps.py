"""Reinforcement learning on programming problems: CISPO, a program that passes all tests earns 1, in one process.

Shows: programs of a model run in sandboxes (one per core), several attempts with the failing test shown in between, data that
is filtered first, your own metrics. Every flag of `ludic train` works here, too.
Needs: a model; bubblewrap, docker or podman; problems from a file, or from the hub through `datasets`.
Takes: an estimated hour or more per step of 64 programs with smollm2-135m on two CPU cores; meant for a GPU.

    python examples/code_exec/train_apps.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --lora-rank 16 --lr 1e-4
    python examples/code_exec/train_apps.py --data apps.jsonl --eval-data apps_test.jsonl --attempts 3 --eval-every 20
    ludic eval humaneval --model runs/apps --data humaneval.jsonl
"""
# ruff: noqa: T201 - a script prints

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ludic.batch_gen.requests.samples import read_samples
from ludic.cli.script import ScriptFlags, parse_script, run_script, train_script
from ludic.envs.code_exec import APPSEnv
from ludic.run import build
from ludic.types import ConfigError, Reducer

Sample = dict[str, Any]
FACTS = {name: Reducer(kind="mean", source=name) for name in ("pass_rate", "compile_failed")}


@dataclass(frozen=True)
class Flags(ScriptFlags):
    """The problems, and how programs are graded."""

    difficulty: Literal["introductory", "interview", "competition"] | None = None
    """Only problems of this one."""
    attempts: int = 1
    """Programs per episode; after one that fails the agent is shown the failing test and tries again."""
    partial_credit: bool = False
    """Pay the share of tests that pass."""
    timeout_per_test_s: float = 5.0
    max_tests: int = 32
    """Tests per problem; APPS has hundreds for some."""


def main(args: list[str]) -> int:
    flags, config = parse_script(
        __doc__, args, Flags, name="apps", algo="cispo", data=Path("hub:metr-evals/apps:train"),
        rollouts_per_update=64, steps=100, max_tokens=1024, max_seq_len=4096, too_long="drop", eval_temperature=0.0,
        best_metric="eval/accuracy",
    )  # fmt: skip
    assert config.env.data is not None, "it has a default"
    train, held_out = gradable(config.env.data, "--data", flags), None
    if config.eval.eval_data is not None:
        held_out = gradable(config.eval.eval_data, "--eval-data", flags)
    print(f"{len(train)} problems to train on, {len(held_out or ())} held out", flush=True)
    grading = {
        "max_attempts": flags.attempts,
        "partial_credit": flags.partial_credit,
        "timeout_per_test_s": flags.timeout_per_test_s,
        "max_tests": flags.max_tests,
    }
    run = build(
        config, env="apps", set={"config": grading}, data=train, eval_data=held_out, max_steps=flags.attempts, reducers=FACTS
    )  # fmt: skip
    return train_script(run, flags)


def gradable(place: Path, flag: str, flags: Flags) -> list[Sample]:
    """The problems that can be graded: some of APPS ask for a function, or have no tests."""
    rows = read_samples(place, flag)
    if flags.difficulty is not None:
        rows = [row for row in rows if row.get("difficulty") == flags.difficulty]
    kept = [row for row in rows if is_gradable(row)]
    if not kept:
        raise ConfigError(f"None of the {len(rows)} problems of {flag} {place} can be graded.")
    print(f"{len(rows) - len(kept)} of {len(rows)} problems are left out: they cannot be graded", flush=True)
    return kept


def is_gradable(sample: Sample) -> bool:
    try:
        APPSEnv(sample)
    except ValueError:  # ConfigError, or a text that is no JSON
        return False
    return True


if __name__ == "__main__":
    run_script(main)
