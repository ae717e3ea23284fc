"""What updates leave behind in a run: no objects."""

import gc
from collections import Counter

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from ludic.envs import SingleAgentEnv
from ludic.run import build
from ludic.types import StepOutcome


class Letter(SingleAgentEnv):
    """Every episode has its own prompt; a reply of an even number of letters earns 1."""

    blocking = False

    def env_reset(self, *, seed=None):
        return f"Say something about {seed}.", {}

    def env_step(self, action):
        return StepOutcome("", float(len(action) % 2), terminated=True, info={})


class Counting:
    """Counts the living objects of Ludic's classes, and tensors, after each update."""

    def __init__(self) -> None:
        self.seen: list[Counter[str]] = []

    def log(self, step, stats):
        gc.collect()
        kinds = [f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects()]
        self.seen.append(Counter(kind for kind in kinds if kind.startswith("ludic.") or "Tensor" in kind))


def test_updates_leave_no_objects(tmp_path):
    counting = Counting()
    with build(
        env=Letter, model="tiny", steps=14, group_size=2, rollouts_per_update=4, max_tokens=2, cut_off="read", runs=tmp_path,
        checkpoint_every=4, logger=[counting],
    ) as run:  # fmt: skip
        run.train()
    # Updates 6 and 14 are as far behind a checkpoint.
    grown = {kind: count for kind, count in (counting.seen[13] - counting.seen[5]).items() if count >= 8}
    assert not grown, f"objects that each update leaves: {grown}"
