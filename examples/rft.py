"""Rejection-sampling fine-tuning: sample, keep what earned enough, imitate it, repeat.

Shows: the algorithm rft, which keeps and imitates; a batch source of your own in a run: ReplayBatchSource makes several updates
of each sampling. Every flag of `ludic train` works here, too.
Needs: nothing.
Takes: half a minute on two CPU cores, much of it imports.

    python examples/rft.py
    python examples/rft.py --updates-per-round 1 --algo-set min_reward=0.5

For a task of your own, replace `Letters`; nothing else knows of it.
"""

from dataclasses import dataclass
from typing import Any

from ludic.batch_gen import ReplayBatchSource
from ludic.cli.script import ScriptFlags, parse_script, run_script, train_script
from ludic.envs import SingleAgentEnv
from ludic.run import build
from ludic.types import BatchSource, StepOutcome


@dataclass(frozen=True)
class Flags(ScriptFlags):
    """The length of a round."""

    updates_per_round: int = 2
    """Optimizer steps of one sampling."""


class Letters(SingleAgentEnv):
    """Asked x, answer with a letter; asked y, with anything else. One turn; chance earns about one half."""

    blocking = False

    def __init__(self, sample: str) -> None:
        super().__init__()
        self.asked = sample

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.asked, {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", reward=float(action.isalpha() == (self.asked == "x")), terminated=True)


def main(args: list[str]) -> int:
    flags, config = parse_script(
        __doc__, args, Flags, name="rft", model="tiny", algo="rft", steps=40, group_size=8, rollouts_per_update=64,
        max_steps=1, max_tokens=1, max_seq_len=64, lr=3e-3, weight_decay=0.0, logger=("print",),
    )  # fmt: skip
    rounds, num_answers = flags.updates_per_round, config.rollouts.rollouts_per_update

    def replayed(source: BatchSource) -> BatchSource:
        """Every `rounds`-th batch is sampled; the others are drawn from what was sampled before."""
        return ReplayBatchSource(
            source, capacity=num_answers, num_replayed=num_answers // 2, max_lag=2 * rounds, fresh_every=rounds
        )

    run = build(config, env=Letters, data=["x", "y"], source=replayed if rounds > 1 else None)
    return train_script(run, flags)


if __name__ == "__main__":
    run_script(main)
