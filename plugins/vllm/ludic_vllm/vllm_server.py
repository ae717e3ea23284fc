"""Starts vLLM as the policy server: `python -m ludic_vllm.vllm_server MODEL [any flag of vLLM]`.

It runs stock vLLM, from the environment where it is installed, with a worker extension for live weights, a guard on the control
endpoints, and defaults for training. Loads without vllm and torch. See docs/serving.md.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ludic.http.address import check_host, check_port, free_port
from ludic.http.tokens import CONTROL_VARIABLE, TOKEN_FILE
from ludic.types import ConfigError, LudicError
from ludic.util.urls import is_loopback
from ludic_vllm.command import (
    ServerCommand,
    api_keys,
    find_vllm,
    server_command,
)
from ludic_vllm.process import (
    ServerDied,
    ServerNotReady,
    VLLMServerProcess,
    collect_proc_output,
    is_healthy,
    wait_for_vllm_health,
)
from ludic_vllm.versions import TESTED_ON_CPU, TESTED_ON_GPU, version_range

__all__ = [
    "start_vllm_server", "wait_for_vllm_health", "collect_proc_output", "is_healthy",
    "VLLMServerProcess", "ServerDied", "ServerNotReady", "main",
]  # fmt: skip

LOOPBACK = "127.0.0.1"


def start_vllm_server(
    model: str | Path,
    host: str = LOOPBACK,
    port: int = 8000,
    *,
    gpu_memory_utilization: float = 0.7,
    max_model_len: int | None = None,
    enforce_eager: bool | None = True,
    stream_output: bool = True,
    extra_args: Sequence[str] | None = None,
    run_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> VLLMServerProcess:
    """Start a server as a child of this process, which ends with it. Port 0 takes a free one.

    The control token and the output (server-PORT.log) go to `run_folder`, by default a temporary folder. `environment`
    is added to this process's environment, for instance {"CUDA_VISIBLE_DEVICES": "1"}. `enforce_eager`: without CUDA graphs,
    which starts sooner and samples slower; None is True on a CPU only.
    """
    folder = run_folder if run_folder is not None else Path(tempfile.mkdtemp(prefix="ludic-vllm-"))
    install = find_vllm()
    flags = list(extra_args or ())
    if not install.is_cpu:
        flags += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
    if max_model_len is not None:
        flags += ["--max-model-len", str(max_model_len)]
    is_eager = install.is_cpu if enforce_eager is None else enforce_eager
    flags.append("--enforce-eager" if is_eager else "--no-enforce-eager")
    command = server_command(install, str(model), host=host, port=port or free_port(), flags=flags, run_folder=folder)
    command = replace(command, environment={**command.environment, **(environment or {})})
    process = VLLMServerProcess(command, log=folder / f"server-{command.port}.log", stream_output=stream_output)
    process.start()
    return process


def read_command(arguments: Sequence[str], *, insecure: bool = True) -> tuple[ServerCommand, Path]:
    """Parse this module's command line; returns the server's command and its run folder."""
    # A leading MODEL means --model MODEL; anywhere else it could be the value of a vLLM flag.
    named = bool(arguments) and not arguments[0].startswith("-")
    ours, flags = _parser().parse_known_args(["--model", *arguments] if named else list(arguments))
    if ours.model is None:
        raise ConfigError("No model was given. Try: python -m ludic_vllm.vllm_server Qwen/Qwen2.5-0.5B-Instruct")
    keys = api_keys(flags)
    if not insecure:
        check_host(ours.host, keys[0] if keys else None, insecure)
    port = ours.port or free_port()
    folder = ours.run_folder or Path("runs") / f"vllm-{port}"
    command = server_command(find_vllm(), ours.model, host=ours.host, port=port, flags=flags, run_folder=folder)
    if ours.batch_invariant:
        command = replace(command, environment={**command.environment, "VLLM_BATCH_INVARIANT": "1"})
    return command, folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ludic_vllm.vllm_server",
        usage="%(prog)s MODEL [--host H] [--port P] [--run-folder F] [--batch-invariant] [any flag of vLLM]",
        description=f"A vLLM server that Ludic can train against; tested with vllm{version_range(TESTED_ON_GPU)} on a GPU and "
        f"vllm{version_range(TESTED_ON_CPU)} on a CPU.",
        allow_abbrev=False,  # an abbreviated flag could also be a prefix of a vLLM flag
    )
    parser.add_argument("--model", help="a folder or a hub id; a leading MODEL is the same")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--run-folder", type=Path, help=f"gets the file {TOKEN_FILE} (default: runs/vllm-PORT)")
    parser.add_argument("--batch-invariant", action="store_true", help="results independent of the batch (slower)")
    return parser


def announcement(command: ServerCommand, folder: Path) -> str:
    """The lines printed before vLLM's own output."""
    from_variable = CONTROL_VARIABLE in os.environ
    token = f"from ${CONTROL_VARIABLE}" if from_variable else f"in {(folder / TOKEN_FILE).absolute()}"
    lines = [f"Starting vLLM on {command.host}:{command.port}. The control token is {token}."]
    if not (is_loopback(command.host) or command.has_key):
        lines.append(
            f"Everyone who can reach {command.host}:{command.port} can use the model; set VLLM_API_KEY to require a "
            "key. Control endpoints always need the control token."
        )
    return "\n".join(lines) + "\n"


def serve(arguments: Sequence[str], *, insecure: bool = True) -> NoReturn:
    """Replace this process by the server, so that signals reach it and no parent stays behind.

    Without `insecure`, a server that other machines can reach must require a key.
    """
    command, folder = read_command(arguments, insecure=insecure)
    check_port(command.host, command.port)
    sys.stdout.write(announcement(command, folder))
    sys.stdout.flush()
    os.execve(command.arguments[0], command.arguments, dict(command.environment))


def main() -> None:
    """Entry point; a user error is one line on stderr, not a traceback."""
    try:
        serve(sys.argv[1:])
    except LudicError as error:
        sys.stderr.write(f"vllm_server: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
