"""Token exactness with a real model's tokenizer and chat template, through agents, protocols and envs."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludic import registry
from ludic.agents import Agent, ReActAgent
from ludic.context import FullDialog, SlidingWindow, TruncatedThinkingContext
from ludic.inference import HermesToolParser, HFChatTemplate, InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction import MultiAgentProtocol, SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.tools import calculator
from ludic.types import ChatResponse, Info, Rollout, TokenCompletionRequest, VersionRun
from tests.fakes import CountingEnv, RecordingClient

pytestmark = pytest.mark.integration


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_engine):
    return smollm2_engine.tokenizer


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'


class UniformClient:
    """Samples ids at random from the whole vocabulary, sometimes writing a tool call instead."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        rng = random.Random(request.seed)
        if rng.random() < 0.3:
            ids = self.tokenizer(CALL, add_special_tokens=False)["input_ids"]
        else:
            ids = [rng.randrange(len(self.tokenizer)) for _ in range(rng.randrange(request.sampling.max_tokens))]
        if rng.random() < 0.7:
            ids = [*ids, self.tokenizer.eos_token_id]
        response = ChatResponse(
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=np.array(ids, np.int32),
            completion_logprobs=np.full(len(ids), -np.log(len(self.tokenizer)), np.float32),
            finish_reason="stop",
            version_runs=(VersionRun(1, len(ids)),),
        )
        return response, {}

    def sync_weights(self, params: Any, *, timeout_s: float = 600.0, version: Any = None) -> str:
        raise RuntimeError("no weights")


def agent_of(kind: type[Agent], tokenizer: Any, ctx: Any, **kwargs: Any) -> tuple[RecordingClient, Agent]:
    client = RecordingClient(UniformClient(tokenizer))
    template = HFChatTemplate(tokenizer, tool_parser=HermesToolParser())
    agent = kind(client=client, model="m", ctx=ctx, parser=raw_parser, chat_template=template, **kwargs)
    return client, agent


def segments(rollout: Rollout) -> int:
    """In how many pieces the conversation fell: calls whose prompt does not extend the one before."""
    count, so_far = 0, None
    for step in rollout.agent_steps:
        prompt = step.trace.prompt_token_ids.tolist()
        if so_far is None or prompt[: len(so_far)] != so_far:
            count += 1
        so_far = [*prompt, *step.trace.completion_token_ids.tolist()]
    return count


SPEC = InferenceSpec(sampling=SamplingParams(max_tokens=12), return_=ReturnSpec.for_rl())


@given(seed=st.integers(0, 10**6), with_tools=st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_traces_are_what_the_server_saw_and_a_dialogue_is_one_segment(smollm2_tokenizer, seed, with_tools):
    # SmolLM2's template knows no tools; a person would describe them in the system prompt.
    kwargs = {"tools": [calculator], "tools_in_prompt": False, "max_react_steps": 3} if with_tools else {}
    client, agent = agent_of(ReActAgent if with_tools else Agent, smollm2_tokenizer, FullDialog(), **kwargs)
    (rollout,) = await SingleAgentProtocol(agent).run(
        env=CountingEnv(10**9), max_steps=4, env_seed=seed, sampling_seed=seed, inference=SPEC
    )
    traces = [(s.trace.prompt_token_ids.tolist(), s.trace.completion_token_ids.tolist()) for s in rollout.agent_steps]
    assert traces == client.calls and segments(rollout) == 1
    assert Rollout.from_json(rollout.to_json()) == rollout


async def test_contexts_that_rewrite_history_fall_into_segments_and_lose_nothing(smollm2_tokenizer):
    for ctx in (TruncatedThinkingContext(), SlidingWindow(max_turns=2)):
        client, agent = agent_of(Agent, smollm2_tokenizer, ctx)
        (rollout,) = await SingleAgentProtocol(agent).run(
            env=CountingEnv(10**9), max_steps=6, sampling_seed=3, inference=SPEC
        )
        traces = [
            (s.trace.prompt_token_ids.tolist(), s.trace.completion_token_ids.tolist()) for s in rollout.agent_steps
        ]
        assert traces == client.calls
        assert segments(rollout) == (1 if isinstance(ctx, TruncatedThinkingContext) else 5)
        assert Rollout.from_json(rollout.to_json()) == rollout


async def test_a_two_player_game_is_token_exact_for_both(smollm2_tokenizer):
    clients, players = {}, {}
    for mark in ("X", "O"):
        clients[mark], players[mark] = agent_of(Agent, smollm2_tokenizer, FullDialog())
    env = registry.envs.make("prisoners_dilemma", rounds=4)
    players = dict(zip(env.agent_ids, players.values(), strict=True))
    clients = dict(zip(env.agent_ids, clients.values(), strict=True))
    rollouts = await MultiAgentProtocol(players).run(env=env, max_steps=9, sampling_seed=5, inference=SPEC)
    for rollout in rollouts:
        calls = clients[rollout.meta["agent_id"]].calls
        assert calls == [
            (s.trace.prompt_token_ids.tolist(), s.trace.completion_token_ids.tolist()) for s in rollout.agent_steps
        ]
        assert segments(rollout) == 1 and len(calls) == 4
    assert clients["player_0"].calls[0][1] != clients["player_1"].calls[0][1]  # different seeds


def test_the_continuation_equals_a_fresh_rendering(smollm2_tokenizer):
    template = HFChatTemplate(smollm2_tokenizer)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    sent = template.apply(messages).prompt_token_ids
    answer = "The capital of France is Paris."
    reply = [*smollm2_tokenizer(answer, add_special_tokens=False)["input_ids"], smollm2_tokenizer.eos_token_id]
    messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "And of Spain? 🎲"}]
    delta = template.delta(messages, num_sent=1, completion_token_ids=reply)
    assert [*sent, *reply, *delta] == template.apply(messages).prompt_token_ids.tolist()
    assert "You are a helpful AI assistant named SmolLM" in template.apply(messages[:1]).prompt_text
