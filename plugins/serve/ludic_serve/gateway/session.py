"""A session: the model calls of one run of an agent, from the first request to the reward.

The session finds the policy that a request names, places the request in that policy's forest, samples, and remembers what the
client got. Requests of one session may come in parallel. A call is shared by a request and its retries, and ends when no connection
waits for it any more.
"""

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from ludic.http.errors import RequestRefused
from ludic.inference import ChatTemplate
from ludic.tools import Tool
from ludic.types import (
    ChatClient,
    ChatResponse,
    ConfigError,
    InferenceSpec,
    PolicyGone,
    PromptTooLong,
    SamplingParams,
    StreamingClient,
    TokenArray,
    TokenCompletionRequest,
    derive_seed,
)
from ludic.types.interfaces import LimitedClient
from ludic_serve.gateway.answering import (
    ReplyPieces,
    decoder_of,
    render,
    take_answer,
    take_prompt,
    terminal_reply,
)
from ludic_serve.gateway.forest import Forest, Node
from ludic_serve.gateway.wire.canonical import ModelRequest, PieceKind, Reply, ReplyHead, new_token, token_in

logger = logging.getLogger(__name__)

RETRY_GRACE_S = 1.0
"""Seconds that a call continues after its client has hung up: a retry of the SDK may join it."""
_LONG_CONTEXT = 1 << 18
_BRANCH_SEEDS = 0xB4A9C  # separates the seeds of branches from those of the first chain


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The client, template and model that answer for a model name."""

    client: ChatClient
    chat_template: ChatTemplate
    model: str
    """The model's name in requests to the client."""
    is_trained: bool = True
    """Calls of a policy that is not trained are in no rollout."""

    @property
    def max_total_tokens(self) -> int:
        """Tokens of a call, prompt and reply, as far as its client says it."""
        return self.client.max_total_tokens if isinstance(self.client, LimitedClient) else _LONG_CONTEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """Past a limit the agent gets one reply that says so and that no model sampled; later requests are refused."""

    max_calls: int | None = None
    max_tokens: int | None = None
    """Sampled tokens in all calls together. A call reserves what it may sample; where less is left because of calls in progress,
    it waits for them."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"SessionLimits.{name}={value}; it must be at least 1, or None for no limit.")


class Call:
    """One model call in progress, and the pieces of its text so far."""

    def __init__(self, head: ReplyHead, node: Node | None, *, is_streamed: bool) -> None:
        # Without the request, whose messages repeat the whole history: a session keeps its calls for retries.
        self.head, self.node, self.is_streamed = head, node, is_streamed
        self.task: asyncio.Task[Reply]
        self.num_delivered = 0
        """Connections that the whole answer was written to."""
        self.num_waiting = 0
        """Connections that wait for the answer."""
        self._pieces: list[tuple[PieceKind, str]] = []
        self._more: asyncio.Event | None = None

    def add(self, pieces: list[tuple[PieceKind, str]]) -> None:
        self._pieces += pieces
        self._wake()

    def start(self, task: "asyncio.Task[Reply]") -> None:
        self.task = task
        task.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        if self._more is not None:
            self._more.set()
            self._more = None

    async def pieces(self, ping_s: float) -> AsyncIterator[tuple[PieceKind, str] | None]:
        """The pieces as they come, from the first on; None whenever there was none for `ping_s` seconds."""
        num_seen = 0
        while True:
            for piece in self._pieces[num_seen:]:
                num_seen += 1
                yield piece
            if self.task.done():
                if num_seen == len(self._pieces):
                    return
                continue
            self._more = more = self._more or asyncio.Event()
            try:
                await asyncio.wait_for(more.wait(), ping_s)
            except TimeoutError:
                yield None

    async def reply(self) -> Reply:
        """The finished reply; RequestRefused if the session was closed meanwhile."""
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if self.task.cancelled() and waiting is not None and not waiting.cancelling():
                raise RequestRefused(400, "session_closed", "This session is closed.") from None
            raise


@dataclass(kw_only=True, eq=False)
class Session:
    """One run of an agent."""

    policies: Mapping[str, Policy]
    default: str | None
    """The policy of requests that name no known model; None refuses them."""
    inference: InferenceSpec = field(default_factory=InferenceSpec)
    """Temperature, top_p and the like stand, whatever a request says; it may give stop texts and fewer tokens."""
    sampling_seed: int | None = None
    limits: SessionLimits = SessionLimits()
    timeout_s: float | None = None
    """For each model call."""
    lenient: bool = False
    """Accept formats of the answer and forced tools, which have no effect yet, rather than refuse them."""
    base_url: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    api_key: str = field(default_factory=lambda: f"sk-ludic-{secrets.token_hex(16)}")
    counts: Counter[str] = field(default_factory=Counter)
    """`calls`, each kind of call (`forest.Kind`), `rerendered`, and `joined` (retries that got the first request's answer),
    `undelivered` (the client hung up), `failed`, `limited`; and `raised`: the agent's own error got a reward."""
    error: Exception | None = None
    """Why no call can succeed any more: a wrong set-up, or the policy is gone. The episode must raise it."""
    model_failed: bool = False
    """The last call to end got no answer, by no fault of the agent; it may have been given up because the model was slow."""
    is_closed: bool = False
    group: str | None = None
    """Sessions with the same one attempt the same task, and are compared."""
    is_rewarded: bool = False
    """The control endpoint gave it a reward."""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    """The env's tools of the episode, which the agent may call at the gateway."""

    def __post_init__(self) -> None:
        self.forests = {name: Forest() for name in self.policies}
        self.nodes: list[Node] = []
        self.num_tokens = 0
        self._num_reserved = 0
        self._released = asyncio.Condition()
        self.last_used = time.monotonic()
        """When the agent was last heard of, or the control endpoints were asked for this session."""
        self._calls: dict[str, Call] = {}
        """Calls by the digest of body and idempotency key."""
        self._num_tool_calls = 0
        self._seen_prompts: Counter[int] = Counter()
        self._was_told = False
        self._running: set[asyncio.Task[Reply]] = set()

    # --- called by the server ---

    @property
    def is_answering(self) -> bool:
        """True while a call is in progress."""
        return bool(self._running)

    @property
    def idle_s(self) -> float:
        """Seconds since it was last used; 0 while a call is in progress."""
        return 0.0 if self.is_answering else time.monotonic() - self.last_used

    def begin(self, request: ModelRequest, *, key: str | None = None, is_retry: bool = False) -> Call:
        """Start a call, or join the one with the same key if this is a retry of it."""
        self.last_used = time.monotonic()
        if key is not None and is_retry and (earlier := self._calls.get(key)) is not None and _is_usable(earlier):
            self.counts["joined"] += 1
            return earlier
        if self.is_closed:
            raise RequestRefused(400, "session_closed", "This session is closed.")
        call = self._limited(request) or self._sampled(request)
        if key is not None:
            self._calls[key] = call
        return call

    def delivering(self, call: Call) -> None:
        """The last bytes of the answer are about to be written. Called before the write, since the client may answer faster
        than the write returns."""
        call.num_delivered += 1
        if call.node is not None and call.node.state == "open":
            call.node.deliver()

    def lost(self, call: Call) -> None:
        """A connection ended without the answer. The call goes on for a moment, so that a retry can join."""
        if call.num_waiting == 0:
            asyncio.get_running_loop().call_later(RETRY_GRACE_S, self._give_up, call)

    def not_delivered(self, call: Call) -> None:
        """The last bytes could not be written."""
        call.num_delivered -= 1
        node = call.node
        if node is not None and node.is_delivered and not node.children and call.num_delivered == 0:
            node.state = "open"
        self.lost(call)

    def count_tokens(self, request: ModelRequest) -> int:
        """Tokens of the prompt; nothing is recorded, so it may run in a thread."""
        policy, forest = self._policy(request), self._forest_of(request)
        node = forest.place(request)
        rendered = render(node, policy.chat_template, forest, policy.max_total_tokens)
        return len(rendered.tokens) + (node.parent.num_tokens if node.parent and rendered.text is None else 0)

    def close(self) -> None:
        """Refuse later requests and cancel the calls in progress; an answer that no client has yet counts as undelivered."""
        self.is_closed = True
        for task in list(self._running):
            task.cancel()
        for node in self.nodes:
            self._drop(node, "undelivered")

    def reply(self, id: str) -> Reply | None:
        """The reply that carries this id and that the client has."""
        node = self.find(id)
        return node.reply if node is not None and node.is_delivered else None

    def find(self, id: str) -> Node | None:
        """The call whose reply carries this id, or this token."""
        token = token_in(id)
        return next((node for node in self.nodes if node.token == token), None)

    # --- one call ---

    def _policy_name(self, request: ModelRequest) -> str:
        name = request.model
        if name in self.policies:
            return str(name)
        if self.default is None:
            raise RequestRefused(
                404, "model_not_found", f"The model {name!r:.80} is not served here; {', '.join(self.policies)} is."
            )
        return self.default

    def _policy(self, request: ModelRequest) -> Policy:
        return self.policies[self._policy_name(request)]

    def _forest_of(self, request: ModelRequest) -> Forest:
        return self.forests[self._policy_name(request)]

    def _limited(self, request: ModelRequest) -> Call | None:
        limits, num_calls = self.limits, self.counts["calls"]
        what = None
        if limits.max_calls is not None and num_calls >= limits.max_calls:
            what = f"{num_calls} model calls (max_calls={limits.max_calls})"
        elif limits.max_tokens is not None and self.num_tokens >= limits.max_tokens:
            what = self._all_tokens()
        if what is None:
            return None
        self.counts["limited"] += 1
        reply = self._told(self._head(request, new_token()), what)

        async def tell() -> Reply:
            return reply

        call = Call(
            ReplyHead(token=reply.token, model=reply.model, created=reply.created), None, is_streamed=request.stream
        )
        call.start(asyncio.create_task(tell()))
        return call

    def _all_tokens(self) -> str:
        return f"{self.num_tokens} sampled tokens (max_tokens={self.limits.max_tokens})"

    def _told(self, head: ReplyHead, what: str) -> Reply:
        """The one reply that says which limit is reached; RequestRefused if the agent has had it."""
        if self._was_told:
            raise RequestRefused(400, "session_limit", f"This session has used {what}. Answer without the model.")
        self._was_told = True
        return terminal_reply(head.token, head.model, f"This session has used {what}; no further call is answered.")

    @asynccontextmanager
    async def _reserved(self, request: TokenCompletionRequest) -> AsyncIterator[bool]:
        """Hold the tokens that a call may sample, fewer if the limit leaves fewer; False if it leaves none. While other calls
        hold what this one would need, it waits: most of them sample less than they may."""
        limit, sampling, num_held = self.limits.max_tokens, request.sampling, 0
        if limit is not None:
            async with self._released:
                await self._released.wait_for(
                    lambda: not self._num_reserved or self._num_left(limit) >= sampling.max_tokens
                )
                num_held = min(sampling.max_tokens, self._num_left(limit))
                self._num_reserved += num_held
            if 0 < num_held < sampling.max_tokens:
                request.sampling = replace(sampling, max_tokens=num_held, min_tokens=min(sampling.min_tokens, num_held))
        try:
            yield limit is None or num_held > 0
        finally:
            if num_held:
                self._num_reserved -= num_held
                async with self._released:
                    self._released.notify_all()

    def _num_left(self, limit: int) -> int:
        return max(limit - self.num_tokens - self._num_reserved, 0)

    def _sampled(self, request: ModelRequest) -> Call:
        policy, forest = self._policy(request), self._forest_of(request)
        sampling = self._sampling(request)  # may refuse it
        node = forest.add(request)
        self.nodes.append(node)
        self.counts["calls"] += 1
        self.counts[node.kind] += 1
        node.info = {"without_effect": list(request.without_effect)} if request.without_effect else {}
        call = Call(self._head(request, node.token), node, is_streamed=request.stream)
        task = asyncio.create_task(self._answered(call, node, policy, forest, sampling, request.seed))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        call.start(task)
        return call

    def _head(self, request: ModelRequest, token: str) -> ReplyHead:
        name = request.model or self.default or next(iter(self.policies))
        return ReplyHead(token=token, model=name, created=int(time.time()))

    def _sampling(self, request: ModelRequest) -> SamplingParams:
        own = self.inference.sampling
        max_tokens = own.max_tokens if request.max_tokens is None else min(own.max_tokens, max(request.max_tokens, 1))
        if not request.stop and max_tokens == own.max_tokens:
            return own
        stops = (own.stop,) if isinstance(own.stop, str) else tuple(own.stop or ())
        return replace(
            own,
            max_tokens=max_tokens,
            min_tokens=min(own.min_tokens, max_tokens),
            stop=tuple(dict.fromkeys((*stops, *request.stop))) or None,
        )

    def _seed(self, node: Node, forest: Forest, asked: int | None, prompt: TokenArray) -> int | None:
        """The first chain of calls has the seeds of an agent of Ludic's; those of branches depend on their prompts, so that the
        order in which parallel requests arrive does not matter."""
        if self.sampling_seed is None:
            return asked
        path = node.path()
        is_first_chain = path[0] is forest.roots[0] and all(b is a.children[0] for a, b in itertools.pairwise(path))
        if is_first_chain and forest is next(iter(self.forests.values())):
            return derive_seed(self.sampling_seed, len(path) - 1)
        digest = int.from_bytes(hashlib.sha256(prompt.tobytes()).digest()[:6], "big")
        self._seen_prompts[digest] += 1
        return derive_seed(self.sampling_seed, _BRANCH_SEEDS, digest, self._seen_prompts[digest])

    async def _answered(
        self, call: Call, node: Node, policy: Policy, forest: Forest, sampling: SamplingParams, seed: int | None
    ) -> Reply:
        try:
            # In a thread: a long text takes seconds, in which other sessions are answered.
            rendered = await asyncio.to_thread(render, node, policy.chat_template, forest, policy.max_total_tokens)
        except BaseException as error:
            self.model_failed = isinstance(error, asyncio.CancelledError)
            self._drop(node, "undelivered" if isinstance(error, asyncio.CancelledError) else "failed")
            raise
        prompt = take_prompt(node, rendered)
        self.counts["rerendered"] += node.is_rerendered
        call.head.num_prompt_tokens = len(prompt.token_ids)
        request = TokenCompletionRequest(
            model=policy.model,
            prompt_token_ids=prompt.token_ids,
            prompt_text=prompt.text,
            sampling=sampling,
            return_=self.inference.return_,
            seed=self._seed(node, forest, seed, prompt.token_ids),
            extensions=self.inference.extensions,
        )
        return await self._sample(call, node, policy, request)

    async def _sample(self, call: Call, node: Node, policy: Policy, request: TokenCompletionRequest) -> Reply:
        try:
            async with self._reserved(request) as has_room:
                if not has_room:
                    self._drop(node, "limited")
                    return self._told(call.head, self._all_tokens())
                answering = self._response_within_room(call, node, policy, request)
                response = await (answering if self.timeout_s is None else asyncio.wait_for(answering, self.timeout_s))
                reply = take_answer(
                    node, request, response, policy.chat_template, model=call.head.model, num_calls=self._num_tool_calls
                )
                self.num_tokens += reply.num_completion_tokens
                self.model_failed = False
        except TimeoutError as error:
            self.model_failed = True
            self._drop(node, "failed")
            limit = "in time" if self.timeout_s is None else f"within timeout_s={self.timeout_s:g}"
            raise RequestRefused(504, "model_timeout", f"The model did not answer {limit}. {error}".strip()) from error
        except BaseException as error:
            self.model_failed = not isinstance(error, RequestRefused | PromptTooLong)
            self._drop(node, "undelivered" if isinstance(error, asyncio.CancelledError) else "failed")
            if isinstance(error, ConfigError | PolicyGone) and self.error is None:
                self.error = error
            raise
        self.last_used = time.monotonic()
        self._num_tool_calls += len(reply.tool_calls)
        return reply

    async def _response_within_room(
        self, call: Call, node: Node, policy: Policy, request: TokenCompletionRequest
    ) -> ChatResponse:
        """The completion, shorter than asked for if prompt and reply would not fit the context together. A prompt that leaves no
        room is refused, as other APIs do: agents that compact their history then do it."""
        try:
            return await self._response(call, node, policy, request)
        except PromptTooLong as error:
            room, sampling = error.limit - len(request.prompt_token_ids), request.sampling
            if not 1 <= room < sampling.max_tokens:
                raise
            request.sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
            return await self._response(call, node, policy, request)

    async def _response(self, call: Call, node: Node, policy: Policy, request: TokenCompletionRequest) -> ChatResponse:
        """The completion; if the client wants a stream, the call gets its text as it is sampled."""
        client, decode = policy.client, decoder_of(policy.chat_template)
        if not call.is_streamed or decode is None or not isinstance(client, StreamingClient):
            response, _ = await client.complete_tokens(request)
            return response
        stops = request.sampling.stop
        splitter = ReplyPieces(
            decode,
            stops=(stops,) if isinstance(stops, str) else tuple(stops or ()),
            prefix=policy.chat_template.reply_prefix,
            with_tools=bool(node.tools),
        )
        async with aclosing(client.stream_tokens(request)) as chunks:
            async for chunk in chunks:
                if chunk.response is not None:
                    return chunk.response
                if pieces := splitter.push(chunk.token_ids):
                    call.add(pieces)
        raise RuntimeError(f"{type(client).__name__}.stream_tokens ended without a response.")

    def _give_up(self, call: Call) -> None:
        """Cancel a call whose client is gone."""
        if call.num_waiting == 0:
            call.task.cancel()
            if call.node is not None:  # at once: no retry may join it any more
                self._drop(call.node, "undelivered")

    def _drop(self, node: Node, why: str) -> None:
        """The call is in no rollout: the client does not have its answer."""
        if node.state == "open":
            node.state = "undelivered"
            self.counts[why] += 1


def _is_usable(call: Call) -> bool:
    """Still running, or answered; a call that failed, was cancelled or given up is not."""
    task = call.task
    if call.node is not None and call.node.state == "undelivered":
        return False
    return not task.done() or (not task.cancelled() and task.exception() is None)
