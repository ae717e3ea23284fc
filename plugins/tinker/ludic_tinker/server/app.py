"""The HTTP endpoints that Tinker's SDK calls, on aiohttp: keys, bodies, errors and long polling.

A handler reads the body, asks the service, and answers with JSON. Requests that compute are answered with the id of a future;
`retrieve_future` holds the connection until there is a result, for half a minute at most.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec import Struct

from ludic.http.address import check_host
from ludic.tasks import cancel_all
from ludic.types import MissingExtra
from ludic_tinker.server import bodies, messages, rest
from ludic_tinker.server.futures import Failure, Future
from ludic_tinker.server.records import CheckpointPath, Keys, Refused, RequestKind
from ludic_tinker.server.service import Service
from ludic_tinker.server.storage.database import StorageError

try:
    from aiohttp import web

    from ludic.http.app import AppServer, Load, ServerLimits, allow_many_files, guard
    from ludic.http.errors import describe_error
except ImportError as error:
    raise MissingExtra("serve", "The HTTP server") from error

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=Struct)

_LIMITS = ServerLimits(max_connections=8192, max_body_bytes=64 * 2**20, max_body_bytes_in_all=512 * 2**20)
POLL_S = 30.0
"""Seconds that a client that asks for a result is kept waiting; the SDK gives up after 45 s."""
SWEEP_S = 15.0
OLDEST_SDK = (0, 22)
"""The first version whose training data is protobuf. Tested: 0.22.7, 0.24.1, 0.27.2, 0.30.4, 0.33.1, 0.35.0, 0.36.0 and 0.38.0."""
_API = "/api/v1"
_OPEN = {f"{_API}/healthz", rest.DOWNLOAD}
"""Endpoints that need no key."""
_CONFIG: dict[str, Any] = {
    "create_model_via_load_weights": True,
    "sample_join_sampling_session": True,
    # Of SDKs before 0.27; later ones always do so.
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
}
"""Features of this server that the SDK uses if it is told so. Its poller `sample_use_retrieve_futures` is not one: after a
restart of the server it would wait for lost requests without end."""
_DYNAMIC_CONFIG: dict[str, Any] = {"sample_cancel_enabled": True}
_NUMBERED: dict[RequestKind, Callable[[bytes], Any]] = {
    "optim_step": lambda data: bodies.read_json(data, bodies.OptimStep),
    "save_weights": lambda data: bodies.read_json(data, bodies.SaveWeights),
    "save_weights_for_sampler": lambda data: bodies.read_json(data, bodies.SaveWeights),
    "save_weights_external": lambda data: bodies.read_json(data, bodies.SaveExternal),
}
"""Requests in JSON whose body has their run and number, and how it is read."""
_NOT_HERE = {
    "create_custom_loss": "Losses cannot be uploaded to this server; forward_backward_custom computes them in the client.",
    "auth/token": "This server takes API keys and issues no tokens.",
}


def _make_app(service: Service, keys: Keys) -> web.Application:
    """The endpoints as an aiohttp application."""
    server = _Server(service, keys)
    # A client that goes away cancels its handler: a long poll, never what it waits for.
    app = web.Application(
        middlewares=[guard(_LIMITS, _answer_error, admit=server.admit)], handler_args={"handler_cancellation": True}
    )
    posts: dict[str, Handler] = {
        "client/config": server.client_config,
        "client/dynamic_config": server.client_dynamic_config,
        "telemetry": server.telemetry,
        "create_session": server.create_session,
        "session_heartbeat": server.session_heartbeat,
        "sessions/{id}/finish": server.finish_session,
        "create_model": server.create_model,
        "get_info": server.get_info,
        "unload_model": server.unload_model,
        "forward_backward": server.forward_backward,
        **{kind: server.numbered(kind, read) for kind, read in _NUMBERED.items()},
        "load_weights": server.load_weights,
        "weights_info": server.weights_info,
        "create_sampling_session": server.create_sampling_session,
        "join_sampling_session": server.join_sampling_session,
        "asample": server.asample,
        "retrieve_future": server.retrieve_future,
        "cancel_future": server.cancel_future,
        **dict.fromkeys(_NOT_HERE, server.not_here),
    }
    app.add_routes([web.post(f"{_API}/{name}", handler) for name, handler in posts.items()])
    app.add_routes(
        [
            web.get(f"{_API}/healthz", server.health),
            web.get(f"{_API}/get_server_capabilities", server.capabilities),
            web.get(f"{_API}/samplers/{{id}}", server.sampler),
        ]
    )
    app.add_routes(rest.routes(service.store, server.tenant))
    return app


async def serve(
    service: Service,
    keys: Keys,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    insecure: bool = False,
    drain_s: float = 0.0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until cancelled; then requests in progress may continue for `drain_s`, or until this is cancelled again.

    Port 0 takes a free one; `on_ready` gets the address.
    """
    check_host(host, "keys" if keys else None, insecure)
    allow_many_files()  # every client that waits for a result holds a connection
    server = AppServer(_make_app(service, keys), _LIMITS, has_token=bool(keys))
    sweeper = asyncio.create_task(_sweep(service))
    try:
        await server.serve(host, port, on_ready=on_ready, drain_s=drain_s)
    finally:
        await cancel_all([sweeper])
        await service.close()


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            service.sweep()
        except OSError as error:
            logger.error("the end of a session could not be written down: %s", error)


class _Server:
    """The handlers."""

    def __init__(self, service: Service, keys: Keys) -> None:
        self._service, self._keys = service, keys
        self._load = Load(_LIMITS)
        self._reading = asyncio.Lock()
        """Held while the protobuf of a pass is parsed, which may take thirty times its size."""

    def admit(self, request: web.Request) -> None:
        if request.path not in _OPEN:
            self.tenant(request)

    def tenant(self, request: web.Request) -> str:
        """Who asks, by the key."""
        return self._keys.tenant(request.headers.get("X-API-Key"))

    async def _read(self, request: web.Request, kind: type[B]) -> tuple[str, B]:
        """The tenant and the body."""
        async with self._load.body(request) as data:
            return self.tenant(request), bodies.read_json(data, kind)

    # --- the server itself ---

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def client_config(self, request: web.Request) -> web.Response:
        return web.json_response(_CONFIG)

    async def client_dynamic_config(self, request: web.Request) -> web.Response:
        return web.json_response(_DYNAMIC_CONFIG)

    async def telemetry(self, request: web.Request) -> web.Response:
        """Read and forgotten."""
        async with self._load.body(request):
            return web.json_response({"status": "accepted"})

    async def capabilities(self, request: web.Request) -> web.Response:
        offer = self._service.offer
        about = {"max_context_length": offer.max_context, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [{"model_name": name, **about} for name in offer.names]})

    async def not_here(self, request: web.Request) -> web.Response:
        # 400 and not 501: the SDK repeats every 5xx for minutes before it shows the sentence.
        raise Refused(400, _NOT_HERE[request.path.removeprefix(f"{_API}/")])

    # --- sessions ---

    async def create_session(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.CreateSession)
        _check_sdk(body.sdk_version)
        session = self._service.create_session(tenant, body)
        return web.json_response({"type": "create_session", "session_id": session.id})

    async def session_heartbeat(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.SessionBody)
        self._service.heard(tenant, body.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def finish_session(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.FinishSession)
        self._service.finish_session(tenant, request.match_info["id"], body.reason.type, body.detail)
        return web.json_response({})

    # --- training ---

    async def create_model(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.CreateModel)
        return _promise(self._service.create_model(tenant, body))

    async def get_info(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.ModelBody)
        run, offer = self._service.run(tenant, body.model_id), self._service.offer
        data = {"arch": offer.architecture, "model_name": run.base_model, "tokenizer_id": offer.tokenizer_id}
        about = {"type": "get_info", "model_id": run.id, "model_name": run.base_model, "model_data": data}
        return web.json_response({**about, "is_lora": True, "lora_rank": run.spec.rank})

    async def unload_model(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.ModelBody)
        return _promise(self._service.unload(tenant, body.model_id))

    def numbered(
        self, kind: RequestKind, read: Callable[[bytes], Any]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Accepts a training request of this kind; `read` finds its run and number in the body."""

        async def accept(request: web.Request) -> web.Response:
            async with self._load.body(request) as data:
                head = read(data)
                return _promise(self._service.request(self.tenant(request), head.model_id, head.seq_id, kind, data))

        return accept

    async def forward_backward(self, request: web.Request) -> web.Response:
        """Accept a pass. If it is too large, only the reason is kept, because the SDK has already used the number."""
        async with self._load.body(request) as data:
            async with self._reading:
                head, problem = await asyncio.to_thread(messages.read_head, data)
            kind: RequestKind = "forward_backward" if problem is None else "refused"
            payload = data if problem is None else problem.encode()
            return _promise(self._service.request(self.tenant(request), head.model_id, head.seq_id, kind, payload))

    async def load_weights(self, request: web.Request) -> web.Response:
        async with self._load.body(request) as data:
            head, tenant = bodies.read_json(data, bodies.LoadWeights), self.tenant(request)
            if head.session_id is not None and head.model_seq_id is not None:
                return _promise(self._service.create_from_weights(tenant, head, data))
            if head.model_id is None or head.seq_id is None:
                raise Refused(400, "load_weights needs model_id and seq_id, or session_id and model_seq_id.")
            return _promise(self._service.request(tenant, head.model_id, head.seq_id, "load_weights", data))

    async def weights_info(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.WeightsInfo)
        found = self._service.store.checkpoints.get(CheckpointPath.parse(body.tinker_path), tenant)
        trained = {"train_unembed": found.spec.head, "train_mlp": found.spec.mlp, "train_attn": found.spec.attention}
        return web.json_response(
            {"base_model": found.base_model, "is_lora": True, "lora_rank": found.spec.rank, **trained}
        )

    # --- sampling ---

    async def create_sampling_session(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.CreateSamplingSession)
        sampler = self._service.create_sampling_session(tenant, body)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def join_sampling_session(self, request: web.Request) -> web.Response:
        """A number for another client of the session; drawn, so that it stays unique after a restart."""
        tenant, body = await self._read(request, bodies.SamplingSessionBody)
        self._service.store.samplers.get(body.sampling_session_id, tenant)
        return web.json_response({"type": "join_sampling_session", "client_counter": 1 + secrets.randbelow(10**9 - 1)})

    async def sampler(self, request: web.Request) -> web.Response:
        found = self._service.store.samplers.get(request.match_info["id"], self.tenant(request))
        about = {"sampler_id": found.id, "base_model": self._service.offer.names[0], "model_path": found.path}
        return web.json_response(about)

    async def asample(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.SampleBody)
        return _promise(self._service.sampling.sample(tenant, body))

    # --- results ---

    async def retrieve_future(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.RetrieveFuture)
        future = self._service.futures.get(body.request_id, tenant)
        if future is None:
            # The SDK sends a sampling request again after 410; a training request has been carried out or never arrived.
            status = 410 if ":sample:" in body.request_id else 404
            raise Refused(status, f"There is no request {body.request_id!r:.200}; its result may have been dropped.")
        result = await future.wait(POLL_S)
        if result is None:
            why = self._service.why_waiting(body.request_id)
            state = (
                {"queue_state": "active"}
                if why is None
                else {"queue_state": "paused_capacity", "queue_state_reason": why}
            )
            return web.json_response({"type": "try_again", "request_id": body.request_id, **state}, status=408)
        self._service.futures.retrieved(future)
        if isinstance(result, Failure):
            return web.json_response({"error": result.message, "category": "user" if result.is_users else "server"})
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=messages.PROTOBUF)
        return web.json_response(result)

    async def cancel_future(self, request: web.Request) -> web.Response:
        tenant, body = await self._read(request, bodies.CancelFuture)
        self._service.sampling.cancel(tenant, body.request_id)
        return web.json_response({})


def _check_sdk(version: str) -> None:
    """Refused(400) for an SDK that sends training data in another way."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_SDK:
        oldest = ".".join(map(str, OLDEST_SDK))
        raise Refused(400, f"This server takes requests of tinker {oldest} and later; yours is {version}. Upgrade it.")


def _promise(future: Future) -> web.Response:
    answer: dict[str, Any] = {"request_id": future.id}
    if future.num_sequences:
        answer["sample_sequence_ids"] = [f"{future.id}:{index}" for index in range(future.num_sequences)]
    return web.json_response(answer)


def _answer_error(request: web.Request, error: Exception) -> web.Response:
    headers = {}
    if isinstance(error, Refused):
        status, message = error.status, str(error)
        if error.retry_after_s is not None:
            headers["Retry-After"] = f"{error.retry_after_s:g}"
    elif isinstance(error, StorageError):  # the request fails and the server lives
        logger.error("a request could not be written down: %s", error)
        status, message = 507, f"The server could not write the request down: {error}"
    else:
        facts = describe_error(error)
        status, message = facts.status, facts.message
    return web.json_response({"detail": message}, status=status, headers=headers)
