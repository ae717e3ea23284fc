"""Settings of the section rollouts: how episodes are played, and which engine or servers generate."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from ludic.run.config.entries import Arguments, Section
from ludic.run.features.base import engine_names
from ludic.run.settings import may_change, one_of
from ludic.util.urls import PUT_LOGIN, refuse_login

Push: TypeAlias = Literal["merged", "adapter"]
_TOKENS = re.compile("all|off|every=0*([1-9][0-9]*)")
Transport: TypeAlias = Literal["auto", "shared_memory", "cuda_ipc", "file", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Section):
    """The episodes of an update, and the engine that samples them."""

    rollouts: tuple[Path, ...] = ()
    """Train on the rollouts of these files, which `ludic rescore` or another run wrote, instead of playing."""
    preferences: Path | None = None
    """For dpo, ipo and kto: train on the pairs or labels of this file (JSONL, Parquet, hub:NAME:SPLIT) instead of playing,
    rollouts_per_update of them at a time. No TARGET is needed then; an env is for evaluation (docs/algorithms/dpo.md)."""
    rollouts_per_update: int = 128
    """Episodes per batch; a multiple of group_size. A batch is one update, unless updates_per_batch or mini_batches is above 1."""
    close_batch_at: float = 1.0
    """Below 1, an update begins when this share of the episodes is done, in whole groups; the others go on into the next one, at
    most max_lag versions later."""
    dynamic_sampling: int = 0
    """Above 1, groups of equal returns are replaced by fresh tasks, in at most this many rounds of an update. 0: they stay."""
    curriculum: str | None = None
    """Curriculum: it chooses the next tasks (`ludic parts curriculum`), or file.py:Class. Default: the data in random order, or
    new seeds."""
    curriculum_set: Arguments = field(default_factory=dict)
    """Argument of the curriculum."""
    concurrency: int | None = may_change(None)
    """Episodes at a time. It changes the speed, not the episodes. Default: as many as the engine computes together (512 on a GPU,
    64 on a CPU), of which those wait that its free memory has no room for; with servers 64."""
    max_lag: int | None = None
    """Above 0, the next batch is generated while this one is trained on, at most this many versions behind; each update makes one.
    Default: 0; in a pipeline those of 4 batches; with close_batch_at those of 1."""
    engine: str = one_of("local", engine_names)
    """Engine that generates: local is the engine inside this process; vllm a server, or several; pipeline separate actor
    processes (`ludic actor`, or `ludic launch` for all); a package may add others (entry points `ludic.features`)."""
    server: tuple[str, ...] = may_change(())
    """For vllm, also as actor_engine: servers that are running (`ludic serve --engine vllm`). Default: one is started for the
    run, in a pipeline by `ludic launch`."""
    control_token: Path | None = may_change(None)
    """For vllm: the file with the servers' control token, or the run folder it is in. Default: $LUDIC_CONTROL_TOKEN."""
    server_memory: float = may_change(0.4)
    """For vllm: the share of the GPU's memory that a server started for the run may take; the trainer has the rest."""
    server_sleep: bool = may_change(False)
    """For vllm: a server started for the run frees the GPU's memory while the trainer computes, so that server_memory may be most
    of it (docs/serving.md). Not with max_lag."""
    server_quantization: Literal["fp8"] | None = None
    """For vllm: a server started for the run rounds its weights to 8 bits when they arrive; watch logp_difference_abs
    (docs/memory.md)."""
    server_hung_after: float = may_change(60.0)
    """For vllm: a server started for the run that leaves /health unanswered for this many seconds is restarted."""
    push: Push = "merged"
    """For vllm and LoRA: send all weights with the adapter merged into them, or the adapter alone."""
    transport: Transport = may_change("auto")
    """For vllm: how all weights reach the servers (docs/weights.md). auto: shared memory on this machine, else gloo; cuda_ipc: a
    server on the trainer's GPU."""
    save_rollouts: bool = may_change(True)
    """Write every episode to the run folder."""
    save_tokens: str = may_change("all")
    """Write to the run folder what the trainer computes of every token (advantage, log-prob, entropy), for `ludic view`: all,
    every=N (each N-th update), or off."""
    max_failed_share: float = may_change(0.5)
    """The run stops when a larger share of an update's episodes raised an error, each tried twice; 1 never stops it."""

    RANGES = (
        "max_failed_share in [0, 1]",
        "close_batch_at server_memory in (0, 1]",
        "server_hung_after in (0, inf)",
        "rollouts_per_update concurrency in [1, inf)",
        "max_lag dynamic_sampling in [0, inf)",
    )

    def problems(self) -> Iterator[str]:
        for url in self.server:
            refuse_login("server", url, PUT_LOGIN)
        if not _TOKENS.fullmatch(self.save_tokens):
            yield f"save_tokens = {self.save_tokens!r}; there are all, off, and every=N, such as every=10."
        if self.dynamic_sampling == 1:
            yield "dynamic_sampling = 1 leaves no round to replace groups in; give 2 or more, or 0 for none."
        if self.curriculum_set and self.curriculum is None:
            yield "curriculum_set holds arguments of a curriculum, but none is named; give --curriculum."

    @property
    def tokens_every(self) -> int:
        """`save_tokens` as a number of updates; 0 is off."""
        found = _TOKENS.fullmatch(self.save_tokens)
        return int((found and found[1]) or self.save_tokens == "all")
