"""Rejection sampling: a model plays any env, what earned enough becomes training data.

Shows: `Run.play`, filtering, the JSONL that OfflineBatchSource and sft.py read. Env, agent and sampling are set by the flags of
`ludic train`: --set, --parser, --max-tokens, --eval-episodes, --eval-temperature, …
Needs: a model.
Takes: an estimated few minutes for 50 episodes of tic-tac-toe with smollm2-135m on a CPU.

    python examples/rejection_sampling.py --model smollm2-135m --min-reward 1
    python examples/rejection_sampling.py --env gsm8k --eval-data gsm8k_train.jsonl --eval-episodes 1000
    python examples/sft.py --data runs/rejection_sampling/kept.jsonl
"""
# ruff: noqa: T201 - a script prints

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ludic.cli.script import parse_script, run_script
from ludic.run import build
from ludic.types import ConfigError, save_rollouts


@dataclass(frozen=True)
class Flags:
    """The episodes that are played, and the ones that are kept."""

    env: str = "tic_tac_toe"
    """Id of an env (`ludic envs`), or file.py:Class."""
    min_reward: float = 1.0
    """Keep rollouts whose total reward is at least this."""
    output: Path = Path("runs/rejection_sampling/kept.jsonl")
    """The file to write; it must not exist yet."""


def main(args: list[str]) -> None:
    flags, config = parse_script(__doc__, args, Flags, eval_episodes=50, eval_temperature=1.0)
    if flags.output.exists():
        raise ConfigError(f"{flags.output} exists already. Move it away, or choose another --output.")
    samples = config.eval.eval_data
    with build(config, env=flags.env, data=config.env.data or samples) as run:
        rollouts = run.play()
    rewards = [rollout.total_reward for rollout in rollouts]
    kept = [r for r in rollouts if r.failure is None and r.total_reward >= flags.min_reward]
    print(
        f"{len(rollouts)} rollouts with rewards from {min(rewards):g} to {max(rewards):g}, {fmean(rewards):.3f} on average"
    )
    print(f"kept {len(kept)} of {len(rollouts)} ({len(kept) / len(rollouts):.1%}) with at least {flags.min_reward:g}")
    if not kept:
        raise ConfigError(f"No rollout earned {flags.min_reward:g}: lower --min-reward, or raise --eval-episodes.")
    save_rollouts(kept, flags.output)
    print(f"Next: python examples/sft.py --data {flags.output}")


if __name__ == "__main__":
    run_script(main)
