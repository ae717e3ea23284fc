"""Finds which message each token of a stored rollout came from, by playing its conversation again with the chat template.

For rollouts that were recorded without `InferenceSpec.message_spans`. Nothing is sampled: the prompts that the template writes must
be the stored ones, token for token.
"""

from dataclasses import replace

import numpy as np

from ludic.inference import ChatTemplate, Conversation
from ludic.types import AgentStep, ConfigError, Rollout


def with_message_spans(rollout: Rollout, template: ChatTemplate) -> Rollout:
    """The rollout with `TokenTrace.message_spans` in every model call; ConfigError if the template writes other prompts."""
    calls = [step for step in rollout.steps if isinstance(step, AgentStep)]
    if all(call.trace.message_spans for call in calls):
        return rollout
    conversation, traces = Conversation(template), {}
    for position, call in enumerate(calls):
        prompt = conversation.next_prompt(list(call.prompt_messages), with_spans=True)
        if not np.array_equal(prompt.token_ids, call.trace.prompt_token_ids):
            raise ConfigError(
                f"Rollout {rollout.id} does not say which message its tokens came from, and the chat template writes the prompt "
                f"of step {call.index} differently: another model played it, or its agent was shown tools. Play with --train-on, "
                "which records it."
            )
        traces[id(call.trace)] = replace(call.trace, message_spans=prompt.message_spans)
        conversation.record(call.trace.completion_token_ids, _kept_text(calls, position))
    steps = [
        step if step.trace is None else replace(step, trace=traces.get(id(step.trace), step.trace))
        for step in rollout.steps
    ]
    return replace(rollout, steps=steps)


def _kept_text(calls: list[AgentStep], position: int) -> str:
    """The reply as the agent remembered it: in the next prompt, where there is one."""
    own, num_sent = calls[position], len(calls[position].prompt_messages)
    if position + 1 < len(calls) and len(calls[position + 1].prompt_messages) > num_sent:
        return str(calls[position + 1].prompt_messages[num_sent]["content"])
    return own.action
