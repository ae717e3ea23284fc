"""A training run in a separate process, to be killed: `python -m tests.unit.training.bandit_run FOLDER STEPS [PAUSE_S [PASSES]]`.

It resumes from the newest checkpoint if there is one, saves every fifth step and writes metrics.jsonl. PASSES: over each batch, in
two mini-batches.
"""

import asyncio
import sys
from pathlib import Path

from ludic.training import CheckpointConfig, JSONLLogger, TrainerConfig, make_grpo
from tests.unit.training.bandit import bandit_trainer


class Slowly:
    """A batch source that leaves time to be killed in."""

    def __init__(self, source, pause_s):
        self._source, self._pause_s = source, pause_s

    async def next_batch(self):
        await asyncio.sleep(self._pause_s)
        return await self._source.next_batch()

    def state_dict(self):
        return self._source.state_dict()

    def load_state_dict(self, state):
        self._source.load_state_dict(state)


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    parts = {"updates_per_batch": int(sys.argv[4]), "mini_batches": 2} if len(sys.argv) > 4 else {}
    checkpoints = folder / "checkpoints"
    trainer, engine = bandit_trainer(
        make_grpo(group_size=4),
        group_size=4,
        num_prompts=4,
        cfg=TrainerConfig(lr=1e-2, max_seq_len=64, weight_decay=0.0, **parts),
        make_source=lambda source: Slowly(source, pause_s),
        checkpoint_config=CheckpointConfig(output_dir=str(checkpoints), every_n_steps=5),
        train_logger=JSONLLogger(folder / "metrics.jsonl"),
        resume_from="latest" if any(checkpoints.glob("step_*")) else None,
    )
    asyncio.run(trainer.train(num_steps - trainer.step))
    sys.stdout.write(f"ended at {trainer.step}\n")
    engine.close()


if __name__ == "__main__":
    main()
