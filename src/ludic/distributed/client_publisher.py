"""Publishing to a client that holds a copy of the weights: an engine with a model of its own, beside a sharded one."""

from collections.abc import Mapping
from typing import Any

from ludic.types import ChatClient


class ClientPublisher:
    """Hands every new version to the client's `sync_weights`, such as that of `LocalEngine(copy_of_the_model)`."""

    def __init__(self, client: ChatClient, *, timeout_s: float = 600.0) -> None:
        self._client, self._timeout_s = client, timeout_s

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        self._client.sync_weights(state_dict, timeout_s=self._timeout_s, version=version)
