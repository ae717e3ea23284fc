"""Publishers without a server: to an engine in this process (shared or copied weights), and from rank 0 only."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ludic.types import ChatClient, ChecksServers, ConfigError, PolicyPublisher


class InPlaceServer(Protocol):
    """A server whose weights are changed in place, such as `LocalEngine`."""

    @property
    def model(self) -> Any:
        """The served model object."""
        ...

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """Pauses generation while the weights change; a new version begins at the end."""
        ...


class SharedWeightsPublisher:
    """For `LocalEngine(model)` and `Trainer(model=model)` on one model object: no weights move, only the version changes."""

    def __init__(self, engine: InPlaceServer) -> None:
        self._engine = engine

    def require_shared(self, model: Any) -> None:
        """Raise unless engine and trainer share weights; two equal copies would drift apart at every step."""
        held = {id(parameter) for parameter in self._engine.model.parameters()}
        if not any(id(parameter) in held for parameter in model.parameters() if parameter.requires_grad):
            raise ConfigError(
                "The engine of this SharedWeightsPublisher does not hold the trained model, so its samples would never change. "
                "Give LocalEngine and Trainer the same model object."
            )

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        """Begin a version; the weights are already in place."""
        with self._engine.updating(version):
            pass

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """Wrap the optimizer step, so that the engine never computes with half-updated weights."""
        return self._engine.updating(version)


class ClientPublisher:
    """Passes every new version to the client's `sync_weights`, for a client with its own copy of the weights, such as
    `LocalEngine(copy_of_the_model)` beside a sharded model."""

    def __init__(self, client: ChatClient, *, timeout_s: float = 600.0) -> None:
        self._client, self._timeout_s = client, timeout_s

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        self._client.sync_weights(state_dict, timeout_s=self._timeout_s, version=version)


class Rank0OnlyPublisher:
    """Creates the real publisher on rank 0 at first use; other ranks have none, and no connection."""

    def __init__(self, make_inner: Callable[[], PolicyPublisher], *, enabled: bool = True) -> None:
        """`enabled=False`: no rank publishes (a dry run)."""
        self._make_inner, self._enabled = make_inner, enabled
        self._inner: PolicyPublisher | None = None

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        if self._enabled and process_rank() == 0:
            if self._inner is None:
                self._inner = self._make_inner()
            self._inner.publish(state_dict, version)

    def is_current(self, version: int) -> bool:
        """True if nothing has been published from here: then nothing can be lost."""
        return not isinstance(self._inner, ChecksServers) or self._inner.is_current(version)


def process_rank() -> int:
    """The rank of this process; 0 if there is only one."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))  # torchrun sets it before a group exists
