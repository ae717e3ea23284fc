"""Publishing a LoRA adapter to vLLM servers without its base: megabytes instead of gigabytes.

The order of a push, the second try and the comparison are those of `BroadcastPolicyPublisher`; the servers are directed by
`AdapterControlPlane`, and the files lie in an `AdapterFolder`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.adapter_control import AdapterControlPlane
from ludic.distributed.adapter_folder import AdapterFolder
from ludic.distributed.broadcast import BroadcastPolicyPublisher
from ludic.distributed.peft_adapter import base_parameters, read_adapter, require_servable
from ludic.distributed.vllm_control import ControlClient, PauseMode
from ludic.types import ConfigError


class VllmAdapterPublisher:
    """Sends the active adapter of `model`, a peft model; requests name it (`model="policy"`) instead of the base."""

    def __init__(
        self,
        client: ControlClient,
        model: Any,
        *,
        name: str = "policy",
        folder: str | Path | None = None,
        pause: PauseMode = "keep",
        timeout_s: float = 600.0,
        wait_s: float = 120.0,
    ) -> None:
        """The servers run with --enable-lora and serve the base of `model`.

        `folder`: on a disk that every server sees under the same path; the default, a temporary one, suits servers on this
        machine that do not outlive the trainer. `pause`, `timeout_s` and `wait_s` as for `create_vllm_publisher`.
        """
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ConfigError(f"name={name!r}; an adapter is named with letters, digits and . _ -")
        require_servable(model)
        self.name = name
        self._model = model
        control = AdapterControlPlane(
            client, name, base_parameters(model), pause=pause, timeout_s=timeout_s, wait_s=wait_s
        )
        self._push = BroadcastPolicyPublisher(control, AdapterFolder(control, name, self._write, folder))

    def publish(self, state_dict: Mapping[str, Tensor], version: int | None = None) -> None:
        """The adapter as it is now; `state_dict` has to be empty."""
        if state_dict:
            raise ConfigError(
                f"{len(state_dict)} weights were given, but this publisher sends the adapter of the model that it was made for "
                "and nothing else: publish({}, version). For all weights use create_vllm_publisher(client)."
            )
        self._push.publish(read_adapter(self._model).tensors, version)

    def is_current(self, version: int) -> bool:
        """Whether every server has this version, from us. A server that was restarted, or is down, has not."""
        return self._push.is_current(version)

    def require_trained(self, model: Any) -> None:
        """Another model's adapter would change, and this one's would be sent again and again."""
        if model is not self._model:
            raise ConfigError(
                "This VllmAdapterPublisher was made for another model than the one that is trained: its samples would never "
                "change. Give both the same peft model."
            )

    def _write(self, folder: Path) -> None:
        read_adapter(self._model).write(folder)
