"""Builds training items by rendering messages, for data without stored tokens (written by another model or a person)."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ludic.inference import ChatTemplate, HFChatTemplate
from ludic.types import (
    AgentStep,
    ConfigError,
    Message,
    Rollout,
    SampleOrigin,
    SAWItem,
    Step,
    is_parse_failure,
    was_rejected_as_cut_off,
)

StepToItem: TypeAlias = Callable[[Rollout, Step, float], SAWItem]
"""(rollout, one of its steps, the step's weight) -> item."""


def make_chat_template_step_to_item(tokenizer: Any = None, *, chat_template: ChatTemplate | None = None) -> StepToItem:
    """Return a function that renders a step's prompt and reply with a chat template.

    The prompt is the messages of the model call, the completion its raw text; `info["chat_prompt_messages"]` and
    `info["chat_completion"]` of the step override them. Give either a tokenizer or a chat template.
    """
    if (tokenizer is None) == (chat_template is None):
        raise ConfigError("make_chat_template_step_to_item needs either a tokenizer or a chat_template.")
    template = chat_template if chat_template is not None else HFChatTemplate(tokenizer)

    def step_to_item(rollout: Rollout, step: Step, weight: float) -> SAWItem:
        messages, completion = _conversation(rollout, step)
        prompt = template.apply(messages, add_generation_prompt=True).prompt_token_ids
        reply = {"role": "assistant", "content": completion}
        full = template.apply([*messages, reply], add_generation_prompt=False).prompt_token_ids
        num_prompt = len(prompt)
        if not np.array_equal(full[:num_prompt], prompt):
            raise ValueError(
                f"The chat template renders step {step.index} of rollout {rollout.id} with its reply differently from its "
                "prompt alone, so the reply's tokens cannot be located. Use a template that only appends."
            )
        if len(full) == num_prompt:
            raise ValueError(f"Step {step.index} of rollout {rollout.id} has an empty completion.")
        mask = np.zeros(len(full), dtype=np.bool_)
        mask[num_prompt:] = True
        meta = {"request_meta": rollout.request_meta}
        return SAWItem(full, None, mask, weight, meta, origin=_origin(rollout, step))

    return step_to_item


def _conversation(rollout: Rollout, step: Step) -> tuple[list[Message], str]:
    source: AgentStep | None
    if isinstance(step, AgentStep):
        source = step
    else:
        source = next((call for call in rollout.agent_steps if call.id == step.source_agent_step_id), None)
    messages = step.info.get("chat_prompt_messages")
    if messages is None and source is not None:
        messages = source.prompt_messages
    if not messages:
        raise ValueError(
            f"Step {step.index} of rollout {rollout.id} has no prompt messages: neither info['chat_prompt_messages'] nor a "
            "model call that led to it. Choose other steps with step_selector."
        )
    completion = step.info.get("chat_completion")
    if isinstance(completion, dict):
        completion = completion["content"]
    return list(messages), step.action if completion is None else str(completion)


def _origin(rollout: Rollout, step: Step) -> SampleOrigin:
    return SampleOrigin.of_rollout(
        rollout,
        segment=step.index,
        step_index=step.index,
        step_kind=step.kind,
        num_turns=1,
        reward=step.reward,
        truncated=step.truncated,
        terminated=step.terminated,
        finish_reason=step.info.get("finish_reason"),
        num_parse_errors=int(is_parse_failure(step)),
        num_cut_off=int(was_rejected_as_cut_off(step)),
    )
