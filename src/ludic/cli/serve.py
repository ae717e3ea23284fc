"""`ludic serve`: a model behind an OpenAI-compatible HTTP server. See docs/serving.md."""

import asyncio
import contextlib
import os
import signal
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer

from ludic.cli.run_command import need_extras
from ludic.inference.vllm.command import check_host, check_port
from ludic.models import SMOLLM2, TINY
from ludic.training.learner.stop import StopRequests
from ludic.types import ConfigError


class Dtype(StrEnum):
    """What the weights are held in; `auto` is what this hardware is fast at."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Engine(StrEnum):
    """What computes: the engine inside this process, or vLLM, which takes its place."""

    LOCAL = "local"
    VLLM = "vllm"


def serve(
    model: Annotated[str, typer.Option(help="A folder, a hub id, a .gguf file, smollm2-135m or tiny.")],
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback it wants a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="LUDIC_API_KEY", help="Clients must send it as a bearer token.")
    ] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Requests computed at the same time.", min=1)] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and reply together.", min=1)] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.AUTO,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU if there is one.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on any host without a key.")] = False,
    engine: Annotated[Engine, typer.Option(help="vllm: a vLLM server, which can be trained against.")] = Engine.LOCAL,
    vllm_flags: Annotated[
        list[str] | None, typer.Argument(help="Behind `--`, with --engine vllm: any flags of vLLM, and --run-folder.")
    ] = None,
) -> None:
    """Serve a model over HTTP, in the way of OpenAI's API."""
    if engine is Engine.VLLM:
        if device is not None:
            raise ConfigError(f"--device {device}: vLLM takes the device it was built for; see CUDA_VISIBLE_DEVICES.")
        _become_vllm(model, host, port, api_key, max_sequences, max_model_len, dtype, insecure, vllm_flags or [])
    if vllm_flags:
        raise ConfigError(f"{' '.join(vllm_flags)!r} would be for vLLM; give --engine vllm, or leave it out.")
    need_extras("serve", "ludic serve")
    check_host(host, api_key, insecure)
    check_port(host, port)  # before a large model is loaded for nothing
    loaded = _load(model, max_sequences, max_model_len, dtype, device)
    try:
        asyncio.run(_serve_until_stopped(loaded, host, port, api_key, insecure))
    finally:
        loaded.close()
    print("Stopped.")


def _become_vllm(
    model: str,
    host: str,
    port: int,
    api_key: str | None,
    max_sequences: int | None,
    max_model_len: int | None,
    dtype: Dtype,
    insecure: bool,
    flags: list[str],
) -> NoReturn:
    """Our options in vLLM's words; this process becomes the server."""
    from ludic.inference.vllm_server import serve

    if model in (TINY, SMOLLM2):
        raise ConfigError(f"--engine vllm reads a folder or a hub id; only --engine local knows the name {model!r}.")
    if api_key is not None:
        os.environ["VLLM_API_KEY"] = api_key  # not a flag, which every process list would show
    if max_sequences is not None:
        flags = ["--max-num-seqs", str(max_sequences), *flags]
    if max_model_len is not None:
        flags = ["--max-model-len", str(max_model_len), *flags]
    serve(["--model", model, "--host", host, "--port", str(port), "--dtype", dtype, *flags], insecure=insecure)


def _load(model: str, max_sequences: int | None, max_model_len: int | None, dtype: Dtype, device: str | None) -> Any:
    import torch  # here and not above: it takes seconds, and `ludic --help` should not

    from ludic.inference.local import LocalEngine

    try:
        where = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r} is no device; try cpu, cuda or cuda:1.") from error
    if where is not None and where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: PyTorch sees no GPU here. Leave it out to use the CPU.")
    return LocalEngine(
        model,
        dtype=None if dtype is Dtype.AUTO else getattr(torch, dtype),
        device=where,
        max_sequences=max_sequences,
        max_model_len=max_model_len,
    )


async def _serve_until_stopped(engine: Any, host: str, port: int, api_key: str | None, insecure: bool) -> None:
    from ludic.inference.local.http.server import serve

    def announce(address: str) -> None:
        print(f"Serving {engine.name} at {address}/v1 (Ctrl-C stops)", flush=True)

    serving = asyncio.create_task(
        serve(engine, host, port, model_name=engine.name, api_key=api_key, insecure=insecure, on_ready=announce)
    )
    wishes = StopRequests()

    def on_signal() -> None:
        if wishes.hear():  # the same wish once more would interrupt the replies that are being finished
            serving.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            loop.add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
