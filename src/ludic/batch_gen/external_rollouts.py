"""Adapters for custom loops: build rollouts and batches from model calls made elsewhere."""

from collections.abc import Sequence
from typing import NamedTuple

from ludic.batch_gen.stitching import stitch_rollouts
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    Message,
    RequestsExhausted,
    Rollout,
    SAWBatch,
    StopReason,
    TokenTrace,
)


class ExternalCall(NamedTuple):
    """One model call."""

    messages: Sequence[Message]
    """The prompt."""
    text: str
    """The reply."""
    trace: TokenTrace
    turn_id: str | None = None
    """Calls with the same one form a turn; None: a turn by itself."""


def rollout_of_calls(calls: Sequence[ExternalCall], *, reward: float, is_finished: bool, group_id: str) -> Rollout:
    """A rollout with one turn per call, unless they name their turns; the last turn gets the whole reward."""
    steps = [
        AgentStep(
            index=n,
            prompt_messages=call.messages,
            action=call.text,
            trace=call.trace,
            turn_id=f"turn {n}" if call.turn_id is None else call.turn_id,
        )
        for n, call in enumerate(calls)
    ]
    end = EnvironmentStep(
        index=len(steps),
        prev_obs=None,
        action=steps[-1].action,
        parsed_action=None,
        next_obs=None,
        source_agent_step_id=steps[-1].id,
        agent_step_ids=[steps[-1].id],
        reward=reward,
        terminated=is_finished,
        truncated=not is_finished,
        turn_id=steps[-1].turn_id,
    )
    stop = StopReason.TERMINATED if is_finished else StopReason.MAX_STEPS
    return Rollout(steps=[*steps, end], stop=stop, meta={"request_meta": {"group_id": group_id}})


def weighted_batch(rollouts: Sequence[Rollout], weights: Sequence[float]) -> SAWBatch:
    """A batch with one weight per rollout. A rollout gives one item, or several if a prompt does not extend the previous one."""
    by_step = {
        (rollout.id, step.index): weight
        for rollout, weight in zip(rollouts, weights, strict=True)
        for step in rollout.steps
    }
    return SAWBatch(items=stitch_rollouts(rollouts, by_step, require_logprobs=True))


class OneBatchSource:
    """A source for `Trainer.train_step` that returns the given batch once."""

    def __init__(self) -> None:
        self._batch: SAWBatch | None = None

    def give(self, batch: SAWBatch) -> None:
        self._batch = batch

    async def next_batch(self) -> SAWBatch:
        if self._batch is None:
            raise RequestsExhausted("The batch had nothing to train on: all weights are zero, or nothing fits.")
        given, self._batch = self._batch, None
        return given
