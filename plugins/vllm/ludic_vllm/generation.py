"""Serves the policy with vLLM: servers that were named, or one that is started for the run."""

import asyncio
import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ludic.distributed import VllmAdapterPublisher, create_vllm_publisher
from ludic.http.tokens import CONTROL_VARIABLE, TOKEN_FILE, read_control_token
from ludic.models.head import plain_model
from ludic.models.kinds import save_tokenizer
from ludic.models.loading import LoadedModel, no_progress_bar
from ludic.models.lora import dense_parameters
from ludic.run.config.model import ModelSettings
from ludic.run.config.rollouts import RolloutSettings
from ludic.run.folder import SERVER
from ludic.run.model import ServedPolicy, load_tokenizer
from ludic.run.resolve import ResolvedRun
from ludic.run.session import EmbeddedSession
from ludic.run.settings import values_of
from ludic.types import BatchSource, ConfigError, PolicyPublisher, SAWBatch, UnknownName
from ludic.types.interfaces import load_into, state_of, tell_version
from ludic.util.processes import RestartLimit, Restarts
from ludic.util.stop import run_sync
from ludic_vllm.client import VLLMChatClient
from ludic_vllm.command import find_vllm
from ludic_vllm.process import VLLMServerProcess, wait_for_vllm_health
from ludic_vllm.publish.adapter import fitting_rank, read_adapter
from ludic_vllm.publish.broadcast import BroadcastPolicyPublisher
from ludic_vllm.publish.control import VllmControlPlane
from ludic_vllm.teacher import VLLMTeacher
from ludic_vllm.vllm_server import start_vllm_server
from ludic_vllm.watch import ServerWatch

START_S = 600.0
"""Seconds that a server may take to load its model."""
_SERVER_OVERHEAD = 3 << 30
"""Bytes of a vLLM server in addition to weights and cache: CUDA, graphs, activations, logits."""
_SMALLEST_CACHE = 1 << 28
ADAPTER, BASE = "policy", "base"
"""Names of the adapter, and of the model under it, on a server that was started for the run."""


def serve_on_vllm(run: ResolvedRun, loaded: LoadedModel) -> ServedPolicy:
    """The given servers, or one that is started. They get the weights of `loaded` at once: they may have started with others."""
    settings, places = run.config.rollouts, run.folder / SERVER
    if settings.push == "adapter" and plain_model(loaded.model) is loaded.model:
        raise ConfigError("push = 'adapter', but there is none: all weights are trained. Give --lora-rank.")
    watch, patience = None, dict[str, Any]()
    if settings.server:
        client = client_of(settings, settings.server, run.folder)
    else:
        usual = RestartLimit().max_restarts
        limit = RestartLimit(max_restarts=values_of(run.config).get("max_restarts", usual))  # a setting of [pipeline]
        process = _start(loaded, run, places)
        watch = ServerWatch(process, Restarts(limit), hung_after_s=settings.server_hung_after, start_s=START_S)
        client = VLLMChatClient(servers=[process.url], control_token=process.control_token, watch=watch)
        patience = {"wait_s": math.inf, "attempts": limit.max_restarts + 2}  # the watch says when waiting is pointless

    def close() -> None:
        run_sync(client.close())
        if watch is not None:
            watch.close()

    publisher: PolicyPublisher
    if settings.push == "adapter":
        adapters, weights = places / "adapters", dict[str, Any]()
        adapters.mkdir(parents=True, exist_ok=True)
        publisher = VllmAdapterPublisher(client, loaded.model, name=ADAPTER, folder=adapters, **patience)
    else:
        weights = dict(dense_parameters(loaded.model))
        publisher = create_vllm_publisher(client, transport=settings.transport, **patience)
    if watch is not None:
        assert isinstance(publisher, VllmAdapterPublisher | BroadcastPolicyPublisher), "what was made above"
        watch.begin(publisher.publish_again)
    publisher.publish(weights, version=0)
    model = ADAPTER if settings.push == "adapter" else run_sync(served_name(client))
    return ServedPolicy(client=client, publisher=publisher, close=close, model=model)


class VLLMSession(EmbeddedSession):
    """vLLM answers the agents; it gets the weights after every update."""

    def _sampled(self, played: BatchSource) -> BatchSource:
        if not self._run.config.rollouts.server_sleep:
            return played
        assert isinstance(self._served.client, VLLMChatClient), "what serve_on_vllm makes"
        return SleepAfterBatch(played, self._served.client)

    def _serve(self) -> ServedPolicy:
        return serve_on_vllm(self._run, self._loaded)


class SleepAfterBatch:
    """The batches of `inner`; after each the servers of `client` sleep, until the next push or the next batch. Its state is that of
    `inner`, so that a resumed run may leave it out."""

    def __init__(self, inner: BatchSource, client: VLLMChatClient) -> None:
        self._inner, self._control = inner, VllmControlPlane(client)

    async def next_batch(self) -> SAWBatch:
        await asyncio.to_thread(self._control.wake)  # an update that was skipped has pushed nothing
        batch = await self._inner.next_batch()
        await asyncio.to_thread(self._control.sleep)
        return batch

    get_next_batch = next_batch

    def notify_version(self, version: int) -> None:
        tell_version(self._inner, version)

    def state_dict(self) -> dict[str, Any]:
        return state_of(self._inner)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_into(self._inner, state)


def client_of(
    settings: RolloutSettings, servers: Sequence[str], folder: Path, *, start_s: float = 60.0
) -> VLLMChatClient:
    """A client with the control token that the settings name; else that of a server which `ludic launch` started for the run.

    Waits `start_s` until all of `servers` answer."""
    own = folder / SERVER / TOKEN_FILE
    place = settings.control_token or (own if own.is_file() and CONTROL_VARIABLE not in os.environ else None)
    token = None if place is None else read_control_token(place)
    return VLLMChatClient(servers=servers, control_token=token, connection_timeout_s=start_s)


def save_for_server(
    loaded: LoadedModel, folder: Path, *, is_alone: bool = False, quantization: str | None = None
) -> list[str]:
    """Write the run's weights to the folder that vLLM reads; returns vLLM's flags for them. `is_alone`: the base without the
    adapter, which is pushed by itself. `quantization`: what vLLM turns them into when it loads them."""
    model: Any = plain_model(loaded.model)
    with no_progress_bar(), loaded.model.disable_adapter() if is_alone else contextlib.nullcontext():
        model.save_pretrained(folder, state_dict=dict(dense_parameters(loaded.model)))
    save_tokenizer(loaded.tokenizer, folder)
    flags = ["--served-model-name", "policy"]
    if is_alone:
        rank = fitting_rank(read_adapter(loaded.model).rank)
        flags = ["--served-model-name", BASE, "--enable-lora", "--max-lora-rank", str(rank)]
    flags += [] if quantization is None else ["--quantization", quantization]
    return ["--dtype", str(next(model.parameters()).dtype).removeprefix("torch."), *flags]


def _start(loaded: LoadedModel, run: ResolvedRun, folder: Path) -> VLLMServerProcess:
    settings = run.config.rollouts
    quantization = settings.server_quantization
    flags = save_for_server(loaded, folder / "model", is_alone=settings.push == "adapter", quantization=quantization)
    flags += ["--enable-return-routed-experts"] if run.trainer.replay_experts else []
    if torch.cuda.is_available() and not find_vllm().is_cpu:
        flags += ["--enable-sleep-mode"] if settings.server_sleep else []
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        weights = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        flags += cache_flags(settings.server_memory, total, weights)
    process = start_vllm_server(
        folder / "model",
        port=0,
        max_model_len=run.trainer.max_seq_len,
        gpu_memory_utilization=settings.server_memory,
        enforce_eager=None,
        stream_output=False,
        extra_args=flags,
        run_folder=folder,
    )
    wait_for_vllm_health(process.command.host, process.command.port, process, timeout_s=START_S)
    return process


def cache_flags(share: float, total: int, weights: int) -> list[str]:
    """vLLM's flag for the size of its cache, on a GPU of `total` bytes that it has a `share` of, next to `weights` bytes.

    Otherwise vLLM measures what is free, and ends if the trainer on the same GPU frees memory meanwhile, as it may when a server
    is started again during a run. Where too little is left, vLLM decides, and says what to do."""
    cache = int(share * total) - weights - _SERVER_OVERHEAD
    return ["--kv-cache-memory-bytes", str(cache)] if cache >= _SMALLEST_CACHE else []


async def served_name(client: VLLMChatClient) -> str:
    """The servers' name of the model; ConfigError unless all of them serve the same one."""
    names = {(await client.control_get(server, "/v1/models"))["data"][0]["id"] for server in client.servers}
    if len(names) > 1:
        raise ConfigError(
            f"The servers serve different models ({', '.join(sorted(names))}); start them with the same --served-model-name."
        )
    return str(names.pop())


def connect_to_teacher(run: ResolvedRun, teacher: str, stack: contextlib.ExitStack) -> VLLMTeacher:
    """A teacher at this URL, with the tokenizer of its model; closed with the stack."""
    client = VLLMChatClient(servers=[teacher])
    stack.callback(lambda: run_sync(client.close()))
    model = run_sync(client.control_get(client.servers[0], "/v1/models"))["data"][0]
    # Without the setting, files that the server was started with.
    place = run.config.algo.teacher_tokenizer or model.get("root") or model["id"]
    try:
        tokenizer = load_tokenizer(ModelSettings(model=str(Path(place))))
    except (ConfigError, UnknownName) as error:
        one = "Give --teacher-tokenizer, its folder or hub id."
        raise ConfigError(
            f"The teacher at {teacher} serves {model['id']!r} from {place!r}, whose tokenizer cannot be read here: "
            f"{error} {'Start its server with one that can.' if run.config.teachers else one}"
        ) from error
    return VLLMTeacher(client, model["id"], tokenizer)
