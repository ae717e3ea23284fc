"""Publishing to an engine that holds the trainer's own parameters: nothing moves, a version begins."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ludic.types import ChatClient, ChecksServers, ConfigError, PolicyPublisher


class InPlaceServer(Protocol):
    """A server whose weights are changed under it, such as `LocalEngine`."""

    @property
    def model(self) -> Any:
        """The model object that it serves."""
        ...

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """It stands still while the weights change; a new version begins at the end."""
        ...


class SharedWeightsPublisher:
    """For `LocalEngine(model)` and `Trainer(model=model)` on one model object."""

    def __init__(self, engine: InPlaceServer) -> None:
        self._engine = engine

    def require_shared(self, model: Any) -> None:
        """Two models that merely look alike would train and sample side by side, further apart at every step."""
        held = {id(parameter) for parameter in self._engine.model.parameters()}
        if not any(id(parameter) in held for parameter in model.parameters() if parameter.requires_grad):
            raise ConfigError(
                "The engine of this SharedWeightsPublisher does not hold the model that is trained: its samples would never "
                "change. Give LocalEngine and Trainer the same model object."
            )

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        """The weights are there already."""
        with self._engine.updating(version):
            pass

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """Around the optimizer step: the engine never computes with half of it."""
        return self._engine.updating(version)


# ----------------------------------------------------------------------------------------------------
# Publishing to a client that holds a copy of the weights: an engine with a model of its own, beside a sharded one.
# ----------------------------------------------------------------------------------------------------


class ClientPublisher:
    """Hands every new version to the client's `sync_weights`, such as that of `LocalEngine(copy_of_the_model)`."""

    def __init__(self, client: ChatClient, *, timeout_s: float = 600.0) -> None:
        self._client, self._timeout_s = client, timeout_s

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        self._client.sync_weights(state_dict, timeout_s=self._timeout_s, version=version)


# ----------------------------------------------------------------------------------------------------
# One of several trainer processes publishes.
# ----------------------------------------------------------------------------------------------------


class Rank0OnlyPublisher:
    """Makes the real publisher on rank 0, when it is first needed; on other ranks there is none, and no connection."""

    def __init__(self, make_inner: Callable[[], PolicyPublisher], *, enabled: bool = True) -> None:
        """`enabled=False`: nobody publishes (a dry run)."""
        self._make_inner, self._enabled = make_inner, enabled
        self._inner: PolicyPublisher | None = None

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        if self._enabled and process_rank() == 0:
            if self._inner is None:
                self._inner = self._make_inner()
            self._inner.publish(state_dict, version)

    def is_current(self, version: int) -> bool:
        """Where nothing has been published from here, nothing can have been lost."""
        return not isinstance(self._inner, ChecksServers) or self._inner.is_current(version)


def process_rank() -> int:
    """Of this process among the trainer's; 0 when there is only one."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))  # torchrun sets it before any group is there
