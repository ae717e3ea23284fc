"""A memory that is learned: what was said at the beginning is needed to the end, and a prompt holds one turn.

Shows: `FoldingAgent`, whose summaries are trained with the episode's advantage like every other reply; the same task with a
sliding window, which can only guess; a model of 30,000 weights, made here. Every flag of `ludic train` works here, too.
Needs: nothing.
Takes: half a minute on two CPU cores.

    python examples/folding.py
    python examples/folding.py --memory window
    python examples/folding.py --memory full
    python examples/folding.py --algo ppo --algo-set over=turns --group-size 1
"""

from dataclasses import dataclass
from typing import Any, Literal

from ludic.cli.script import ScriptFlags, parse_script, run_script, train_script
from ludic.envs import SingleAgentEnv
from ludic.models.loading import tiny_llama, word_tokenizer
from ludic.run import Run, RunConfig, build
from ludic.types import StepOutcome

FACTS = ("red", "blue", "green", "gold")
WORDS = (*FACTS, "now?", "note:", "noted:")
MEMORY: dict[str, dict[str, Any]] = {
    "folding": {
        "agent": "folding",
        # A model that reads is better served by the prompts that FoldingAgent has.
        "agent_set": {"summary_prompt": "note:", "summary_heading": "noted:"},
        "context": "summarised",
        "context_set": {"max_turns": 1},
    },
    "window": {"context": "sliding_window", "context_set": {"max_turns": 1}},
    "full": {},
}


@dataclass(frozen=True)
class Flags(ScriptFlags):
    """The notes that are kept, for how long, and how."""

    memory: Literal["folding", "window", "full"] = "folding"
    """A summary after each turn, a window of one turn, or everything."""
    turns: int = 2
    """The colour is shown before the first and asked for in each."""


class Recall(SingleAgentEnv):
    """A colour is shown once; every reply should name it, and earns its share of 1 if it does."""

    blocking = False

    def __init__(self, sample: str, turns: int) -> None:
        super().__init__()
        self.fact, self.turns = sample, turns

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._turns_left = self.turns
        return self.fact, {}

    def env_step(self, action: str) -> StepOutcome:
        self._turns_left -= 1
        return StepOutcome("now?", float(action == self.fact) / self.turns, terminated=self._turns_left == 0)


def make_run(config: RunConfig, flags: Flags) -> Run:
    tokenizer = word_tokenizer(WORDS)
    return build(
        config,
        env=Recall,
        set={"turns": flags.turns},
        max_steps=flags.turns,
        data=FACTS,
        model=tiny_llama(len(tokenizer), width=32, layers=2, max_length=64, seed=config.trainer.seed),
        tokenizer=tokenizer,
        **MEMORY[flags.memory],
    )


def main(args: list[str]) -> int:
    flags, config = parse_script(
        __doc__, args, Flags, name="folding", steps=90, group_size=8, rollouts_per_update=64, concurrency=128,
        max_tokens=1, max_seq_len=64, lr=5e-3, weight_decay=0.0, logger=("print",),
    )  # fmt: skip
    return train_script(make_run(config, flags), flags)


if __name__ == "__main__":
    run_script(main)
