"""One rank of a group: `torchrun … -m tests.integration.fsdp_worker FOLDER JOB…`; rank 0 writes FOLDER/JOB.pt.

A job is run:NAME, gradients:NAME:REFERENCE (as in fsdp_scenarios), prefixes:NAME:REFERENCE (of groups behind a prompt, which
several ranks compute once and one process does not), context:NAME:REFERENCE (the same by context parallel), resumed (in the
middle of a batch), or tokens (the scenario "full" and what TokenRecorder writes of it).
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ludic.distributed.ranks import Ranks, join_ranks, leave_ranks
from ludic.training import CheckpointConfig
from ludic.training.learner.optimizer import local_part
from ludic.training.learner.token_recorder import TokenRecorder
from tests.integration.fsdp_scenarios import LOSSES, RUNS, SPECIAL_RUNS, gradients, train, trainer_of


def done(job: str, ranks: Ranks | None) -> Any:
    kind, *rest = job.split(":")
    if kind == "tokens":
        return recorded_tokens(ranks)
    if kind == "resumed":
        return resumed_in_the_middle_of_a_batch(ranks)
    if kind == "run":
        return train((RUNS | SPECIAL_RUNS)[rest[0]], ranks)
    if kind == "context":
        return gradients(LOSSES[rest[0]], ranks, reference=rest[1], shares_rows=True)
    prefixes: dict[str, Any] = {}
    if kind == "prefixes":
        prefixes = {"has_prefixes": True, "share_prefixes": ranks is not None, "budget": 128}
    found = gradients(LOSSES[rest[0]], ranks, reference=rest[1], **prefixes)
    return found if ranks is None else {**found, "loss": ranks.sum(found["loss"])}


def resumed_in_the_middle_of_a_batch(ranks: Ranks | None) -> dict[str, int]:
    """How many tensors, over all ranks, differ between an unbroken run and one that was resumed after its first step."""
    assert ranks is not None, "of one process there is a unit test"
    folder = ranks.broadcast(tempfile.mkdtemp() if ranks.is_first else None)
    run, config = RUNS["mini_batches"], CheckpointConfig(folder, every_n_steps=1, max_to_keep=None)
    unbroken = trainer_of(run, ranks, checkpoint_config=config)
    assert unbroken.train_sync(run.steps)["train/step"] == run.steps
    resumed = trainer_of(run, ranks, checkpoint_config=config, resume_from=1)
    assert resumed.train_sync(run.steps - 1)["train/step"] == run.steps
    pairs = zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True)
    differ = [not torch.equal(local_part(a), local_part(b)) for a, b in pairs]
    return {"num_different": int(ranks.sum(sum(differ))), "num": len(differ)}


def recorded_tokens(ranks: Ranks | None) -> dict[str, Any]:
    """A whole run, and its records of all ranks together: by step, rollout and segment."""
    made = tempfile.mkdtemp() if ranks is None or ranks.is_first else None
    folder = Path(made if ranks is None else ranks.broadcast(made))
    recorder = TokenRecorder(folder)
    run = train(RUNS["full"], ranks, token_recorder=recorder)
    recorder.close()
    if ranks is not None:
        ranks.barrier()
    samples: dict[str, list[float]] = {}
    for path in sorted(folder.iterdir()):
        with np.load(path) as record:
            ends = np.cumsum(record["num_tokens"])
            for n, id in enumerate(record["rollout_id"].tolist()):
                key = f"{path.name[:11]} {id.decode()} {record['segment'][n]}"
                assert key not in samples, "each sample is computed by one rank"
                samples[key] = record["logp"][ends[n] - record["num_tokens"][n] : ends[n]].tolist()
    return {"run": run, "files": sorted(path.name for path in folder.iterdir()), "samples": samples}


def main(folder: Path, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(timeout_s=120, device="cpu")
    for job in jobs:
        result = done(job, ranks)
        if ranks.is_first:
            torch.save(result, folder / f"{job.replace(':', '-')}.pt")
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
