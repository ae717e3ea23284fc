"""The policy is sampled by vLLM servers: those that were named, or one that is started for the run."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from ludic.distributed import VllmAdapterPublisher, create_vllm_publisher
from ludic.distributed.publish.adapter import fitting_rank, read_adapter
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.control import CONTROL_VARIABLE, TOKEN_FILE, read_control_token
from ludic.inference.vllm.process import VLLMServerProcess, last_words, wait_for_vllm_health
from ludic.inference.vllm_server import start_vllm_server
from ludic.models.head import plain_model
from ludic.models.loading import LoadedModel, no_progress_bar
from ludic.models.lora import dense_parameters
from ludic.run.config import RolloutSettings
from ludic.run.folder import SERVER
from ludic.training.learner.stop import run_sync
from ludic.types import ConfigError, PolicyGone, PolicyPublisher, shown_url

_START_S = 600.0
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ADAPTER, BASE = "policy", "base"
"""What a server of ours calls the adapter, and the model under it."""


class VLLMPolicy:
    """Client, publisher, and the server that we started, if we did."""

    def __init__(self, settings: RolloutSettings, loaded: LoadedModel, *, max_length: int, folder: Path) -> None:
        """The servers get the weights of `loaded` at once: what they were started with may be something else."""
        self._process: VLLMServerProcess | None = None
        if settings.push == "adapter" and plain_model(loaded.model) is loaded.model:
            raise ConfigError("push = 'adapter', but there is none: all weights are trained. Give --lora-rank.")
        if settings.server:
            self.client = client_of(settings, settings.server, folder)
        else:
            self._process = _start(loaded, settings, max_length, folder / SERVER)
            self.client = VLLMChatClient(
                servers=[self._process.url],
                control_token=self._process.control_token,
                require_alive=self._require_alive,
            )
        self.publisher: PolicyPublisher
        if settings.push == "adapter":
            self.publisher, self.model = _adapter_publisher(self.client, loaded, folder / SERVER), ADAPTER
            self.publisher.publish({}, version=0)
        else:
            self.publisher = create_vllm_publisher(self.client)
            self.publisher.publish(dict(dense_parameters(loaded.model)), version=0)
            self.model = run_sync(served_name(self.client))

    def _require_alive(self) -> None:
        assert self._process is not None, "only asked of a server that we started"
        if (code := self._process.poll()) is not None:
            raise PolicyGone(
                f"The vLLM server of this run ended with exit code {code}. {last_words(self._process.output())}\n"
                f"All it wrote is in {self._process.log}."
            )

    def close(self) -> None:
        run_sync(self.client.close())
        if self._process is not None:
            self._process.stop()


def client_of(settings: RolloutSettings, servers: Sequence[str], folder: Path) -> VLLMChatClient:
    """With the control token that the settings name; else that of a server which `ludic launch` started for the run."""
    own = folder / SERVER / TOKEN_FILE
    place = settings.control_token or (own if own.is_file() and CONTROL_VARIABLE not in os.environ else None)
    return VLLMChatClient(servers=servers, control_token=None if place is None else read_control_token(place))


def wait_for_servers(servers: Sequence[str]) -> None:
    """Until all of them answer; one that was started together with us takes its time."""
    for server in servers:
        place = urlsplit(server)
        if place.hostname is None:
            raise ConfigError(f"server = {shown_url(server)!r} is no URL; write http://HOST:PORT.")
        wait_for_vllm_health(place.hostname, place.port or 80, timeout_s=_START_S)


def save_for_server(loaded: LoadedModel, folder: Path, *, is_alone: bool = False) -> list[str]:
    """vLLM reads a model from files; the run's own weights are the ones it is given. Its flags for them come back.

    `is_alone`: the base only; the adapter is pushed by itself.
    """
    model: Any = plain_model(loaded.model)
    with no_progress_bar(), loaded.model.disable_adapter() if is_alone else contextlib.nullcontext():
        model.save_pretrained(folder, state_dict=dict(dense_parameters(loaded.model)))
    loaded.tokenizer.save_pretrained(folder)
    name = _lora_flags(loaded) if is_alone else ["--served-model-name", "policy"]
    return ["--dtype", _DTYPES[next(model.parameters()).dtype], *name]


def _start(loaded: LoadedModel, settings: RolloutSettings, max_length: int, folder: Path) -> VLLMServerProcess:
    flags = save_for_server(loaded, folder / "model", is_alone=settings.push == "adapter")
    process = start_vllm_server(
        folder / "model",
        port=0,
        max_model_len=max_length,
        gpu_memory_utilization=settings.server_memory,
        stream_output=False,
        extra_args=flags,
        run_folder=folder,
    )
    wait_for_vllm_health(process.command.host, process.command.port, process, timeout_s=_START_S)
    return process


def _lora_flags(loaded: LoadedModel) -> list[str]:
    rank = fitting_rank(read_adapter(loaded.model).rank)
    return ["--served-model-name", BASE, "--enable-lora", "--max-lora-rank", str(rank)]


def _adapter_publisher(client: VLLMChatClient, loaded: LoadedModel, folder: Path) -> VllmAdapterPublisher:
    adapters = folder / "adapters"
    adapters.mkdir(parents=True, exist_ok=True)
    return VllmAdapterPublisher(client, loaded.model, name=ADAPTER, folder=adapters)


async def served_name(client: VLLMChatClient) -> str:
    """What the servers call the model; all of them have to serve the same one."""
    names = {(await client.control_get(server, "/v1/models"))["data"][0]["id"] for server in client.servers}
    if len(names) > 1:
        raise ConfigError(
            f"The servers serve different models ({', '.join(sorted(names))}); start them with the same --served-model-name."
        )
    return str(names.pop())
