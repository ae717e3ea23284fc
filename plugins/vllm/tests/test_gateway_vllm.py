"""The gateway in front of a real vLLM server, through the official client."""

from typing import Any

import numpy as np
import pytest

from ludic.inference import VLLMChatClient
from ludic.run.model import make_template
from ludic.types import InferenceSpec, ReturnSpec, SamplingParams
from ludic_serve.gateway.server import Gateway
from ludic_serve.gateway.session import Policy
from ludic_serve.gateway.threads import session_rollouts

pytestmark = [pytest.mark.integration, pytest.mark.slow]
openai = pytest.importorskip("openai", reason="the agents extra is not installed")


async def test_two_streamed_turns_continue_the_tokens_and_carry_log_probs_and_versions(vllm_server):
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(vllm_server.model_dir)
    client = VLLMChatClient(vllm_server.host, vllm_server.port, control_token=vllm_server.control_token)
    policy = Policy(client=client, chat_template=make_template(tokenizer, with_tools=False), model="tiny")
    gateway = Gateway({"tiny": policy}, default="tiny")
    await gateway.start()
    inference = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=200), return_=ReturnSpec.for_rl())
    session = gateway.open_session(inference=inference, sampling_seed=3)
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    try:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
            for _ in range(2):
                stream = await agent.chat.completions.create(model="tiny", messages=messages, stream=True)
                pieces = [e.choices[0].delta.content or "" async for e in stream if e.choices]
                assert sum(bool(piece) for piece in pieces) > 1
                messages += [{"role": "assistant", "content": "".join(pieces)}, {"role": "user", "content": "Go on."}]
    finally:
        await gateway.close()
        await client.close()
    assert session.counts["rerendered"] == session.counts["forked"] == 0
    [rollout] = session_rollouts(session, reward=1.0)
    first, second = (step.trace for step in rollout.agent_steps)
    whole = np.concatenate([first.prompt_token_ids, first.completion_token_ids])
    assert np.array_equal(second.prompt_token_ids[: len(whole)], whole)
    for trace in (first, second):
        assert trace.completion_logprobs is not None and np.all(trace.completion_logprobs <= 0)
        assert sum(run.length for run in trace.version_runs) == len(trace.completion_token_ids)
