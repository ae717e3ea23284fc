"""Our envs served in the protocol of OpenEnv 0.10: `openenv_app` is an aiohttp application.

Sessions live behind the WebSocket /ws, one env each: reset, step, state, close, and MCP calls as JSON-RPC. Over plain HTTP there
are /health, /metadata, /schema, /mcp and a stateless /reset, as OpenEnv's own server has them. An action is {"text": …}; an
observation has the env's text and, where it lists them, its legal actions.
"""

import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ludic import registry
from ludic.envs.adapters.openenv.session import SCHEMAS, Refused, RpcError, Session
from ludic.envs.check import Env
from ludic.types import ConfigError, LudicError, MissingExtra
from ludic.types.urls import is_same_secret

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY = 4 * 2**20
_PATHS = {
    "/reset": "post",
    "/step": "post",
    "/state": "get",
    "/schema": "get",
    "/metadata": "get",
    "/health": "get",
    "/mcp": "post",
}


class _Server:
    """The sessions of an application, and its handlers."""

    def __init__(
        self,
        new_session: Callable[[], Session],
        *,
        name: str,
        max_sessions: int,
        max_idle_s: float,
        token: str | None,
    ) -> None:
        self._new_session, self._name, self._token = new_session, name, token
        self._max_sessions, self._max_idle_s = max_sessions, max_idle_s
        self._sessions: dict[str, Session] = {}
        env = new_session().env
        if len(env.agent_ids) != 1:
            raise ConfigError(
                f"{name} has the agents {env.agent_ids}, and a session of OpenEnv has one. Serve an env with one agent: a game "
                "against a scripted opponent, such as tic_tac_toe."
            )
        self._about = (inspect.getdoc(type(env)) or name).partition("\n\n")[0]

    async def close(self, *_: Any) -> None:
        for session in list(self._sessions.values()):
            await self._end(session)

    async def _end(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        await session.env.async_close()

    async def _open(self) -> Session:
        now = time.monotonic()
        if len(self._sessions) >= self._max_sessions:
            for old in list(self._sessions.values()):
                if not old.is_attached and now - old.used_at > self._max_idle_s:
                    await self._end(old)
        if len(self._sessions) >= self._max_sessions:
            raise Refused(
                "CAPACITY_REACHED",
                f"Server at capacity: {len(self._sessions)} of {self._max_sessions} sessions are in use.",
                active_sessions=len(self._sessions),
                max_sessions=self._max_sessions,
            )
        try:
            session = self._new_session()
        except Exception as error:
            raise Refused("FACTORY_ERROR", f"The env cannot be made: {type(error).__name__}: {error}") from error
        self._sessions[session.id] = session
        return session

    def allows(self, request: "web.Request") -> bool:
        if self._token is None or request.path == "/health":
            return True
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return is_same_secret(given, self._token)

    # --- /ws ---

    async def socket(self, request: "web.Request") -> "web.StreamResponse":
        from aiohttp import WSMsgType, web

        socket = web.WebSocketResponse(max_msg_size=MAX_BODY, heartbeat=30.0)
        await socket.prepare(request)
        joined = request.query.get("session_id")
        try:
            session = self._join(joined) if joined else await self._open()
        except Refused as refused:
            await socket.send_json({"type": "error", "data": refused.data})
            await socket.close()
            return socket
        session.is_attached = True
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    continue
                session.used_at = time.monotonic()
                reply = await self._answer(session, message.data)
                if reply is None:
                    break
                await socket.send_str(json.dumps(reply))
        finally:
            session.is_attached = False
            if not joined:
                await self._end(session)
        await socket.close()
        return socket

    def _join(self, id: str) -> Session:
        session = self._sessions.get(id)
        if session is None or session.is_attached:
            state = "unknown" if session is None else "in use"
            raise Refused("SESSION_ERROR", f"The session {id} is {state}.")
        return session

    async def _answer(self, session: Session, text: str) -> dict[str, Any] | None:
        """The reply to one message; None if it ends the session."""
        try:
            message = json.loads(text)
            if not isinstance(message, dict):
                raise ValueError("a message is a JSON object")
        except (ValueError, RecursionError) as error:
            return {"type": "error", "data": {"message": f"Invalid JSON: {error}", "code": "INVALID_JSON"}}
        data = message.get("data") or {}
        try:
            match message.get("type"):
                case "reset":
                    return {"type": "observation", "data": await session.reset(data)}
                case "step":
                    return {"type": "observation", "data": await session.step(data)}
                case "state":
                    return {"type": "state", "data": session.state()}
                case "mcp":
                    return {"type": "mcp", "data": await self._rpc(data, session)}
                case "close":
                    return None
                case other:
                    raise Refused("UNKNOWN_TYPE", f"Unknown message type: {other}")
        except Refused as refused:
            return {"type": "error", "data": refused.data}
        except Exception as error:  # noqa: BLE001 - the client gets the env's error, and the session goes on
            words = str(error) if isinstance(error, LudicError) else f"{type(error).__name__}: {error}"
            return {"type": "error", "data": {"message": words, "code": "EXECUTION_ERROR"}}

    # --- /mcp ---

    async def _rpc(self, call: Any, session: Session | None = None) -> dict[str, Any]:
        number = call.get("id") if isinstance(call, dict) else None
        try:
            if not isinstance(call, dict) or call.get("jsonrpc") != "2.0" or not isinstance(call.get("method"), str):
                raise RpcError(-32600, "Invalid request: it needs jsonrpc '2.0' and a method.")
            params = call.get("params") or {}
            if not isinstance(params, dict):
                raise RpcError(-32602, "Params must be an object")
            return {"jsonrpc": "2.0", "id": number, "result": await self._result(call["method"], params, session)}
        except RpcError as error:
            return {"jsonrpc": "2.0", "id": number, "error": {"code": error.code, "message": str(error)}}
        except Refused as error:
            return {"jsonrpc": "2.0", "id": number, "error": {"code": -32000, "message": str(error)}}

    async def _result(self, method: str, params: Mapping[str, Any], session: Session | None) -> Any:
        if method == "openenv/session/create":
            return {"session_id": (session or await self._open()).id}
        wanted = params.get("session_id")
        if session is None and wanted is not None:
            session = self._sessions.get(str(wanted))
            if session is None:
                raise RpcError(-32602, f"Unknown session_id: {wanted}")
        if method == "openenv/session/close":
            if session is None or session.is_attached:
                raise RpcError(-32600, "A session_id without a WebSocket is needed.")
            await self._end(session)
            return {"session_id": session.id, "closed": True}
        if session is None:
            if method == "tools/list":
                return {"tools": []}  # an env's tools belong to an episode
            raise RpcError(-32602, "Tools belong to an episode: open a session and reset it first.")
        session.used_at = time.monotonic()
        return await session.mcp(method, params)

    # --- documents, and the stateless calls ---

    async def http(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        match request.path:
            case "/health":
                return web.json_response({"status": "healthy"})
            case "/metadata":
                return web.json_response({"name": self._name, "description": self._about})
            case "/schema":
                return web.json_response(dict(SCHEMAS))
            case "/state":
                return web.json_response({"episode_id": None, "step_count": 0})
            case "/openapi.json":
                paths = {path: {verb: {"responses": {"200": {"description": "OK"}}}} for path, verb in _PATHS.items()}
                info = {"title": f"{self._name}, served by Ludic", "version": "1.0.0"}
                return web.json_response({"openapi": "3.1.0", "info": info, "paths": paths})
        try:
            body = json.loads(await request.text() or "{}")
        except ValueError:
            body = None
        if request.path == "/mcp":
            return web.json_response(await self._rpc(body))
        if request.path == "/step":
            problem = "A step belongs to an episode: open the WebSocket /ws, send reset and then step."
            return web.json_response({"detail": problem}, status=409)
        return await self._reset_once(body)

    async def _reset_once(self, body: Any) -> "web.Response":
        from aiohttp import web

        if not isinstance(body, dict):
            return web.json_response({"detail": "The body must be a JSON object."}, status=422)
        try:
            session = await self._open()
        except Refused as refused:
            return web.json_response({"detail": str(refused)}, status=503)
        try:
            return web.json_response(await session.reset(body))
        except Refused as refused:
            return web.json_response({"detail": str(refused)}, status=422)
        finally:
            await self._end(session)


def openenv_app(
    make: str | Callable[..., Env],
    *,
    name: str | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    max_sessions: int = 64,
    max_idle_s: float = 3600.0,
    token: str | None = None,
) -> "web.Application":
    """An aiohttp application that serves an env in OpenEnv's protocol; `aiohttp.web.run_app` runs it.

    `make` is the id of a registered env, or makes an env with one agent; with `samples` it is given a `sample`, which the seed of
    the episode picks. `token`: what clients must send as `Authorization: Bearer …`. The env's tools are MCP tools. Sessions that
    were opened without a WebSocket and not used for `max_idle_s` end when another one needs the room.
    """
    try:
        from aiohttp import web
    except ImportError as error:
        raise MissingExtra("openenv", "Serving an env in OpenEnv's protocol") from error
    name = name or (make if isinstance(make, str) else getattr(make, "__name__", "env"))
    if isinstance(make, str):
        example = {} if samples else registry.envs.spec(make).example
        make = partial(registry.envs.make, make, **example)
    server = _Server(
        partial(Session, make, samples),
        name=str(name),
        max_sessions=max_sessions,
        max_idle_s=max_idle_s,
        token=token,
    )

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not server.allows(request):
            return web.json_response({"detail": "Send the server's token as Authorization: Bearer …"}, status=401)
        return await handler(request)

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
    app.router.add_get("/ws", server.socket)
    app.router.add_get("/openapi.json", server.http)
    for path, verb in _PATHS.items():
        app.router.add_route(verb.upper(), path, server.http)
    app.on_shutdown.append(server.close)
    return app


class LocalServer:
    """An app on a free port of this machine, for one session in this process."""

    def __init__(self, runner: "web.AppRunner", url: str) -> None:
        self._runner, self.url = runner, url

    @classmethod
    async def start(cls, make: str | Callable[..., Env], **settings: Any) -> "LocalServer":
        """Serve on 127.0.0.1; the arguments are those of `openenv_app`."""
        app = openenv_app(make, **settings)
        from aiohttp import web

        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return cls(runner, f"http://127.0.0.1:{runner.addresses[0][1]}")

    async def stop(self) -> None:
        await self._runner.cleanup()
