"""`ludic serve`: a model behind an OpenAI-compatible HTTP server. See docs/serving.md."""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from ludic.cli.args import Switch, need_extras, parse
from ludic.inference.vllm.command import check_host, check_port
from ludic.models import SMOLLM2, TINY
from ludic.run.config import Dtype
from ludic.training.learner.stop import StopRequests
from ludic.types import ConfigError


@dataclass(frozen=True)
class ServeArgs:
    """Serve a model over HTTP, in the way of OpenAI's API. With --engine vllm, flags behind `--` are vLLM's (and --run-folder)."""

    model: str
    """A folder, a hub id, a .gguf file, smollm2-135m or tiny."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback it wants a key."""
    port: int = 8000
    """Port; 0 takes a free one."""
    api_key: str | None = None
    """Clients must send it as a bearer token. Default: $LUDIC_API_KEY."""
    max_sequences: int | None = None
    """Requests computed at the same time."""
    max_model_len: int | None = None
    """Tokens of prompt and reply together."""
    dtype: Dtype = "auto"
    """Number format of the weights; auto is what this hardware is fast at."""
    device: str | None = None
    """cpu, cuda, cuda:1; the GPU if there is one."""
    insecure: Switch = False
    """Listen on any host without a key."""
    engine: Literal["local", "vllm"] = "local"
    """local: the engine in this process; vllm: a vLLM server, which can be trained against."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}; a port is a number from 0 to 65535.")
        for flag, value in (("--max-sequences", self.max_sequences), ("--max-model-len", self.max_model_len)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}; it must be at least 1.")


def serve(args: list[str]) -> int:
    own, vllm_flags = args, list[str]()
    if "--" in args:
        own, vllm_flags = args[: args.index("--")], args[args.index("--") + 1 :]
    given = parse(ServeArgs, own, prog="ludic serve")
    given = replace(given, api_key=given.api_key or os.environ.get("LUDIC_API_KEY") or None)
    if given.engine == "vllm":
        if given.device is not None:
            raise ConfigError(
                f"--device {given.device}: vLLM takes the device it was built for; see CUDA_VISIBLE_DEVICES."
            )
        _become_vllm(given, vllm_flags)
    if vllm_flags:
        raise ConfigError(f"{' '.join(vllm_flags)!r} would be for vLLM; give --engine vllm, or leave it out.")
    need_extras("serve", "ludic serve")
    check_host(given.host, given.api_key, given.insecure)
    check_port(given.host, given.port)  # before a large model is loaded
    engine = _load(given)
    try:
        asyncio.run(_serve_until_stopped(engine, given))
    finally:
        engine.close()
    print("Stopped.")
    return 0


def _become_vllm(given: ServeArgs, flags: list[str]) -> NoReturn:
    """Replace this process by vLLM's server, with the options as its flags."""
    from ludic.inference.vllm_server import serve

    if given.model in (TINY, SMOLLM2):
        raise ConfigError(
            f"--engine vllm reads a folder or a hub id; only --engine local knows the name {given.model!r}."
        )
    if given.api_key is not None:
        os.environ["VLLM_API_KEY"] = given.api_key  # not a flag, which every process list would show
    if given.max_sequences is not None:
        flags = ["--max-num-seqs", str(given.max_sequences), *flags]
    if given.max_model_len is not None:
        flags = ["--max-model-len", str(given.max_model_len), *flags]
    own = ["--model", given.model, "--host", given.host, "--port", str(given.port), "--dtype", given.dtype]
    serve([*own, *flags], insecure=given.insecure)


def _load(given: ServeArgs) -> Any:
    import torch  # here and not above: it takes seconds, and `ludic serve --help` should not

    from ludic.inference.local import LocalEngine
    from ludic.run.model import find_device

    return LocalEngine(
        given.model,
        dtype=None if given.dtype == "auto" else getattr(torch, given.dtype),
        device=find_device(given.device),
        max_sequences=given.max_sequences,
        max_model_len=given.max_model_len,
    )


async def _serve_until_stopped(engine: Any, given: ServeArgs) -> None:
    from ludic.inference.local.http.server import serve

    def announce(address: str) -> None:
        print(f"Serving {engine.name} at {address}/v1 (Ctrl-C stops)", flush=True)

    serving = asyncio.create_task(
        serve(
            engine,
            given.host,
            given.port,
            model_name=engine.name,
            api_key=given.api_key,
            insecure=given.insecure,
            on_ready=announce,
        )
    )
    requests = StopRequests()

    def on_signal() -> None:
        if requests.hear():  # a repeated signal must not interrupt running replies
            serving.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            loop.add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
