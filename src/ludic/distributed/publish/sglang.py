"""Pushes weights to SGLang servers through a folder that they read: pause, write, load, continue.

SGLang's `update_weights_from_disk` loads a folder in the model's own format, so trainer and servers share a file system. The
servers pause with their requests retracted: running replies continue with the new weights, and SGLang reports which weights
sampled which token. Untested against a real server (docs/serving.md).
"""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ludic.distributed.publish.folder import distinct_weights
from ludic.distributed.publish.interfaces import WeightPushError
from ludic.inference.http import EndpointError
from ludic.inference.sglang.client import SGLangChatClient
from ludic.types import ConfigError
from ludic.types.files import replacing

T = TypeVar("T")


class SGLangPublisher:
    """Publishes every version to all servers of a client, or raises WeightPushError."""

    def __init__(
        self,
        client: SGLangChatClient,
        folder: str | Path,
        *,
        save_config: Callable[[Path], object],
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """`folder` is where the servers read the weights. `save_config` writes the model's config.json there, once for each
        version (`model.config.save_pretrained`). `dtype`: floating-point weights are cast to it."""
        self.client, self.folder = client, Path(folder)
        self._save_config, self._dtype, self._timeout_s = save_config, dtype, timeout_s
        self._last: int | None = None

    def publish(self, state_dict: Mapping[str, Tensor], version: int | None = None) -> None:
        """Write all weights by transformers' names, and let every server load them."""
        if not state_dict:
            raise ConfigError("publish() got no weights; give SGLangPublisher all weights of the model.")
        version = (self._last or 0) + 1 if version is None else version
        place = self.folder / f"version_{version}"
        self._write(state_dict, place)
        _run(self._push(place, version))
        previous, self._last = self._last, version
        if previous is not None and previous != version:
            shutil.rmtree(self.folder / f"version_{previous}", ignore_errors=True)

    def is_current(self, version: int) -> bool:
        """Whether every server serves this version."""
        try:
            versions = _run(self._versions())
        except (EndpointError, ConnectionError):
            return False
        return all(found == version for found in versions)

    async def _versions(self) -> list[int]:
        try:
            return [await self.client.version_at(server) for server in self.client.servers]
        finally:
            await self.client.close()

    def _write(self, state_dict: Mapping[str, Tensor], place: Path) -> None:
        from safetensors.torch import save_file

        place.mkdir(parents=True, exist_ok=True)
        self._save_config(place)
        weights = {}
        for name, weight in distinct_weights(state_dict):
            dtype = self._dtype if self._dtype and weight.is_floating_point() else weight.dtype
            weights[name] = weight.detach().to("cpu", dtype).contiguous()
        with replacing(place / "model.safetensors") as unfinished:
            save_file(weights, unfinished, metadata={"format": "pt"})

    async def _push(self, place: Path, version: int) -> None:
        servers, body = self.client.servers, {"model_path": str(place.resolve()), "weight_version": str(version)}
        paused: list[str] = []
        try:
            for server in servers:
                await self.client.control(server, "/pause_generation", {"mode": "retract"}, self._timeout_s)
                paused.append(server)
            found = await asyncio.gather(*(self._load(server, body) for server in servers), return_exceptions=True)
            failed = [f"{url}: {error}" for url, error in zip(servers, found, strict=True) if error is not None]
            if failed:
                raise WeightPushError(f"Version {version} did not reach every server. {'; '.join(failed)}")
        except (EndpointError, ConnectionError, TimeoutError) as error:
            raise WeightPushError(f"Version {version} did not reach every server: {error}") from error
        finally:
            try:
                for server in paused:  # also after a failure: each server says which weights it has
                    await self.client.control(server, "/continue_generation", None, self._timeout_s)
            except (EndpointError, ConnectionError, TimeoutError) as error:
                raise WeightPushError(f"A server does not continue after version {version}: {error}") from error
            finally:
                await self.client.close()

    async def _load(self, server: str, body: Mapping[str, Any]) -> None:
        answer = await self.client.control(server, "/update_weights_from_disk", body, self._timeout_s)
        if answer.get("success") is not True:
            raise EndpointError(f"{server} did not load the weights: {answer.get('message')}")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, in an event loop of a thread: the caller may be inside another loop."""
    with ThreadPoolExecutor(1, "sglang-push") as pool:
        return pool.submit(asyncio.run, work).result()
