"""A stand-in for an SGLang server on loopback: paths, fields and answers as in the sources of SGLang 0.5.23.

(`srt/entrypoints/http_server.py`, `srt/managers/io_struct.py`, `srt/sampling/sampling_params.py`, `srt/utils/weight_versions.py`.)
It "samples" the numbers that follow the last token of the prompt; with an `engine`, that engine samples, and weights from disk are
loaded into its model.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest, VersionRun

SAMPLING = frozenset(
    {"max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
     "presence_penalty", "repetition_penalty", "min_new_tokens", "ignore_eos", "skip_special_tokens", "sampling_seed"}
)  # fmt: skip
"""Those of its sampling parameters that Ludic uses."""
GENERATE = frozenset({"input_ids", "sampling_params", "return_logprob", "stream"})
DISK = frozenset({"model_path", "weight_version"})


class FakeSGLang:
    """Change its attributes to change its ways. `faults` holds what happens to the next requests, one by one."""

    def __init__(self, engine: Any = None, **ways: Any) -> None:
        self.engine = engine
        self.version = "default"
        self.spans: list[tuple[str, int, int]] = []
        """Version, start and end within the next completions, if the weights changed meanwhile."""
        self.context = 512
        self.admin_key: str | None = None
        self.faults: list[str] = []
        self.loads = True
        self.is_paused = False
        self.requests: list[dict[str, Any]] = []
        self.control: list[tuple[str, dict[str, Any]]] = []
        for name, value in ways.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    async def start(self) -> "FakeSGLang":
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
            app.router.add_post(path, self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    # --- endpoints ---

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert set(body) <= GENERATE and set(body["sampling_params"]) <= SAMPLING, body
        self.requests.append(body)
        if self.faults:
            return self._fault(self.faults.pop(0))
        while self.is_paused:
            await asyncio.sleep(0.001)
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if len(prompt) + sampling["max_new_tokens"] > self.context:
            return _error(
                f"Requested token count exceeds the model's maximum context length of {self.context} tokens. You requested …"
            )
        text, ids, logprobs, reason = await self._sampled(prompt, sampling)
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "e2e_latency": 0.1,
        }
        if body["return_logprob"]:
            entries = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
            meta |= {"input_token_logprobs": [], "output_token_logprobs": entries}
        if self.spans:
            meta["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in self.spans]
            meta["weight_version"] = self.spans[-1][0]
        return web.json_response({"text": text, "output_ids": ids, "meta_info": meta})

    async def _sampled(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[str, list[int], list[float], Any]:
        number = sampling["max_new_tokens"]
        if self.engine is None:
            ids = [prompt[-1] + i + 1 for i in range(number)]
            return " ".join(map(str, ids)), ids, [-0.5] * number, {"type": "length", "length": number}
        request = TokenCompletionRequest(
            "policy",
            prompt,
            sampling=SamplingParams(temperature=sampling["temperature"], max_tokens=number),
            return_=ReturnSpec.for_rl(),
            seed=sampling.get("sampling_seed"),
        )
        response, _ = await self.engine.complete_tokens(request)
        ids = response.completion_token_ids.tolist()
        kind = response.finish_reason
        reason = {"type": "stop", "matched": ids[-1]} if kind == "stop" else {"type": kind, "length": len(ids)}
        return response.text, ids, list(map(float, response.completion_logprobs)), reason

    def _fault(self, kind: str) -> web.Response:
        if kind == "abort":
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            meta = {"id": "0", "finish_reason": reason, "prompt_tokens": 0, "weight_version": self.version}
            return web.json_response({"text": "", "output_ids": [], "meta_info": meta})
        return web.Response(status=int(kind), text="Service Unavailable")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        facts = {"model_path": "/models/m", "served_model_name": "m", "weight_version": self.version}
        return web.json_response({**facts, "is_generation": True})

    async def _control(self, request: web.Request) -> web.Response:
        if self.admin_key is not None and request.headers.get("Authorization") != f"Bearer {self.admin_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        self.control.append((request.path, body))
        if request.path == "/pause_generation":
            assert body == {"mode": "retract"}
            self.is_paused = True
            return web.json_response({"message": "Generation paused successfully.", "status": "ok"})
        if request.path == "/continue_generation":
            assert body == {}
            self.is_paused = False
            return web.json_response({"message": "Generation continued successfully.", "status": "ok"})
        assert set(body) <= DISK, body
        message = "Succeeded to update model weights." if self.loads else "Failed to get weights iterator: no such file"
        if self.loads:
            self._load(Path(body["model_path"]))
            self.version = body["weight_version"]
        answer = {"success": self.loads, "message": message, "num_paused_requests": 0}
        return web.json_response(answer, status=200 if self.loads else 400)

    def _load(self, folder: Path) -> None:
        """As SGLang does, from a folder in the model's own format."""
        from safetensors.torch import load_file

        assert (folder / "config.json").is_file()
        weights = load_file(folder / "model.safetensors")
        if self.engine is not None:
            missing, unexpected = self.engine.model.load_state_dict(weights, strict=False)
            assert not unexpected and all("lm_head" in name for name in missing), "tied weights are stored once"
            self.engine.new_version(int(self.engine.version) + 1)


def _error(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


@contextlib.asynccontextmanager
async def fake(*args: Any, **ways: Any) -> AsyncIterator[FakeSGLang]:
    server = await FakeSGLang(*args, **ways).start()
    try:
        yield server
    finally:
        await server.stop()


__all__ = ["FakeSGLang", "VersionRun", "fake"]
