"""Sessions: retries, hang-ups, limits, policies, seeds, streams."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.http.errors import RequestRefused
from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import (
    ChatResponse,
    ConfigError,
    EngineClosed,
    InferenceSpec,
    PromptTooLong,
    ReturnSpec,
    SamplingParams,
    StepOutcome,
    TokenChunk,
    TokenCompletionRequest,
)
from ludic_serve.gateway import session as session_module
from ludic_serve.gateway.answering import ReplyPieces, split_reasoning
from ludic_serve.gateway.session import Policy, Session, SessionLimits
from ludic_serve.gateway.threads import session_rollouts
from ludic_serve.gateway.wire.canonical import ClientMessage, ModelRequest
from ludic_serve.gateway.wire.chat import Chat
from plugins.serve.tests.dialects import events_of
from plugins.serve.tests.sessions import INFERENCE, TOOLS, ask, assistant, called, make_session, system, tool, user


class SlowClient:
    """Answers when it is let go; says whether a request was cancelled."""

    def __init__(self, text: str = "slow") -> None:
        self.go, self.began = asyncio.Event(), asyncio.Event()
        self.num_asked = self.num_cancelled = 0
        self._scripted = ScriptedClient(lambda request: text)

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        self.num_asked += 1
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return await self._scripted.complete_tokens(request)

    def sync_weights(self, params: Mapping[str, Any], *, timeout_s: float = 1.0, version: Any = None) -> str:
        raise NotImplementedError


ASKED = ModelRequest(messages=[user("a")])


async def test_the_same_body_without_a_sign_of_a_retry_is_another_call():
    session = make_session(["one", "two"])
    first = await session.begin(ASKED, key="k").reply()
    second = await session.begin(ASKED, key="k").reply()
    assert (first.content, second.content) == ("one", "two")


async def test_a_retry_of_a_failed_call_is_sampled_again():
    texts = iter([None, "good"])

    def reply(request: TokenCompletionRequest) -> str:
        text = next(texts)
        if text is None:
            raise OSError("away")
        return text

    session = make_session(reply)
    with pytest.raises(OSError):
        await session.begin(ASKED, key="k").reply()
    assert (await session.begin(ASKED, key="k", is_retry=True).reply()).content == "good"
    assert session.counts["failed"] == 1


async def test_a_call_that_cannot_be_rendered_is_no_failure_of_the_model():
    def reply(request: TokenCompletionRequest) -> str:
        raise OSError("away")

    session = make_session(reply, ByteTemplate())
    with pytest.raises(OSError):
        await ask(session, user("Hi"))
    assert session.model_failed
    with pytest.raises(ConfigError, match="cannot be read"):
        await ask(session, user("Add."), tools=TOOLS)
    assert not session.model_failed


async def test_a_retry_within_the_grace_keeps_the_call_alive(monkeypatch):
    monkeypatch.setattr(session_module, "RETRY_GRACE_S", 0.01)
    client = SlowClient()
    session = make_session([], client=client)
    call = session.begin(ASKED, key="k")
    session.lost(call)
    joined = session.begin(ASKED, key="k", is_retry=True)
    joined.num_waiting += 1  # as the server does
    await asyncio.sleep(0.05)
    client.go.set()
    assert (await joined.reply()).content == "slow"


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_retry_does_not_join_a_call_that_was_given_up(monkeypatch, is_answered: bool):
    monkeypatch.setattr(session_module, "RETRY_GRACE_S", 0.0)
    client = SlowClient()
    session = make_session([], client=client)
    call = session.begin(ASKED, key="k")
    await client.began.wait()
    if is_answered:
        client.go.set()
        await call.reply()
    session.lost(call)
    while session.nodes[0].state == "open":
        await asyncio.sleep(0)
    client.go.set()
    again = session.begin(ASKED, key="k", is_retry=True)
    reply = await again.reply()
    session.delivering(again)
    await ask(session, user("a"), assistant(reply), user("b"))
    assert [node.state for node in session.nodes] == ["undelivered", "delivered", "delivered"]
    assert session.nodes[2].kind == "continued" and session.counts["undelivered"] == 1


async def test_a_replay_that_is_not_delivered_takes_nothing_back():
    session = make_session(["one"])
    call = session.begin(ASKED, key="k")
    await call.reply()
    session.delivering(call)
    again = session.begin(ASKED, key="k", is_retry=True)
    session.delivering(again)
    session.not_delivered(again)
    session.close()
    assert len(session_rollouts(session)) == 1


class CountingClient:
    """Samples so many tokens, fewer if it may not; other calls go on meanwhile."""

    def __init__(self, wanted: list[int]) -> None:
        self._wanted = iter(wanted)

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        num = min(next(self._wanted), request.sampling.max_tokens)
        for _ in range(num % 5):
            await asyncio.sleep(0)
        answered = ScriptedClient(lambda request: "x" * (num - 1))  # and the end of the reply is a token
        return await answered.complete_tokens(request)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 120), st.integers(1, 40))
def test_parallel_calls_do_not_pass_the_token_limit_together(wanted: list[int], limit: int, largest: int):
    async def play() -> None:
        inference = InferenceSpec(sampling=SamplingParams(max_tokens=largest), return_=ReturnSpec.for_rl())
        limits = SessionLimits(max_tokens=limit)
        session = make_session([], client=CountingClient(wanted), inference=inference, limits=limits)
        asked = (ask(session, user(f"question {number}")) for number in range(len(wanted)))
        replies = await asyncio.gather(*asked, return_exceptions=True)
        sampled = [reply.num_completion_tokens for reply in replies if not isinstance(reply, BaseException)]
        assert sum(sampled) == session.num_tokens <= limit
        assert all(isinstance(reply, RequestRefused) for reply in replies if isinstance(reply, BaseException))
        if sum(min(number, largest) for number in wanted) < limit:
            assert sorted(sampled) == sorted(min(number, largest) for number in wanted), "none is cut needlessly"
        else:
            assert session.num_tokens == limit, "all of it can be used"

    asyncio.run(play())


@pytest.mark.parametrize("limits", [{"max_calls": 0}, {"max_tokens": -1}])
def test_a_limit_below_one_is_refused(limits: dict[str, int]):
    with pytest.raises(ConfigError, match="must be at least 1"):
        SessionLimits(**limits)


async def test_the_sessions_sampling_is_pinned_and_stop_and_length_are_the_clients():
    asked: list[SamplingParams] = []

    def reply(request: TokenCompletionRequest) -> str:
        asked.append(request.sampling)
        return "x"

    given_ = {"sampling": {"temperature": 0.0, "top_p": 0.5}, "max_tokens": 20, "stop": ("END",)}
    await ask(make_session(reply), user("a"), **given_)
    await ask(make_session(reply), user("a"), max_tokens=64_000)
    assert [(s.temperature, s.top_p, s.max_tokens, s.stop) for s in asked] == [
        (1.0, 1.0, 20, ("END",)),
        (1.0, 1.0, 200, None),
    ]


async def test_the_model_name_chooses_the_policy_and_only_trained_ones_are_in_rollouts():
    def policy(text: str, is_trained: bool = True) -> Policy:
        client = ScriptedClient(lambda request: text)
        return Policy(client=client, chat_template=ByteTemplate(), model=text, is_trained=is_trained)

    policies = {"solver": policy("solved"), "critic": policy("criticised"), "title": policy("titled", is_trained=False)}
    session = make_session([], policies=policies, default="solver")
    replies = [await ask(session, user("a"), model=name) for name in ("solver", "critic", "title", "gpt-9")]
    assert [reply.content for reply in replies] == ["solved", "criticised", "titled", "solved"]
    rollouts = session_rollouts(session, reward=1.0, meta={"agent_id": "agent"})
    assert [(r.policy, r.agent_id, r.total_reward, r.delegate) for r in rollouts] == [
        ("solved", "agent", 1.0, None),
        ("solved", "agent", 0.0, "thread"),
        ("criticised", "agent:critic", 1.0, None),
    ]
    with pytest.raises(ConfigError, match="of 'title', which is not trained"):
        session_rollouts(session, call_rewards={replies[2].token: 1.0})
    strict = make_session([], policies=policies, default=None)
    with pytest.raises(RequestRefused, match="solver, critic, title"):
        await ask(strict, user("a"), model="gpt-9")


async def test_replies_of_another_policy_are_context():
    policies = {
        name: Policy(client=ScriptedClient(lambda request: "same"), chat_template=ByteTemplate(), model=name)
        for name in ("a", "b")
    }
    session = make_session([], policies=policies, default="a")
    one = await ask(session, user("q"), model="a")
    two = await ask(session, user("q"), assistant(one), user("r"), model="b")
    await ask(session, user("q"), assistant(one), user("r"), assistant(two), user("s"), model="a")
    assert [node.kind for node in session.nodes] == ["new", "foreign", "foreign"]
    assert [len(rollout.agent_steps) for rollout in session_rollouts(session)] == [2, 1]


async def test_an_error_of_the_set_up_or_of_the_policy_is_kept_for_the_episode():
    def reply(request: TokenCompletionRequest) -> str:
        raise EngineClosed("gone")

    session = make_session(reply)
    with pytest.raises(EngineClosed):
        await ask(session, user("a"))
    assert isinstance(session.error, EngineClosed)
    truncated = InferenceSpec(sampling=SamplingParams(top_p=0.5), return_=ReturnSpec.for_rl())
    session = make_session(["x"], inference=truncated)
    with pytest.raises(ConfigError, match="top_p"):
        await ask(session, user("a"))
    assert isinstance(session.error, ConfigError)


async def test_a_model_that_does_not_answer_in_time_is_named():
    session = make_session([], client=SlowClient(), timeout_s=0.01)
    with pytest.raises(RequestRefused, match=r"within timeout_s=0\.01") as refused:
        await ask(session, user("a"))
    assert refused.value.status == 504 and session.error is None


async def test_a_closed_session_refuses_and_ends_its_calls():
    session = make_session([], client=SlowClient())
    call = session.begin(ASKED)
    await asyncio.sleep(0)
    session.close()
    with pytest.raises(RequestRefused, match="closed"):
        await call.reply()
    with pytest.raises(RequestRefused, match="closed"):
        session.begin(ASKED)
    assert session.counts["undelivered"] == 1


async def test_counted_tokens_are_those_of_the_prompt_that_follows():
    session = make_session(["<think>Hm.</think>one", "two"])
    first = await ask(session, user("a"))
    messages = [user("a"), assistant(first, reasoning=""), user("b")]
    counted = session.count_tokens(ModelRequest(messages=messages))
    assert counted == (await ask(session, *messages)).num_prompt_tokens


@pytest.mark.parametrize("number", ["²", "1²", "٣", "9" * 5000, "-1", "00", ""])
async def test_a_result_of_a_call_that_no_reply_has_is_context(number: str):
    session = make_session([called({"a": 1}), "2"])
    first = await ask(session, user("Add."), tools=TOOLS)
    result = tool(f"call_{first.token}_{number}", "2")
    assert (await ask(session, user("Add."), assistant(first), result, tools=TOOLS)).content == "2"


class NoTools(ByteTemplate):
    """A template that does not write tools."""

    def apply(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> Any:
        return super().apply(messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("opening", [[user("Add.")], [system("Be brief."), user("Add.")]])
async def test_tools_of_a_template_without_them_are_described_in_the_system_message(opening: list[ClientMessage]):
    session = make_session([called({"a": 1}), "2"], NoTools(tool_parser=HermesToolParser()))
    first = await ask(session, *opening, tools=TOOLS)
    [call] = first.tool_calls
    await ask(session, *opening, assistant(first), tool(call["id"], "1"), tools=TOOLS)
    assert (session.nodes[1].kind, session.nodes[1].is_rerendered) == ("continued", False)
    [rollout] = session_rollouts(session)
    described = rollout.agent_steps[0].prompt_messages[0]
    assert described["role"] == "system" and '"name": "add"' in described["content"]
    assert [m["role"] for m in rollout.agent_steps[1].prompt_messages] == ["system", "user", "assistant", "tool"]


async def test_tools_that_change_are_described_again():
    session = make_session(["one", "two", "three"], NoTools(tool_parser=HermesToolParser()))
    messages = [user("a")]
    shown = []
    for tools in ([], TOOLS, []):
        reply = await ask(session, *messages, tools=tools)
        messages += [assistant(reply), user("b")]
        first = session.nodes[-1].prompt_messages[0]
        shown.append((first["role"], '"name": "add"' in first["content"]))
    assert shown == [("user", False), ("system", True), ("user", False)]
    assert session.counts["rerendered"] == 2


@pytest.mark.parametrize("template", [NoTools(), ByteTemplate()])
async def test_tools_of_a_model_whose_calls_cannot_be_read_are_refused(template: ByteTemplate):
    session = make_session(["x"], template)
    with pytest.raises(ConfigError, match="cannot be read"):
        await ask(session, user("a"), tools=TOOLS)
    first = await ask(session, user("a"))
    with pytest.raises(ConfigError, match="cannot be read"):
        await ask(session, user("a"), assistant(first), user("b"), tools=TOOLS)
    assert session.error is None


class SmallContext(ScriptedClient):
    """Refuses a request whose prompt and reply do not fit its context together, as the engines do."""

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        wanted = len(request.prompt_token_ids) + request.sampling.max_tokens
        if wanted > 60:
            raise PromptTooLong(wanted, 60)
        return await super().complete_tokens(request)


async def test_a_reply_is_cut_to_the_room_that_the_context_leaves():
    session = make_session([], client=SmallContext(lambda request: "x" * 100))
    first = await ask(session, user("a" * 30))
    assert (first.num_prompt_tokens, first.num_completion_tokens, first.finish_reason) == (33, 27, "length")
    with pytest.raises(PromptTooLong):
        await ask(session, user("a" * 30), assistant(first), user("b"))
    assert session.error is None and session.counts["failed"] == 1


# --- the same seeds as an agent of Ludic's ---


class Countdown(SingleAgentEnv):
    """Three turns."""

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.left = 3
        return "start", {}

    def env_step(self, action: str) -> StepOutcome:
        self.left -= 1
        return StepOutcome(f"left {self.left}", 1.0, terminated=self.left == 0)


async def test_a_chain_of_calls_has_the_prompts_and_seeds_of_the_native_protocol():
    seen: dict[str, list[tuple[list[int], int | None]]] = {"native": [], "gateway": []}

    def scripted(name: str) -> ScriptedClient:
        def reply(request: TokenCompletionRequest) -> str:
            seen[name].append((request.prompt_token_ids.tolist(), request.seed))
            return f"reply {len(seen[name])}"

        return ScriptedClient(reply)

    agent = Agent(
        client=scripted("native"), model="policy", ctx=FullDialog(), parser=raw_parser, chat_template=ByteTemplate()
    )
    await SingleAgentProtocol(agent).run(env=Countdown(), max_steps=5, sampling_seed=11, inference=INFERENCE)
    session = make_session([], client=scripted("gateway"), sampling_seed=11)
    messages = [user("start")]
    for left in (2, 1, 0):
        reply = await ask(session, *messages)
        messages += [assistant(reply), user(f"left {left}")]
    assert seen["gateway"] == seen["native"]


# --- streams ---


class StreamingClient(ScriptedClient):
    """Hands out the tokens of a scripted reply a few at a time."""

    def __init__(self, text: str, size: int) -> None:
        super().__init__(lambda request: text)
        self._size = size

    async def stream_tokens(self, request: TokenCompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        response, _ = await self.complete_tokens(request)
        ids = response.completion_token_ids.tolist()
        for start in range(0, len(ids), self._size):
            yield TokenChunk(token_ids=ids[start : start + self._size], logprobs=[])
        yield TokenChunk(token_ids=[], logprobs=[], response=response)


async def streamed(session: Session, **settings: Any) -> tuple[dict[str, str], Any]:
    """What a client of a stream sees."""
    request = ModelRequest(messages=[user("a")], stream=True, **settings)
    call = session.begin(request)
    events = Chat().stream(call.head, request)
    written = events.begin()
    async for piece in call.pieces(ping_s=5.0):
        assert piece is not None
        written += events.push(*piece)
    reply = await call.reply()
    texts = {"reasoning": "", "content": ""}
    kinds: list[str] = []
    for _, data in events_of(written + events.end(reply)):
        for kind, name in (("reasoning", "reasoning_content"), ("content", "content")):
            if data != "[DONE]" and data["choices"] and data["choices"][0]["delta"].get(name):
                texts[kind] += data["choices"][0]["delta"][name]
                kinds.append(kind)
    assert kinds == sorted(kinds, reverse=True), "reasoning comes before content"
    return texts, reply


TEXTS = st.text(alphabet="ab <>{}/\n\u00e9\u6c34", max_size=20)


@settings(max_examples=200)
@given(TEXTS, TEXTS, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 7))
def test_the_pieces_of_a_stream_add_up_to_the_reply(
    thought: str, text: str, thinks: bool, calls: bool, with_tools: bool, size: int
):
    whole = (f"<think>{thought}</think>" if thinks else "") + text + (called({"a": 1}) if calls else "")
    template = ByteTemplate(tool_parser=HermesToolParser())
    session = make_session([], template, StreamingClient(whole, size))
    texts, reply = asyncio.run(streamed(session, tools=TOOLS if with_tools else []))
    assert texts == {"reasoning": reply.reasoning, "content": reply.content}
    if with_tools and calls:
        assert len(reply.tool_calls) == 1 or "tool_call" in reply.content


async def test_a_stream_shows_text_before_the_reply_is_finished():
    pieces = ReplyPieces(lambda ids: bytes(ids).decode(), stops=("END",), prefix="", with_tools=True)
    shown = [
        pieces.push(list(part.encode()))
        for part in ("<thi", "nk>Hm, ", "so</th", "ink>\nIt", " is E", 'v<tool_call>{"n')
    ]
    assert shown == [
        [],
        [("reasoning", "Hm,")],
        [("reasoning", " so")],
        [("content", "It")],
        [("content", " is")],
        [("content", " Ev")],
    ]


def test_a_think_block_that_is_cut_off_is_all_reasoning():
    assert split_reasoning("<think>I was") == ("I was", "")
    assert split_reasoning(" <think>a</think>\n\nb ") == ("a", "b ")
    assert split_reasoning("x <think>a</think>") == ("", "x <think>a</think>")
