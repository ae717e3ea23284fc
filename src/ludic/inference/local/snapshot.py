"""`EngineSnapshot`: a second engine on copied weights, to evaluate one version of a policy while the next is trained.

`LocalEngine` serves the trainer's own parameters, which change during an evaluation that runs beside training. A snapshot
copies the trained parameters (frozen ones, such as the base model under an adapter, are shared) at each `take_snapshot`, so
in between it serves exactly one version.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ludic.inference.local.engine import LocalEngine
from ludic.models.weights import forward_hooks
from ludic.types import ChatResponse, ConfigError, Info, TokenCompletionRequest

_KV_FRACTION_ON_GPU = 0.2


class EngineSnapshot:
    """A ChatClient that serves the weights of the last `take_snapshot`; give it to the agents of an evaluation."""

    def __init__(self, live: LocalEngine, **settings: Any) -> None:
        """`settings` of LocalEngine; defaults: the tokenizer and lengths of `live`, and a smaller cache."""
        self._source = live.model
        self._copy = _copied(live.model)
        on_gpu = next(live.model.parameters()).is_cuda
        usual: dict[str, Any] = {"max_model_len": live.max_model_len, "version": live.version}
        if on_gpu and "kv_tokens" not in settings:
            usual["kv_memory_fraction"] = _KV_FRACTION_ON_GPU  # the live engine and the trainer need most of the memory
        self.engine = LocalEngine(self._copy, live.tokenizer, **{**usual, **settings})

    @property
    def version(self) -> int:
        return self.engine.version

    @torch.no_grad()
    def take_snapshot(self, version: int) -> None:
        """Copy the current live weights. Call it between two updates, not during one."""
        now = _own_tensors(self._source)
        held = _own_tensors(self._copy)
        if now.keys() != held.keys():
            raise ConfigError(
                "The model has other parameters than when its EngineSnapshot was made (an adapter was added?). Make the "
                "snapshot after the model is complete."
            )
        with self.engine.updating(version):
            for name, tensor in held.items():
                if tensor is not now[name]:
                    tensor.copy_(now[name])

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        return await self.engine.complete_tokens(request)

    async def get_policy_version(self) -> int:
        return self.version

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        raise ConfigError("A snapshot takes its weights from the live engine; use take_snapshot(version).")

    def close(self) -> None:
        self.engine.close()


def _copied(model: Any) -> Any:
    """Copy modules and trained parameters; share frozen parameters, which never change."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    for module in model.modules():  # hooks are shared, not copied
        memo |= {id(hook): hook for hook in forward_hooks(module)}
    return copy.deepcopy(model, memo).eval()


def _own_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
