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
    SAWItem,
    Step,
    is_parse_failure,
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
        return SAWItem(full, None, mask, weight, _rendered_meta(rollout, step, num_prompt, len(full)))

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


def _rendered_meta(rollout: Rollout, step: Step, num_prompt: int, num_tokens: int) -> dict[str, Any]:
    request_meta = rollout.meta.get("request_meta", {})
    return {
        "rollout_id": rollout.id,
        "group_id": request_meta.get("group_id"),
        "agent_id": rollout.meta.get("agent_id"),
        "step_index": step.index,
        "step_kind": step.kind,
        "reward": step.reward,
        "total_reward": rollout.total_reward,
        "completion_length": num_tokens - num_prompt,
        "prompt_length": num_prompt,
        "truncated": step.truncated,
        "terminated": step.terminated,
        "finish_reason": step.info.get("finish_reason"),
        "parse_error": is_parse_failure(step),
        "request_meta": request_meta,
    }
