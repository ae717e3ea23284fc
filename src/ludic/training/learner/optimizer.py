"""The learner's AdamW: for weights that are sharded over ranks, and for weights in half precision.

An update of 1e-5 on a weight of 0.02 is less than half of bfloat16's last digit: added to the weight itself it is lost, step
after step. `FullPrecisionAdamW` adds it to a copy in fp32, and rounds the copy into the weight. `adamw8bit` is the same with
moments in 8 bits, by bitsandbytes.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ludic.training.config import TrainerConfig
from ludic.types import ConfigError, MissingPackage


def make_adamw(
    policy: Sequence[nn.Parameter], critic: Sequence[nn.Parameter], cfg: TrainerConfig
) -> torch.optim.Optimizer:
    """AdamW over the weights of a policy and of its critic, which are a second group if they have their own rate."""
    parameters = [*policy, *critic]
    if not parameters:
        raise ConfigError("The model has no parameter that requires a gradient.")
    settings: dict[str, Any] = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps, "weight_decay": cfg.weight_decay}
    optimizer: torch.optim.Optimizer
    if cfg.optimizer == "adamw8bit":
        if any(isinstance(p, DTensor) for p in parameters):
            raise ConfigError(
                "optimizer='adamw8bit' does not step weights that ranks share. Use optimizer='adamw': sharded, its state is "
                "divided by the ranks."
            )
        optimizer = adamw8bit()(parameters, **settings)
    else:
        on_gpu = parameters[0].is_cuda
        kind = FullPrecisionAdamW if is_narrow(parameters) else LocalAdamW
        optimizer = kind(parameters, **settings, fused=on_gpu, foreach=not on_gpu)
    if cfg.critic_lr is not None:
        [group] = optimizer.param_groups
        held = group["params"]
        group["params"] = held[: len(policy)]
        optimizer.param_groups.append({**group, "params": held[len(policy) :], "lr": cfg.critic_lr})
    return optimizer


# AdamW on the part of a sharded weight that is on this rank.
# AdamW is elementwise, so every rank can update its own part by itself. Over DTensors torch dispatches tensor by tensor, in
# Python: a hundred times what the arithmetic takes. The state stays made of DTensors, so that checkpoints know how it is cut.


class LocalAdamW(torch.optim.AdamW):
    """The same as AdamW where nothing is sharded."""

    def _init_group(self, group: dict[str, Any], *collected: list[Tensor]) -> bool:
        """torch collects weights, gradients and state here; what it computes with are the local parts, in the same memory."""
        has_complex = super()._init_group(group, *collected)
        for tensors in collected:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return bool(has_complex)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_NARROW = (torch.bfloat16, torch.float16)


class _WithCopies(torch.optim.Optimizer):
    """Before another optimizer in the order of bases: `param_groups` holds the fp32 copies; gradients are on the model's own
    parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        self._served = list(parameters)
        self._is_narrow = [p.dtype in _NARROW for p in self._served]
        super().__init__([_copy(p) if n else p for p, n in zip(self._served, self._is_narrow, strict=True)], **settings)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        copies = [p for group in self.param_groups for p in group["params"]]
        return [(s, c) for s, c, n in zip(self._served, copies, self._is_narrow, strict=True) if n]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        pairs = self._pairs()
        narrow_grads, grads = [], []
        for served, copy in pairs:
            copy.grad = None
            if served.grad is not None:
                copy.grad = torch.empty_like(served.grad, dtype=copy.dtype)
                narrow_grads.append(local_part(served.grad))
                grads.append(local_part(copy.grad))
        if grads:  # in one launch: a small model has many weights
            torch._foreach_copy_(grads, narrow_grads)
        result = super().step(closure)
        if pairs:
            torch._foreach_copy_([local_part(served) for served, _ in pairs], [local_part(copy) for _, copy in pairs])
        for _, copy in pairs:
            copy.grad = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for served in self._served:
            served.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "copies": [copy.detach() for _, copy in self._pairs()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        copies = state_dict["copies"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "copies"})
        for (_, copy), saved in zip(self._pairs(), copies, strict=True):
            copy.copy_(saved)


class FullPrecisionAdamW(_WithCopies, LocalAdamW):
    """AdamW on fp32 copies of the weights in half precision."""


@functools.cache
def adamw8bit() -> type[torch.optim.Optimizer]:
    """bitsandbytes' AdamW with moments in 8 bits, on fp32 copies of the weights in half precision. Weights of fewer than 4,096
    numbers keep moments in fp32."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        how = "pip install 'bitsandbytes>=0.50'; or use optimizer='adamw'"
        raise MissingPackage("bitsandbytes", "optimizer='adamw8bit'", how) from error

    class FullPrecisionAdamW8bit(_WithCopies, AdamW8bit):
        pass

    return FullPrecisionAdamW8bit


def is_narrow(parameters: Iterable[nn.Parameter]) -> bool:
    """True if any of them would lose small updates."""
    return any(p.dtype in _NARROW for p in parameters)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().float())
