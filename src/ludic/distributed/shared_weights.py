"""Publishing to an engine that holds the trainer's own parameters: nothing moves, a version begins."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ludic.types import ConfigError


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
