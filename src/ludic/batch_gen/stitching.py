"""Stitches the model calls of a rollout into training items, token for token.

Consecutive calls form one item as long as each prompt extends the previous prompt and completion exactly, across turns and tool
loops: sampled tokens are actions, all others are state. A prompt that does not extend the previous call (a rewritten history)
starts a new item. Nothing is retokenised.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ludic.types import (
    FloatArray,
    Rollout,
    RolloutStepKey,
    SampleAttachments,
    SampleOrigin,
    SAWItem,
    Step,
    is_parse_failure,
    was_rejected_as_cut_off,
)
from ludic.types.columns import joined
from ludic.types.segments import ModelCall, model_calls, segments_of

MAX_INFO_TEXT = 256
"""Longer texts of a step's info are not copied into an item's meta."""


def stitch_rollouts(
    rollouts: Iterable[Rollout],
    weights: Mapping[RolloutStepKey, float],
    *,
    per_turn: bool = False,
    require_logprobs: bool = False,
) -> list[SAWItem]:
    """The items of all rollouts, in order; failed rollouts give none."""
    return [
        item
        for rollout in rollouts
        for item in stitch_rollout(rollout, weights, per_turn=per_turn, require_logprobs=require_logprobs)
    ]


def stitch_rollout(
    rollout: Rollout,
    weights: Mapping[RolloutStepKey, float],
    *,
    per_turn: bool = False,
    require_logprobs: bool = False,
) -> list[SAWItem]:
    """The items of one rollout.

    The weight of an action token is the credit of the last step of its turn. `per_turn` starts a new item at every turn.
    """
    if rollout.failure is not None:
        return []
    calls = model_calls(rollout)
    if require_logprobs:
        _require_logprobs(rollout, calls)
    segments = segments_of(calls, per_turn=per_turn)
    rewards, origin = _call_rewards(rollout, calls), SampleOrigin.of_rollout(rollout)
    return [_item(rollout, segment, number, weights, rewards, origin) for number, segment in enumerate(segments)]


# --- one item ---


def _call_rewards(rollout: Rollout, calls: Sequence[ModelCall]) -> dict[str, float]:
    """Reward of each call by its id: the reward of the turn that it ends. They sum to the total reward.

    The last call also gets the reward of turns without a call (another player's move decided the game).
    """
    rewards = {call.step.id: call.turn.total_reward if call.ends_turn else 0.0 for call in calls}
    if calls:
        rewards[calls[-1].step.id] += rollout.total_reward - sum(rewards.values())
    return rewards


def _item(
    rollout: Rollout,
    calls: list[ModelCall],
    number: int,
    weights: Mapping[RolloutStepKey, float],
    rewards: Mapping[str, float],
    origin: SampleOrigin,
) -> SAWItem:
    last = calls[-1].trace
    # Each prompt contains the calls before it, so the last call holds the whole sequence.
    ids = np.concatenate([last.prompt_token_ids, last.completion_token_ids])
    lengths = np.array([len(call.trace.completion_token_ids) for call in calls])
    mask = np.zeros(len(ids), dtype=np.bool_)
    for call, length in zip(calls, lengths, strict=True):
        start = len(call.trace.prompt_token_ids)
        mask[start : start + length] = True
    token_rewards = np.zeros(lengths.sum(), dtype=np.float32)
    token_rewards[lengths.cumsum() - 1] = [rewards[call.step.id] for call in calls]  # at the last token of each call
    weight, token_weights = _weights([_weight(rollout, call, weights) for call in calls], lengths)
    return SAWItem(
        input_ids=ids,
        attention_mask=None,
        action_mask=mask,
        weight=weight,
        meta={**small_facts(calls[-1].turn.last), "request_meta": rollout.request_meta},
        attachments=SampleAttachments(
            **joined([call.trace for call in calls]),
            token_weights=token_weights,
            token_rewards=token_rewards,
            token_turns=np.repeat(np.array([call.turn.number for call in calls], dtype=np.float32), lengths),
        ),
        origin=_origin(origin, calls, number),
    )


def _weights(by_call: list[float], lengths: npt.NDArray[np.int64]) -> tuple[float, FloatArray | None]:
    """The item's weight, and one per action token where its calls differ."""
    if len(set(by_call)) == 1:
        return by_call[0], None
    return float(np.average(by_call, weights=lengths)), np.repeat(np.array(by_call, dtype=np.float32), lengths)


def _weight(rollout: Rollout, call: ModelCall, weights: Mapping[RolloutStepKey, float]) -> float:
    index = call.turn.last.index
    try:
        weight = float(weights[rollout.id, index])
    except KeyError:
        raise KeyError(
            f"Credit assignment gave no weight to step {index} of rollout {rollout.id}; an assigner covers every step "
            "of every rollout that it is given."
        ) from None
    if not np.isfinite(weight):
        raise ValueError(f"Credit assignment gave step {index} of rollout {rollout.id} the weight {weight}.")
    return weight


def _require_logprobs(rollout: Rollout, calls: Sequence[ModelCall]) -> None:
    missing = [call.step.index for call in calls if call.trace.completion_logprobs is None]
    if missing:
        raise ValueError(
            f"Log-probs of the sampled tokens were asked for, but steps {missing} of rollout {rollout.id} have none. Use a "
            "client that returns them, or a ReturnSpec without return_chosen_logprobs."
        )


def _origin(whole: SampleOrigin, calls: list[ModelCall], number: int) -> SampleOrigin:
    """`whole`: the facts of the rollout, which all its items share."""
    last = calls[-1].turn.last
    return replace(
        whole,
        segment=number,
        step_index=last.index,
        step_kind=last.kind,
        num_turns=len({call.turn.number for call in calls}),
        # A turn whose calls lie in two items counts where it ends.
        reward=sum(call.turn.total_reward for call in calls if call.ends_turn),
        truncated=last.truncated,
        terminated=last.terminated,
        finish_reason=calls[-1].trace.finish_reason,
        num_parse_errors=sum(is_parse_failure(call.step) for call in calls),
        num_cut_off=sum(was_rejected_as_cut_off(call.step) for call in calls),
    )


def small_facts(step: Step) -> dict[str, Any]:
    """Numbers, flags and short texts of a step's info, for filters and averages; no lists, messages or observations."""
    return {
        key: value
        for key, value in step.info.items()
        if value is None
        or isinstance(value, (bool, int, float))
        or (isinstance(value, str) and len(value) <= MAX_INFO_TEXT)
    }
