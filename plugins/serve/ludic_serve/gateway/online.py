"""Learning from finished sessions of agents outside: `SessionBatchSource` makes batches of them, and `OutsideSession` is where a
run gets them that `ludic gateway --train` begins.

The gateway and the trainer run on one event loop.
"""

import asyncio
import logging
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar, NoReturn

from ludic.batch_gen.build_batch import HasCreditAssigner, credit_of
from ludic.batch_gen.stitching import stitch_rollouts
from ludic.distributed import SharedWeightsPublisher
from ludic.inference.local import LocalEngine
from ludic.run.folder import ResumePoint
from ludic.run.model import make_template
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.resolve import ResolvedRun
from ludic.run.session import PolicySession
from ludic.training import with_episode_credit
from ludic.types import ConfigError, CreditAssigner, Rollout, SAWBatch
from ludic_serve.gateway.session import Policy, Session

logger = logging.getLogger(__name__)


class SessionBatchSource:
    """Takes closed sessions that were rewarded, and gives them out by the batch, oldest first.

    A rule that compares groups takes sessions that were opened with a `group`, once as many of it are there as the rule wants.
    Sessions wait in memory: those that no batch has taken are lost at the end.
    """

    def __init__(
        self,
        *,
        algorithm: HasCreditAssigner | None = None,
        credit_assigner: CreditAssigner | None = None,
        sessions_per_batch: int = 16,
        max_waiting: int = 1024,
    ) -> None:
        """`max_waiting`: sessions of incomplete groups; beyond it, the group that waits longest is dropped."""
        self._credit = credit_of(credit_assigner, algorithm)
        self._group_size: int = getattr(self._credit, "group_size", None) or 1
        if sessions_per_batch < 1 or sessions_per_batch % self._group_size:
            raise ConfigError(
                f"sessions_per_batch={sessions_per_batch} is not a multiple of the group size, {self._group_size}."
            )
        self._sessions_per_batch, self._max_waiting = sessions_per_batch, max_waiting
        self._ready: list[list[Rollout]] = []
        self._incomplete: dict[str, list[list[Rollout]]] = {}
        self._arrived = asyncio.Event()
        self.num_taken = 0
        """Sessions that are, or were, part of a batch."""
        self.num_skipped = 0
        """Sessions without a reward, an answered call or (where groups are compared) a group, and dropped groups."""

    @property
    def num_waiting(self) -> int:
        return len(self._ready) + sum(map(len, self._incomplete.values()))

    def add(self, session: Session, rollouts: Sequence[Rollout]) -> None:
        """Called for each closed session: Gateway(on_closed=source.add)."""
        if not rollouts or not session.is_rewarded or (self._group_size > 1 and session.group is None):
            self.num_skipped += 1
            if self.num_skipped == 1 and rollouts and session.is_rewarded:
                logger.warning('a session without a group is not trained on: open it with {"group": "task 17"}.')
            return
        if self._group_size == 1 or session.group is None:
            self._ready.append(list(rollouts))
        else:
            members = self._incomplete.setdefault(session.group, [])
            members.append(list(rollouts))
            if len(members) == self._group_size:
                self._ready += self._incomplete.pop(session.group)
            elif sum(map(len, self._incomplete.values())) > self._max_waiting:
                oldest = next(iter(self._incomplete))
                dropped = self._incomplete.pop(oldest)
                self.num_skipped += len(dropped)
                logger.warning(
                    "the group %r is dropped: %d of %d sessions came", oldest, len(dropped), self._group_size
                )
        self._arrived.set()

    async def next_batch(self) -> SAWBatch:
        while len(self._ready) < self._sessions_per_batch:
            self._arrived.clear()
            await self._arrived.wait()
        taken, self._ready = self._ready[: self._sessions_per_batch], self._ready[self._sessions_per_batch :]
        self.num_taken += len(taken)
        rollouts = [rollout for session in taken for rollout in session]
        items = stitch_rollouts(rollouts, self._credit.compute(rollouts), require_logprobs=True)
        averages = {
            "avg_total_reward": fmean(sum(rollout.total_reward for rollout in session) for session in taken),
            "avg_turns": fmean(sum(len(rollout.sampling_steps) for rollout in session) for session in taken),
            "avg_completion_length": fmean(item.num_action_tokens for item in items) if items else 0.0,
        }
        counts = {
            "num_rollouts": len(taken),
            "num_samples": len(items),
            "num_waiting": self.num_waiting,
            "num_skipped": self.num_skipped,
        }
        metrics = {name: float(value) for name, value in {**counts, **averages}.items()}
        meta: dict[str, Any] = {"source": "gateway", **counts, **averages, "rollout_metrics": metrics}
        return SAWBatch(items=items, meta=meta)


class OutsideSession(PolicySession):
    """An engine in this process answers the gateway's sessions; those that are closed with a reward are the samples."""

    max_sequences: ClassVar[int | None] = None
    max_model_len: ClassVar[int | None] = None
    """Limits of the engine, as `LocalEngine` has them."""

    def __init__(self, run: ResolvedRun, start: ResumePoint) -> None:
        super().__init__(run, start)
        loaded = self._loaded
        engine = LocalEngine(
            loaded.model, loaded.tokenizer, max_sequences=self.max_sequences, max_model_len=self.max_model_len
        )
        self._closing.callback(engine.close)
        template = make_template(loaded.tokenizer, with_tools=True)
        self.policy = Policy(client=engine, chat_template=template, model=loaded.name)
        self.publisher = SharedWeightsPublisher(engine)
        self.algorithm = with_episode_credit(make_algorithm(run))
        self.sessions = SessionBatchSource(
            algorithm=self.algorithm, sessions_per_batch=run.config.rollouts.rollouts_per_update
        )
        self.source = self.sessions

    def _evaluation(self) -> NoReturn:
        raise ConfigError("A run that learns from sessions has no tasks to evaluate on.")
