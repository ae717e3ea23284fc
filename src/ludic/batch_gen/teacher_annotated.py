"""`TeacherAnnotatedBatchSource`: batches of another source, with a teacher's log-probs on every sample.

What becomes of them is the algorithm's business (`ludic.training.make_opd`). Inside an AsyncRolloutBatchSource, scoring
overlaps with training.
"""

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np

from ludic.batch_gen.teachers import OneTeacher, Teachers
from ludic.interaction.concurrently import all_or_none
from ludic.types import (
    AccountsForItems,
    BatchSource,
    ConfigError,
    FollowsVersions,
    LogprobArray,
    SAWBatch,
    SAWItem,
    Stateful,
    TeacherScorer,
)


class TeacherAnnotatedBatchSource:
    """Attaches `teacher_logps` to every sample of `inner`; nothing else changes, and none is left out."""

    def __init__(
        self,
        inner: BatchSource,
        teacher_scorer: TeacherScorer | Teachers,
        teacher_chunk_size: int | None = None,
        *,
        tokenizer_fingerprint: str,
    ) -> None:
        """`tokenizer_fingerprint` is the student's (`ludic.inference.tokenizer_fingerprint`); a teacher with another is refused.

        `teacher_chunk_size` is how many samples are scored at a time; None: all of a batch.
        """
        if teacher_chunk_size is not None and teacher_chunk_size < 1:
            raise ConfigError(f"teacher_chunk_size={teacher_chunk_size}; it must be at least 1, or None for all.")
        self._inner = inner
        self._teachers = teacher_scorer if isinstance(teacher_scorer, Teachers) else OneTeacher(teacher_scorer)
        self._teachers.require_tokenizer(tokenizer_fingerprint)
        self._chunk_size = teacher_chunk_size
        if isinstance(inner, AccountsForItems):
            # Had every annotated source these, it would be taken for one that keeps accounts, and refused in a mixture.
            self.notify_trained = inner.notify_trained
            self.notify_saved = inner.notify_saved

    async def next_batch(self) -> SAWBatch:
        batch = await self._inner.next_batch()
        started = time.perf_counter()
        at_once = asyncio.Semaphore(self._chunk_size or max(len(batch), 1))

        async def annotated_in_turn(item: SAWItem) -> SAWItem:
            async with at_once:
                return await annotated(item, self._teachers.teacher_for(item))

        items = await all_or_none(annotated_in_turn(item) for item in batch.items)
        return SAWBatch(items=items, meta={**batch.meta, "teacher_s": time.perf_counter() - started})

    get_next_batch = next_batch

    # --- what the trainer tells its source, and what a resume needs ---

    def notify_version(self, version: int) -> None:
        if isinstance(self._inner, FollowsVersions):
            self._inner.notify_version(version)

    def state_dict(self) -> dict[str, Any]:
        """The inner source's: teachers do not change."""
        return {"inner": self._inner.state_dict() if isinstance(self._inner, Stateful) else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self._inner, Stateful):
            self._inner.load_state_dict(state["inner"])


async def annotated(item: SAWItem, teacher: TeacherScorer) -> SAWItem:
    """The sample with the teacher's log-prob of every action token."""
    logps = await _teacher_logps(item, teacher)
    return replace(item, attachments=replace(item.attachments, teacher_logps=logps))


async def _teacher_logps(item: SAWItem, teacher: TeacherScorer) -> LogprobArray:
    counts = item.attention_mask  # a sample that somebody padded is scored without the padding
    ids, where = item.input_ids[counts], np.flatnonzero(item.action_mask[counts])
    if not len(where):
        return np.zeros(0, dtype=np.float32)
    first, end = int(where[0]), int(where[-1]) + 1
    # From the first action on: what lies between two actions is scored with them, and left out afterwards.
    scores = await teacher.score_tokens(ids[:first], ids[first:end], temperature=item.attachments.temperature or 1.0)
    return np.asarray(scores, dtype=np.float32)[where - first]
