"""Publishing to an engine that holds the trainer's own parameters: nothing moves, a version begins."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class InPlaceServer(Protocol):
    """A server whose weights are changed under it, such as `LocalEngine`."""

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """It stands still while the weights change; a new version begins at the end."""
        ...


class SharedWeightsPublisher:
    """For `LocalEngine(model)` and `Trainer(model=model)` on one model object."""

    def __init__(self, engine: InPlaceServer) -> None:
        self._engine = engine

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        """The weights are there already."""
        with self._engine.updating(version):
            pass

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """Around the optimizer step: the engine never computes with half of it."""
        return self._engine.updating(version)
