"""`Gateway`: the HTTP server that agents talk to.

It serves chat completions, Responses and Anthropic messages for the sessions that are open, each with its own API key, and control
endpoints that open, reward and close sessions for agents in other processes.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ludic.http.errors import RequestRefused, describe_error
from ludic.http.tokens import CONTROL_HEADER, bearer_of, require_secret
from ludic.tools import Tool
from ludic.types import ConfigError, InferenceSpec, MissingExtra, Rollout
from ludic.types.steps import MAX_REWARD
from ludic_serve.gateway.forest import Node
from ludic_serve.gateway.session import Call, Policy, Session, SessionLimits
from ludic_serve.gateway.threads import session_rollouts
from ludic_serve.gateway.wire.canonical import Dialect, JSONObject, ModelRequest, drop_constraints
from ludic_serve.gateway.wire.chat import Chat
from ludic_serve.gateway.wire.messages import Messages
from ludic_serve.gateway.wire.responses import Responses, put_items
from ludic_serve.request import parse_object

try:
    from aiohttp import web

    from ludic.http.app import AppServer, Load, ServerLimits, allow_many_files, answering, guard
except ImportError as error:
    raise MissingExtra("serve", "The gateway") from error

logger = logging.getLogger(__name__)
OnClosed = Callable[[Session, list[Rollout]], None]

PING_S = 3.0
"""A stream in which nothing happens for this long gets a sign of life; clients and proxies give up on silent connections."""
MAX_IDLE_S = 3600.0
_MAX_FORK_RATE = 0.1
"""Share of calls with a changed history above which a session logs a warning."""
_MAX_GROUP = 256
_MAX_CONNECTIONS = 1 << 16
"""Every episode has at least one."""
_KEY_HEADERS = ("x-api-key", "x-goog-api-key")
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_CHAT, _RESPONSES, _MESSAGES = Chat(), Responses(), Messages()


class Gateway:
    """Serves the model calls of sessions."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        default: str | None = None,
        control_token: str | None = None,
        inference: InferenceSpec | None = None,
        limits: ServerLimits | None = None,
        on_closed: OnClosed | None = None,
        max_idle_s: float | None = MAX_IDLE_S,
        lenient: bool = False,
    ) -> None:
        """`policies`: by the names that requests give; `default` answers every other name. `control_token` turns the control
        endpoints on; `inference` is for sessions that are opened without one; `on_closed` gets the rollouts of each session that
        the control endpoints close. Sessions of the control endpoints that are not used for `max_idle_s` are closed; their rollouts
        are kept if they have a reward. `lenient` is for all sessions (`Session.lenient`)."""
        if not policies or (default is not None and default not in policies):
            raise ConfigError(
                f"The gateway's default policy is {default!r}; there are {', '.join(policies) or 'none'}."
            )
        self.policies = dict(policies)
        self.url = ""
        self._default = default
        self._control_token = control_token
        self._inference = inference or InferenceSpec()
        self._limits = limits or ServerLimits(max_connections=_MAX_CONNECTIONS)
        self._load = Load(self._limits)
        self._on_closed = on_closed
        self._sessions: dict[str, Session] = {}
        """Open sessions by API key."""
        self._rewards: dict[str, JSONObject] = {}
        """Rewards of open sessions, by id."""
        self._max_idle_s = max_idle_s
        self._lenient = lenient
        self._opened_by_control: set[Session] = set()
        self._num_expired = 0
        self._num_warnings = 0
        self._http: AppServer | None = None
        self._expiring: asyncio.Task[None] | None = None
        self._started = int(time.time())

    # --- lifecycle ---

    async def start(self, host: str = "127.0.0.1", port: int = 0, *, unix_socket: str | Path | None = None) -> None:
        """Listen on an address, and on a Unix socket if one is given. Port 0 takes a free one; `url` is set then."""
        allow_many_files()
        http = AppServer(self._app(), self._limits, has_token=self._control_token is not None)
        self.url = await http.start(host, port, unix_socket=unix_socket)
        self._http = http
        if self._max_idle_s is not None and self._control_token is not None:
            self._expiring = asyncio.create_task(self._expire(self._max_idle_s))

    async def close(self, drain_s: float = 0.0) -> None:
        """Calls in progress may go on for `drain_s`, or until this is cancelled; then all sessions are closed."""
        try:
            if self._http is not None:
                await self._http.drain(drain_s)
        finally:
            for session in [*self._sessions.values()]:
                self.close_session(session)
            if self._expiring is not None:
                self._expiring.cancel()
            if self._http is not None:
                await self._http.close()

    def open_session(
        self,
        *,
        inference: InferenceSpec | None = None,
        sampling_seed: int | None = None,
        limits: SessionLimits | None = None,
        timeout_s: float | None = None,
        lenient: bool = False,
        group: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> Session:
        session = Session(
            policies=self.policies,
            default=self._default,
            inference=inference or self._inference,
            sampling_seed=sampling_seed,
            limits=limits or SessionLimits(),
            timeout_s=timeout_s,
            lenient=lenient or self._lenient,
            base_url=f"{self.url}/v1",
            group=group,
            tools={tool.name: tool for tool in tools},
        )
        self._sessions[session.api_key] = session
        return session

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def close_session(self, session: Session) -> None:
        """Refuse the session's later requests and forget its key."""
        session.close()
        if self._sessions.pop(session.api_key, None) is None:
            return  # it was closed before
        self._rewards.pop(session.id, None)
        self._opened_by_control.discard(session)
        differing = [node.difference for node in session.nodes if node.difference is not None]
        if len(differing) > _MAX_FORK_RATE * len(session.nodes):
            self._num_warnings += 1
            if self._num_warnings & (self._num_warnings - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                logger.warning(
                    "%d of %d calls of a session forked: the agent's history differs from what was recorded, so tokens are "
                    "repeated (%d such sessions so far). First difference: %s.",
                    len(differing), len(session.nodes), self._num_warnings, differing[0],
                )  # fmt: skip

    # --- the application ---

    def _app(self) -> web.Application:
        app = web.Application(
            middlewares=[guard(self._limits, _answer_error)], handler_args={"handler_cancellation": True}
        )
        for prefix in ("/v1", "/v1/v1", "/s/{key}/v1", "/s/{key}/v1/v1"):  # Anthropic's client adds /v1 itself
            app.add_routes(
                [
                    web.post(f"{prefix}/chat/completions", self._chat),
                    web.post(f"{prefix}/responses", self._responses),
                    web.post(f"{prefix}/messages", self._messages),
                    web.post(f"{prefix}/messages/count_tokens", self._count_tokens),
                    web.get(f"{prefix}/models", self._models),
                    web.get(f"{prefix}/tools", self._tools),
                    web.post(f"{prefix}/tools/{{name}}", self._call_tool),
                ]
            )
        app.add_routes(
            [
                web.post("/sessions", self._open),
                web.get("/sessions/{id}", self._show),
                web.post("/sessions/{id}/reward", self._reward),
                web.post("/sessions/{id}/close", self._close),
                web.get("/health", self._health),
            ]
        )
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions), "expired": self._num_expired})

    # --- model calls ---

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _CHAT)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _RESPONSES)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _MESSAGES)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        async with self._load.body(request) as data:
            asked = _read(_MESSAGES, session, {"max_tokens": 1, **parse_object(data)})
        return web.json_response({"input_tokens": await asyncio.to_thread(session.count_tokens, asked)})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        cards = [
            {
                "id": name,
                "object": "model",
                "type": "model",
                "display_name": name,
                "created": self._started,
                "owned_by": "ludic",
            }
            for name in self.policies
        ]
        return web.json_response({"object": "list", "data": cards, "has_more": False})

    # --- tools of the episode's env ---

    async def _tools(self, request: web.Request) -> web.Response:
        return web.json_response({"tools": [tool.schema for tool in self._session(request).tools.values()]})

    async def _call_tool(self, request: web.Request) -> web.Response:
        """The body is an object of arguments; a failure of the tool is an answer too, with `is_error`."""
        session, name = self._session(request), request.match_info["name"]
        if name not in session.tools:
            known = ", ".join(session.tools) or "none"
            raise RequestRefused(404, "tool_not_found", f"This episode has no tool {name!r:.80}; there are: {known}.")
        async with self._load.body(request) as data:
            arguments = parse_object(data) if data else {}
        session.last_used = time.monotonic()
        answer = await session.tools[name].call(arguments)
        return web.json_response({"content": answer.content, "is_error": answer.is_error})

    def _session(self, request: web.Request) -> Session:
        """The session whose key is in the headers or the path."""
        keys = [bearer_of(request.headers), *(request.headers.get(name) for name in _KEY_HEADERS)]
        keys.append(request.match_info.get("key"))
        for key in keys:
            if key and (session := self._sessions.get(key)) is not None:
                return session
        raise RequestRefused(
            401,
            "invalid_api_key",
            "No open session has this API key; each session has its own, and a closed one has none.",
        )

    async def _answer(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._session(http)
        async with self._load.body(http) as data:
            request = _read(dialect, session, parse_object(data))
            given = http.headers.get("Idempotency-Key", "")
            is_retry = given != "" or http.headers.get("X-Stainless-Retry-Count", "0") != "0"
            # The body counts too: some clients send the same key with every request.
            key = hashlib.sha256(f"{http.path}\0{given}\0".encode(errors="replace") + data).hexdigest()
        call = session.begin(request, key=key, is_retry=is_retry)
        call.num_waiting += 1
        is_answered = False
        try:
            answer = await (_stream if request.stream else _whole)(http, dialect, session, call, request, self._limits)
            is_answered = True
            return answer
        finally:
            call.num_waiting -= 1
            if not is_answered:
                session.lost(call)

    # --- control ---

    def _check_control(self, request: web.Request) -> None:
        message = f"Sessions are managed with the header {CONTROL_HEADER} and the gateway's token."
        refusal = RequestRefused(403, "control_token", message)
        require_secret(request.headers.get(CONTROL_HEADER, ""), self._control_token, refusal)

    def _controlled(self, request: web.Request) -> Session:
        self._check_control(request)
        wanted = request.match_info["id"]
        found = next((session for session in self._sessions.values() if session.id == wanted), None)
        if found is None:
            raise RequestRefused(404, "session_not_found", f"There is no open session {wanted!r:.80}.")
        found.last_used = time.monotonic()
        return found

    async def _control_body(self, request: web.Request, known: tuple[str, ...]) -> JSONObject:
        async with self._load.body(request) as data:
            body = parse_object(data) if data else {}
        unknown = sorted(body.keys() - {*known})
        if unknown:
            raise ConfigError(f"Unknown field {unknown[0]!r:.80}; there are {', '.join(known)}.")
        return body

    async def _open(self, request: web.Request) -> web.Response:
        self._check_control(request)
        body = await self._control_body(request, ("seed", "max_calls", "max_tokens", "group"))
        group = body.pop("group", None)
        if group is not None and (not isinstance(group, str) or not 0 < len(group) <= _MAX_GROUP):
            raise ConfigError(f"group={group!r:.80}; it must be a text of at most {_MAX_GROUP} characters.")
        wrong = [name for name, value in body.items() if value is not None and type(value) is not int]
        if wrong:
            raise ConfigError(f"{wrong[0]}={body[wrong[0]]!r:.80}; it must be a whole number.")
        limits = SessionLimits(max_calls=body.get("max_calls"), max_tokens=body.get("max_tokens"))
        session = self.open_session(sampling_seed=body.get("seed"), limits=limits, group=group)
        self._opened_by_control.add(session)
        return web.json_response({"id": session.id, "base_url": session.base_url, "api_key": session.api_key})

    async def _show(self, request: web.Request) -> web.Response:
        session = self._controlled(request)
        return web.json_response(
            {"id": session.id, "counts": session.counts, "calls": [_call_card(node) for node in session.nodes]}
        )

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._controlled(request)
        body = await self._control_body(request, ("value", "components", "calls"))
        given = {name: body.get(name) or {} for name in ("components", "calls")}
        for name, values in given.items():
            if not isinstance(values, dict) or not all(_is_number(value) for value in values.values()):
                raise ConfigError(f"{name} must be an object whose values are numbers, at most {MAX_REWARD:g} in size.")
        if "value" in body:
            if not _is_number(body["value"]):
                raise ConfigError(f"value={body['value']!r:.80}; it must be a number, at most {MAX_REWARD:g} in size.")
            given["components"]["reward"] = body["value"]
        session_rollouts(session, call_rewards=given["calls"])  # refuses a call that is not the session's
        earlier = self._rewards.get(session.id, {})
        self._rewards[session.id] = {name: {**earlier.get(name, {}), **values} for name, values in given.items()}
        session.is_rewarded = True
        return web.json_response({"id": session.id, **self._rewards[session.id]})

    async def _close(self, request: web.Request) -> web.Response:
        session = self._controlled(request)
        rollouts = self._hand_over(session)
        return web.json_response({"id": session.id, "counts": session.counts, "rollouts": len(rollouts)})

    def _hand_over(self, session: Session) -> list[Rollout]:
        """Close a session; its rollouts go to `on_closed`."""
        rewards = self._rewards.get(session.id, {})
        self.close_session(session)
        facts: JSONObject = {"engine": {"episode_run": session.id}}  # its threads are one episode
        if session.group is not None:
            facts["request_meta"] = {"group_id": session.group}
        rollouts = session_rollouts(
            session, reward=rewards.get("components") or 0.0, call_rewards=rewards.get("calls"), meta=facts
        )
        if self._on_closed is not None:
            self._on_closed(session, rollouts)
        return rollouts

    async def _expire(self, max_idle_s: float) -> None:
        while True:
            await asyncio.sleep(min(max_idle_s / 4, 60.0))
            self.close_idle(max_idle_s)

    def close_idle(self, max_idle_s: float) -> None:
        """Close the control endpoints' idle sessions: the program that opened them has ended, or forgot them."""
        for session in [session for session in self._opened_by_control if session.idle_s >= max_idle_s]:
            self._num_expired += 1
            is_rewarded = session.is_rewarded
            logger.warning(
                "Session %s was not used for %g s and is closed; its rollouts are %s (%d such sessions so far).",
                session.id, max_idle_s, "kept" if is_rewarded else "dropped: it has no reward", self._num_expired,
            )  # fmt: skip
            try:
                self._hand_over(session) if is_rewarded else self.close_session(session)
            except Exception:
                logger.exception("The rollouts of session %s are lost.", session.id)


def _read(dialect: Dialect, session: Session, body: JSONObject) -> ModelRequest:
    if dialect is _RESPONSES:
        put_items(body, session.reply)
    dropped = drop_constraints(body)
    if dropped and not session.lenient:
        raise ConfigError(
            f"{', '.join(dropped)}: this server does not constrain what the model writes. Leave it out, or start with --lenient, "
            "which accepts it without effect."
        )
    request = dialect.read(body)
    request.without_effect += dropped
    return request


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_REWARD


def _call_card(node: Node) -> JSONObject:
    return {
        "id": node.token,
        "parent": None if node.parent is None else node.parent.token,
        "kind": node.kind,
        "rerendered": node.is_rerendered,
        "state": node.state,
        "superseded": node.is_superseded,
        "difference": None if node.difference is None else str(node.difference),
        "text": node.text,
    }


# --- writing answers ---


def _answer_error(http: web.Request, error: Exception) -> web.Response:
    """An error in the dialect of the request."""
    if isinstance(error, ConnectionError) and _is_gone(http):
        return web.Response(status=499)  # the client has hung up
    facts = describe_error(error)
    dialect: Dialect = _MESSAGES if "/messages" in http.path else _CHAT
    return web.json_response(dialect.error(facts), status=facts.status)


def _is_gone(http: web.Request) -> bool:
    """True if the client has hung up."""
    return http.transport is None or http.transport.is_closing()


async def _whole(
    http: web.Request, dialect: Dialect, session: Session, call: Call, request: ModelRequest, limits: ServerLimits
) -> web.StreamResponse:
    reply = await call.reply()
    response = web.Response(body=msgspec.json.encode(dialect.whole(reply, request)), content_type="application/json")
    session.delivering(call)
    try:
        async with answering(http, limits):
            await response.prepare(http)
            await response.write_eof()
    except BaseException:
        session.not_delivered(call)
        raise
    return response


async def _stream(
    http: web.Request, dialect: Dialect, session: Session, call: Call, request: ModelRequest, limits: ServerLimits
) -> web.StreamResponse:
    events = dialect.stream(call.head, request)
    response = web.StreamResponse(headers=_EVENTS)

    async def send(event: bytes, *, is_last: bool = False) -> None:
        async with answering(http, limits):
            if not response.prepared:
                await response.prepare(http)
            await response.write(event)
            if is_last:
                await response.write_eof()

    try:
        async for piece in call.pieces(PING_S):
            begin = b"" if response.prepared else events.begin()
            await send(begin + (events.PING if piece is None else events.push(*piece)))
        reply = await call.reply()
    except Exception as error:
        if not response.prepared or _is_gone(http):
            raise
        await send(events.fail(describe_error(error)))  # the status is already sent, so the error is an event
        return response
    begin = b"" if response.prepared else events.begin()  # a reply without any text
    session.delivering(call)
    try:
        await send(begin + events.end(reply), is_last=True)
    except BaseException:
        session.not_delivered(call)
        raise
    return response
