"""Rollouts to judge, and judges that answer by a rule."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ludic.inference import ByteTemplate, ScriptedClient
from ludic.types import AgentStep, EnvironmentStep, Rollout, StopReason, TokenCompletionRequest, TokenTrace
from ludic_judges import JudgeModel

TRACE = TokenTrace(prompt_token_ids=[1, 2], completion_token_ids=[3])
MARK = re.compile(r'"mark": "([0-9a-f]{8})"')


def rollout(
    reply: str, *, task: str = "What is 2 + 2?", group: str | None = None, info: Mapping[str, Any] | None = None
) -> Rollout:
    """One question, one reply."""
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task}]
    call = AgentStep(index=0, prompt_messages=prompt, action=reply, trace=TRACE)
    step = EnvironmentStep(
        index=1, prev_obs=task, action=reply, parsed_action=reply, next_obs=None, source_agent_step_id=call.id,
        agent_step_ids=[call.id], reward=1.0, terminated=True, trace=TRACE, info=dict(info or {}),
        reward_components={"env": 1.0},
    )  # fmt: skip
    meta = {} if group is None else {"request_meta": {"group_id": group}}
    return Rollout(steps=[call, step], meta=meta, stop=StopReason.TERMINATED)


def prompt_of(request: TokenCompletionRequest) -> str:
    return ByteTemplate().decode(request.prompt_token_ids)


def mark_in(prompt: str) -> str:
    """The mark that a verdict must repeat: the last one of the prompt."""
    return MARK.findall(prompt)[-1]


def judge_model(rule: Callable[[str], str], **limits: Any) -> JudgeModel:
    """A judge that answers a prompt by a rule, in which {mark} stands for the mark."""

    def reply(request: TokenCompletionRequest) -> str:
        prompt = prompt_of(request)
        return rule(prompt).replace("MARK", mark_in(prompt))

    return JudgeModel(ScriptedClient(reply), model="fake", **limits)


def section_in(prompt: str, title: str) -> str:
    """The text of a section, as a reader that trusts only matching marks finds it."""
    (found,) = re.findall(
        rf"^\[{title} ([0-9a-f]{{8}})\]\n(.*?)\n^\[end of {title} \1\]$", prompt, re.DOTALL | re.MULTILINE
    )
    return found[1]
