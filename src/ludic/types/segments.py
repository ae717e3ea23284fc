"""The model calls of a rollout that form one training item. `ludic.batch_gen.stitching` makes the items, `ludic view` shows
what was computed of them.

Consecutive calls belong together as long as each prompt extends the previous prompt and completion exactly, across turns and tool
loops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ludic.types.rollout import Rollout
from ludic.types.steps import Step, Turn
from ludic.types.tokens import TokenTrace


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A step with sampled tokens, and its turn."""

    step: Step
    turn: Turn
    ends_turn: bool
    """True if it is the last call of its turn."""

    @property
    def trace(self) -> TokenTrace:
        assert self.step.trace is not None, "only steps with one are calls"
        return self.step.trace

    @property
    def kind(self) -> tuple[float | None, bool, bool]:
        """Facts that all calls of one item share, because the item stores them once."""
        trace = self.trace
        return trace.temperature, trace.completion_logprobs is not None, bool(trace.version_runs)


def call_segments(rollout: Rollout, *, per_turn: bool = False) -> list[list[Step]]:
    """The model calls of each item that `stitch_rollout` makes of a rollout."""
    return [[call.step for call in segment] for segment in segments_of(model_calls(rollout), per_turn=per_turn)]


def model_calls(rollout: Rollout) -> list[ModelCall]:
    turn_of = {step.id: turn for turn in rollout.turns() for step in turn.steps}
    sampling = rollout.sampling_steps
    last_calls = {turn_of[call.id].number: call.id for call in sampling}
    return [ModelCall(c, turn_of[c.id], ends_turn=last_calls[turn_of[c.id].number] == c.id) for c in sampling]


def segments_of(calls: Sequence[ModelCall], *, per_turn: bool) -> list[list[ModelCall]]:
    segments: list[list[ModelCall]] = []
    for call in calls:
        if (
            segments
            and _continues(segments[-1][-1], call)
            and not (per_turn and segments[-1][-1].turn is not call.turn)
        ):
            segments[-1].append(call)
        else:
            segments.append([call])
    return segments


def _continues(before: ModelCall, call: ModelCall) -> bool:
    """True if the prompt starts with the prompt and the completion of `before`."""
    prompt, sent, sampled = (
        call.trace.prompt_token_ids,
        before.trace.prompt_token_ids,
        before.trace.completion_token_ids,
    )
    end = len(sent) + len(sampled)
    return (
        call.kind == before.kind
        and len(prompt) >= end
        and np.array_equal(prompt[: len(sent)], sent)
        and np.array_equal(prompt[len(sent) : end], sampled)
        and call.trace.images[: len(before.trace.images)] == before.trace.images
    )
