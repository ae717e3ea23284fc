"""One rank of a group: `torchrun … -m tests.integration.fsdp_worker FOLDER JOB…`; rank 0 writes FOLDER/JOB.pt.

A job is run:NAME, gradients:NAME:REFERENCE (as in fsdp_scenarios), or tensor_parallel.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ludic.distributed.ranks import Ranks, join_ranks, leave_ranks
from ludic.distributed.tensor_parallel import load_tensor_parallel
from tests.integration.fsdp_scenarios import LOSSES, RUNS, SPECIAL_RUNS, gradients, llama, train


def done(job: str, ranks: Ranks | None) -> Any:
    kind, *rest = job.split(":")
    if kind == "tensor_parallel":
        return train(RUNS["full"], ranks, model=cut_over(ranks))
    if kind == "run":
        return train((RUNS | SPECIAL_RUNS)[rest[0]], ranks)
    found = gradients(LOSSES[rest[0]], ranks, reference=rest[1])
    return found if ranks is None else {**found, "loss": ranks.sum(found["loss"])}


def cut_over(ranks: Ranks | None) -> Any:
    """The model of the scenario "full", by transformers' plan for tensor parallel."""
    assert ranks is not None, "tensor parallelism needs several processes"
    folder = ranks.broadcast(tempfile.mkdtemp() if ranks.is_first else None)
    if ranks.is_first:
        llama().save_pretrained(folder)
    ranks.barrier()
    return load_tensor_parallel(folder, ranks, dtype=torch.float32)


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
