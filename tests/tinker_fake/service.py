"""`FakeTinker`: the service's HTTP protocol, as the official SDK speaks it, in a separate thread.

Requests that compute are answered with a promise, which is then asked for its result (`retrieve_future`). Requests of one
training run are carried out in the order of their sequence numbers, whatever order they arrive in, and a request that comes
twice is carried out once. Training requests and sampled results are protobuf messages, all else is JSON.
"""

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from aiohttp import web
from tinker.proto import tinker_public_pb2 as wire

from tests.tinker_fake.lora_model import LoraSettings, Row, TrainedLora, draw
from tests.tinker_fake.losses import check_inputs

_PROTO = "application/x-protobuf"
_NUMPY = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64, wire.DTYPE_INT32: np.int32}
Result = bytes | dict[str, Any]


class Refused(Exception):
    """The service answers with this status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class FakeTinker:
    """Change its attributes to change its ways. `with FakeTinker({"tiny": model}) as fake: … fake.url`."""

    def __init__(self, base_models: dict[str, Any], *, eos_id: int | None = None, context: int = 64) -> None:
        self.base_models = base_models
        self.eos_id, self.context = eos_id, context
        self.api_key = "tml-right"
        self.projects = {"project-1"}
        self.behave()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Everything that was asked, in order; training data is left out."""
        self.sessions: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, TrainedLora] = {}
        self.checkpoints: dict[str, bytes] = {}
        self._settings_at: dict[str, tuple[str, LoraSettings]] = {}
        self._samplers: dict[str, Any] = {}
        self._base_of: dict[str, str] = {}
        self._jobs: dict[str, dict[int, tuple[str, Callable[[], Result]]]] = defaultdict(dict)
        self._next_job: dict[str, int] = defaultdict(lambda: 1)
        self._known_jobs: dict[tuple[str, int], str] = {}
        self._promises: dict[str, Result | Exception | None] = {}
        self._num_asked: dict[str, int] = defaultdict(int)

    def behave(self) -> None:
        """Back to its usual ways."""
        self.faults: dict[str, list[str]] = defaultdict(list)
        """What happens to the next requests of an endpoint: a status, "drop" (the connection), "lose" (the answer: what was
        asked is done), "fail: why" (the promise)."""
        self.num_try_again = 0
        """How often a promise says that it is not kept yet, before it is."""
        self.inline_limit = 1 << 20
        """Larger results are announced before they are sent."""
        self.ignores_loss_config = False
        self.tokenizer_id: str | None = None
        """Where the SDK loads the models' tokenizer from."""

    # --- life ---

    def __enter__(self) -> Self:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(60), "the fake service did not start"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self, started: threading.Event) -> None:
        torch.set_num_threads(1)
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        started.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/api/v1/{name:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @property
    def run(self) -> TrainedLora:
        """The newest training run."""
        return list(self.runs.values())[-1]

    def asked(self, name: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.requests if asked == name]

    # --- requests ---

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        is_proto = request.content_type == _PROTO
        body: Any = await request.read() if is_proto else (await request.json() if request.can_read_body else {})
        self.requests.append((name, {} if is_proto else body))
        fault = self.faults[name].pop(0) if self.faults[name] else ""
        if fault == "drop":
            return _hang_up(request)
        try:
            if fault.isdecimal():
                raise Refused(int(fault), f"{name} was told to answer {fault}")
            if request.headers.get("X-API-Key") != self.api_key:
                raise Refused(401, "Invalid API key")
            kind, _, id = name.partition("/")
            endpoint = getattr(self, f"_on_{kind}", None)
            if endpoint is None:
                raise Refused(404, f"There is no {name}")
            if name == "retrieve_future":
                return self._on_retrieve_future(body, accepts_proto=_PROTO in request.headers.get("Accept", ""))
            body = body if body or not id else {"id": id}
            answer = endpoint(body, fault.removeprefix("fail: ") if fault.startswith("fail: ") else "")
            return _hang_up(request) if fault == "lose" else web.json_response(answer)
        except Refused as refused:
            return web.json_response({"detail": str(refused)}, status=refused.status)

    def _on_client(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        return {}

    def _on_telemetry(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        return {"status": "accepted"}

    def _on_session_heartbeat(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        return {"type": "session_heartbeat"}

    def _on_sessions(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        """sessions/<id>/finish."""
        return {}

    def _on_get_server_capabilities(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        return {"supported_models": [{"model_name": n, "max_context_length": self.context} for n in self.base_models]}

    def _on_create_session(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        project = body.get("project_id")
        if project is not None and project not in self.projects:
            raise Refused(404, f"Project {project} not found")
        session = f"session-{len(self.sessions)}"
        self.sessions[session] = body
        return {"type": "create_session", "session_id": session}

    def _on_create_model(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        name = body["base_model"]
        if name not in self.base_models:
            raise Refused(400, f"Unknown base model {name}")
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"

        def create() -> Result:
            self.runs[model_id] = TrainedLora(self.base_models[name], LoraSettings(**body["lora_config"]))
            self._base_of[model_id] = name
            return {"type": "create_model", "model_id": model_id}

        return self._promise(model_id, create, fault)

    def _on_get_info(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        name = self._base_of[body["model_id"]]
        data = {"arch": "llama", "model_name": name, "tokenizer_id": self.tokenizer_id}
        rank = self.runs[body["model_id"]].settings.rank
        return {
            "type": "get_info",
            "model_id": body["model_id"],
            "model_data": data,
            "is_lora": True,
            "lora_rank": rank,
        }

    # --- training ---

    def _on_forward_backward(self, data: bytes, fault: str) -> dict[str, Any]:
        request = wire.ForwardBackwardRequest()
        request.ParseFromString(data)
        config = {} if self.ignores_loss_config else dict(request.loss_fn_config)
        rows = [_row(datum) for datum in request.data]
        for row in rows:
            try:
                check_inputs(request.loss_fn, {"target_tokens": row.targets, **row.inputs}, config, len(row.tokens))
            except ValueError as error:
                raise Refused(400, str(error)) from error

        def compute() -> Result:
            run = self.runs[request.model_id]
            logps, loss = run.forward_backward(rows, request.loss_fn, config, forward_only=request.forward_only)
            return _training_output(logps, loss)

        return self._in_turn(request.model_id, request.seq_id, compute, fault)

    def _on_optim_step(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        def step() -> Result:
            norm = self.runs[body["model_id"]].step(body["adam_params"])
            return {"metrics": {"unclipped_grad_l2:mean": norm} if math.isfinite(norm) else {}}

        return self._in_turn(body["model_id"], body["seq_id"], step, fault)

    def _on_save_weights(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        def save() -> Result:
            run = self.runs[body["model_id"]]
            path = f"tinker://{body['model_id']}/weights/{body['path']}"
            if path in self.checkpoints and not body["overwrite"]:
                raise ValueError(f"{path} exists")
            self.checkpoints[path] = run.saved()
            self._settings_at[path] = self._base_of[body["model_id"]], run.settings
            return {"type": "save_weights", "path": path}

        return self._in_turn(body["model_id"], body["seq_id"], save, fault)

    def _on_weights_info(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        if body["tinker_path"] not in self._settings_at:
            raise Refused(404, f"No checkpoint at {body['tinker_path']}")
        name, settings = self._settings_at[body["tinker_path"]]
        trained = {f"train_{part}": getattr(settings, f"train_{part}") for part in ("unembed", "mlp", "attn")}
        return {"base_model": name, "is_lora": True, "lora_rank": settings.rank, **trained}

    def _on_load_weights(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        """Into a run, or, as the SDK asks from 0.38 on, into a new one of a session."""
        model_id = body.get("model_id") or f"{body['session_id']}:train:{body['model_seq_id']}"

        def load() -> Result:
            saved = self.checkpoints[body["path"]]
            if "model_id" not in body:
                self._base_of[model_id], settings = self._settings_at[body["path"]]
                self.runs[model_id] = TrainedLora(self.base_models[self._base_of[model_id]], settings)
            self.runs[model_id].restore(saved, optimizer=body["optimizer"])
            return {"type": "load_weights", "path": body["path"], "model_id": model_id}

        return (
            self._in_turn(model_id, body["seq_id"], load, fault)
            if "model_id" in body
            else self._promise(model_id, load, fault)
        )

    # --- sampling ---

    def _on_save_weights_for_sampler(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        def save() -> Result:
            kept_as = body.get("path")
            name = f"tinker://{body['model_id']}/sampler_weights/{kept_as}" if kept_as else self._new_sampler_name()
            self._samplers[name] = self.runs[body["model_id"]].snapshot()
            return {"path": name} if kept_as else {"sampling_session_id": name}

        return self._in_turn(body["model_id"], body["seq_id"], save, fault)

    def _on_create_sampling_session(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        path, base = body.get("model_path"), body.get("base_model")
        known = self._samplers if path else self.base_models
        if (path or base) not in known:
            raise Refused(404, f"There is no {path or base}")
        name = self._new_sampler_name()
        self._samplers[name] = known[path or base]
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _on_samplers(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        if body["id"] not in self._samplers:
            raise Refused(404, f"There is no {body['id']}")
        return {"sampler_id": body["id"], "base_model": next(iter(self.base_models)), "model_path": None}

    def _new_sampler_name(self) -> str:
        return f"sampler-{len(self._samplers)}"

    def _on_asample(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        params = body["sampling_params"]
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        model = self._samplers[body["sampling_session_id"]]
        if len(prompt) + params["max_tokens"] > self.context:
            raise Refused(400, f"{len(prompt)} + {params['max_tokens']} tokens exceed the context of {self.context}")

        def sample() -> Result:
            answer = wire.SampleResponse()
            for index in range(body["num_samples"]):
                drawn = draw(
                    model,
                    prompt,
                    max_tokens=params["max_tokens"],
                    temperature=params["temperature"],
                    seed=None if params.get("seed") is None else params["seed"] + index,
                    stop_ids=self._stop_ids(params.get("stop")),
                )
                sequence = answer.sequences.add()
                sequence.stop_reason = wire.STOP_REASON_STOP if drawn.is_stopped else wire.STOP_REASON_LENGTH
                sequence.tokens = np.asarray(drawn.tokens, np.int32).tobytes()
                sequence.logprobs = np.asarray(drawn.logprobs, np.float32).tobytes()
            return answer.SerializeToString()

        promise = self._promise(body["sampling_session_id"], sample, fault)
        names = [f"{promise['request_id']}:{index}" for index in range(body["num_samples"])]
        return {**promise, "sample_sequence_ids": names}

    def _stop_ids(self, stop: list[int] | None) -> set[int]:
        """What is given takes the place of the model's own end."""
        if stop is None:
            return set() if self.eos_id is None else {self.eos_id}
        return {token for token in stop if isinstance(token, int)}

    # --- promises ---

    def _in_turn(self, model_id: str, number: int, work: Callable[[], Result], fault: str) -> dict[str, Any]:
        """Carried out once, when its turn comes."""
        if (model_id, number) not in self._known_jobs:
            request_id = f"{model_id}#{number}"
            self._known_jobs[model_id, number] = request_id
            self._promises[request_id] = None
            self._jobs[model_id][number] = request_id, (lambda: _failing(fault)) if fault else work
        waiting = self._jobs[model_id]
        while self._next_job[model_id] in waiting:
            request_id, next_work = waiting.pop(self._next_job[model_id])
            self._next_job[model_id] += 1
            self._keep(request_id, next_work)
        return {"request_id": self._known_jobs[model_id, number], "model_id": model_id}

    def _promise(self, owner: str, work: Callable[[], Result], fault: str) -> dict[str, Any]:
        request_id = f"{owner}/{len(self._promises)}"
        self._keep(request_id, (lambda: _failing(fault)) if fault else work)
        return {"request_id": request_id}

    def _keep(self, request_id: str, work: Callable[[], Result]) -> None:
        try:
            self._promises[request_id] = work()
        except (ValueError, KeyError, RuntimeError) as error:
            self._promises[request_id] = error

    def _on_retrieve_future(self, body: dict[str, Any], *, accepts_proto: bool) -> web.Response:
        request_id = body["request_id"]
        if request_id not in self._promises:
            raise Refused(404, f"There is no request {request_id}")
        self._num_asked[request_id] += 1
        result = self._promises[request_id]
        if result is None or self._num_asked[request_id] <= self.num_try_again:
            return web.json_response({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        if isinstance(result, Exception):
            return web.json_response({"error": str(result), "category": "user"})
        if not isinstance(result, bytes):
            return web.json_response(result)
        if len(result) > self.inline_limit and body["allow_metadata_only"]:
            return web.json_response({"status": "complete_metadata", "response_payload_size": len(result)})
        assert accepts_proto, "the SDK asks for these results as protobuf"
        return web.Response(body=result, content_type=_PROTO)


def _hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def _failing(reason: str) -> Result:
    raise ValueError(reason)


def _row(datum: Any) -> Row:
    tokens = [int(t) for chunk in datum.model_input for t in np.frombuffer(chunk.encoded_text.tokens, np.int32)]
    arrays = {name: np.frombuffer(t.dense, _NUMPY[t.dtype]).copy() for name, t in datum.loss_fn_inputs.items()}
    targets = [int(t) for t in arrays.pop("target_tokens")]
    return Row(tokens, targets, {name: torch.from_numpy(values) for name, values in arrays.items()})


def _training_output(logps: list[torch.Tensor], loss: float) -> bytes:
    answer = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss})
    record = answer.loss_fn_outputs.add()
    record.num_datums = len(logps)
    field = record.fields["logprobs"]
    field.dtype = wire.DTYPE_FLOAT32
    field.data = b"".join(own.numpy().astype(np.float32).tobytes() for own in logps)
    field.offsets = np.concatenate([[0], np.cumsum([4 * len(own) for own in logps])]).astype(np.int64).tobytes()
    return answer.SerializeToString()
