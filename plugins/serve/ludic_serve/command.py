"""`ludic serve`: a model behind an OpenAI-compatible HTTP server. See docs/serving.md."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, Protocol

from ludic import plugins
from ludic.cli import commands
from ludic.cli.args import Switch, need_extras, parse
from ludic.http.address import check_host, check_port, require_port
from ludic.models import SMOLLM2, TINY
from ludic.run.config.entries import at_least
from ludic.run.config.model import Dtype
from ludic.types import ConfigError
from ludic.util.stop import DRAIN_S, serve_until_stopped


class ServerEngine(Protocol):
    """An engine that is a program of its own, such as vLLM."""

    def serve(self, flags: Sequence[str], *, insecure: bool) -> NoReturn:
        """Replace this process by a server with these flags of the engine's own. Without `insecure`, other machines need a key."""

    def client(self, url: str) -> Any:
        """A client of the server at this URL, with its `servers`, `control_get` and `close`."""


def find_engine(name: str) -> ServerEngine:
    """The engine of that name; MissingPlugin if its plug-in is not installed."""
    point = plugins.find("servers", name)
    if point is None:
        raise plugins.missing(f"ludic_{name}", f"--engine {name}")
    engine: ServerEngine = point.load()
    return engine


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
    drain_s: float = DRAIN_S
    """Seconds that requests in progress may go on after SIGTERM or Ctrl-C; vLLM has its own limit."""
    engine: Literal["local", "vllm"] = "local"
    """local: the engine in this process; vllm: a vLLM server, which can be trained against."""
    tinker: Switch = False
    """Speak Tinker's protocol instead, for training and sampling with its SDK: `ludic serve --tinker --help`."""

    def __post_init__(self) -> None:
        require_port(self.port)
        at_least(1, max_sequences=self.max_sequences, max_model_len=self.max_model_len)
        at_least(0, drain_s=self.drain_s)


def serve(args: list[str]) -> int:
    if "--tinker" in args:
        return commands.find("tinker-server").load()([arg for arg in args if arg != "--tinker"])
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
    import torch  # here and not above: it takes seconds, and `ludic serve --help` should not

    from ludic.inference.local import LocalEngine
    from ludic.run.model import find_device

    engine = LocalEngine(
        given.model,
        dtype=None if given.dtype == "auto" else getattr(torch, given.dtype),
        device=find_device(given.device),
        max_sequences=given.max_sequences,
        max_model_len=given.max_model_len,
    )
    try:
        asyncio.run(serve_until_stopped(_serve(engine, given)))
    finally:
        engine.close()
    print("Stopped.")
    return 0


def _become_vllm(given: ServeArgs, flags: list[str]) -> NoReturn:
    """Replace this process by vLLM's server, with the options as its flags."""
    from ludic.models.loading import require_model

    if given.model in (TINY, SMOLLM2):
        raise ConfigError(
            f"--engine vllm reads a folder or a hub id; only --engine local knows the name {given.model!r}."
        )
    require_model(given.model)
    if given.api_key is not None:
        os.environ["VLLM_API_KEY"] = given.api_key  # not a flag, which every process list would show
    own = {
        "--model": given.model, "--host": given.host, "--port": given.port, "--dtype": given.dtype,
        "--max-model-len": given.max_model_len, "--max-num-seqs": given.max_sequences,
    }  # fmt: skip
    given_flags = [part for flag, value in own.items() if value is not None for part in (flag, str(value))]
    find_engine("vllm").serve([*given_flags, *flags], insecure=given.insecure)


async def _serve(engine: Any, given: ServeArgs) -> None:
    from ludic_serve.openai_server import serve

    def announce(address: str) -> None:
        print(f"Serving {engine.name} at {address}/v1 (Ctrl-C stops)", flush=True)

    await serve(
        engine,
        given.host,
        given.port,
        model_name=engine.name,
        api_key=given.api_key,
        insecure=given.insecure,
        drain_s=given.drain_s,
        on_ready=announce,
    )
