"""The weights of one LoRA adapter, A and B of every adapted projection in fp32, and the products that a pass computes with them.

A projection with an adapter gives W x + alpha / rank · B (A x). Names and initial values are those of peft, so a saved
adapter is one of peft's, and equal seeds give equal adapters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ludic.models.head import plain_model
from ludic.models.lora import not_adaptable
from ludic.types import ConfigError

_PREFIX = "base_model.model."
"""Before the name of a module in peft's files."""
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Size of an adapter, the projections that it adapts, and the seed of its initial values."""

    rank: int
    alpha: float = 32.0
    """The adapter's product is multiplied by alpha / rank."""
    seed: int | None = None
    """None draws one."""
    attention: bool = True
    mlp: bool = True
    head: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"AdapterSpec.rank={self.rank}; it must be at least 1.")
        if not (self.attention or self.mlp or self.head):
            raise ConfigError("AdapterSpec adapts nothing: set attention, mlp or head.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adaptable_linears(model: Any) -> dict[str, nn.Linear]:
    """The decoder's linear layers by name, in the order of its modules, and the output layer."""
    inner = plain_model(model)
    left_out, head = set(not_adaptable(inner)), inner.get_output_embeddings()
    layers = tuple(
        f"{name}."
        for name, module in inner.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h", "blocks")
    )
    return {
        name: module
        for name, module in inner.named_modules()
        if type(module) is nn.Linear and name not in left_out and (module is head or name.startswith(layers))
    }


def _is_adapted(name: str, module: nn.Linear, model: Any, spec: AdapterSpec) -> bool:
    if module is model.get_output_embeddings():
        return spec.head
    is_attention = any("attn" in part or "attention" in part for part in name.split("."))
    return spec.attention if is_attention else spec.mlp


# Letters: N inputs of a projection, M its outputs, R the rank.
class LoraAdapter:
    """A and B of every adapted projection, as parameters over one flat tensor: all A, then all B, in the order of the modules."""

    def __init__(self, spec: AdapterSpec, shapes: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """Zeros. `shapes`: (M, N) of each projection by module name. `create` makes an adapter to train."""
        self.spec = spec
        self.shapes = dict(shapes)
        """(M, N) of each adapted projection by module name."""
        rank = spec.rank
        sizes = [(rank, n) for _, n in self.shapes.values()] + [(m, rank) for m, _ in self.shapes.values()]
        self.flat = torch.zeros(sum(map(math.prod, sizes)), dtype=torch.float32, device=device)
        """All values; the parameters are views of it."""
        parts = self.flat.split([math.prod(size) for size in sizes])
        parameters = [nn.Parameter(part.view(size)) for part, size in zip(parts, sizes, strict=True)]
        count = len(self.shapes)
        self._weights = dict(zip(self.shapes, zip(parameters[:count], parameters[count:], strict=True), strict=True))

    @classmethod
    def create(cls, model: Any, spec: AdapterSpec) -> Self:
        """An adapter for `model` that changes nothing yet: B is zero, A is drawn as peft draws it from this seed."""
        inner = plain_model(model)
        linears = {name: m for name, m in adaptable_linears(inner).items() if _is_adapted(name, m, inner, spec)}
        if not linears:
            raise ConfigError(f"{type(inner).__name__} has no linear layer that {spec} adapts.")
        shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
        adapter = cls(spec, shapes, inner.get_input_embeddings().weight.device)
        generator = torch.Generator()
        if spec.seed is None:
            generator.seed()
        else:
            generator.manual_seed(spec.seed % (1 << _SEED_BITS))
        with torch.no_grad():
            for a_RN, b_MR in adapter._weights.values():
                # peft makes two linear layers, which draw their weights, and then draws A again.
                for shape in (a_RN.shape, b_MR.shape, a_RN.shape):
                    drawn = nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
                a_RN.copy_(drawn)
        return adapter

    @property
    def scale(self) -> float:
        return self.spec.scale

    def weights(self, module: str) -> tuple[nn.Parameter, nn.Parameter] | None:
        """A [R, N] and B [M, R] of a projection; None if it is not adapted."""
        return self._weights.get(module)

    def parameters(self) -> list[nn.Parameter]:
        """A and B of every projection in order."""
        return [parameter for pair in self._weights.values() for parameter in pair]

    def named(self) -> dict[str, Tensor]:
        """The parameters by the names that peft gives them in a file, without gradients."""
        return {
            f"{_PREFIX}{module}.lora_{letter}.weight": parameter.detach()
            for module, pair in self._weights.items()
            for letter, parameter in zip("AB", pair, strict=True)
        }

    @torch.no_grad()
    def load(self, named: Mapping[str, Tensor]) -> None:
        """Copy the values of an adapter of the same shape; all or none."""
        own = self.named()
        wrong = [name for name, value in own.items() if name in named and named[name].shape != value.shape]
        if own.keys() != named.keys() or wrong:
            missing, unknown = sorted(own.keys() - named.keys()), sorted(named.keys() - own.keys())
            raise ConfigError(
                f"These weights belong to another adapter than one of rank {self.spec.rank}: missing {missing[:2]}, unknown "
                f"{unknown[:2]}, of another shape {wrong[:2]}. Make the adapter with the settings that these were saved with."
            )
        for name, value in own.items():
            value.copy_(named[name])

    @torch.no_grad()
    def copy(self) -> Self:
        """A frozen copy, for sampling while this one is trained."""
        copied = type(self)(self.spec, self.shapes, self.flat.device)
        copied.flat.copy_(self.flat)
        for parameter in copied.parameters():
            parameter.requires_grad_(False)
        return copied

    def peft_config(self, base_name: str) -> dict[str, Any]:
        """The contents of adapter_config.json for a file of `named`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": self.spec.rank,
            "lora_alpha": self.spec.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({module.rpartition(".")[2] for module in self.shapes}),
            "inference_mode": True,
        }


_ALL = slice(None)


# Letters: T flat tokens, N inputs of a projection, M its outputs, R the rank.
class AdapterProduct(NamedTuple):
    """The adapter of one projection on its rows of a pass, and its gradients by hand."""

    a_RN: Tensor
    b_MR: Tensor
    scale: float
    rows: slice = _ALL
    others_TR: Tensor | None = None
    """For several adapters as one: where a token and a row of A belong to different adapters."""

    def to(self, dtype: torch.dtype) -> "AdapterProduct":
        """In the precision of the pass, as under autocast."""
        return self._replace(a_RN=self.a_RN.to(dtype), b_MR=self.b_MR.to(dtype))

    def add(self, out_TM: Tensor, x_TN: Tensor) -> Tensor:
        """Add the adapter's product to that of the base weight; returns A x."""
        inner_TR = self._inner(x_TN[self.rows])
        out_TM[self.rows].addmm_(inner_TR, _transposed(self.b_MR), alpha=self.scale)
        return inner_TR

    def _inner(self, x_TN: Tensor) -> Tensor:
        inner_TR = x_TN @ _transposed(self.a_RN)
        return inner_TR if self.others_TR is None else inner_TR.masked_fill_(self.others_TR, 0.0)

    def backward(self, grad_TM: Tensor, grad_x_TN: Tensor | None) -> Tensor:
        """Add to the gradient of the projection's input; returns the gradient of A x."""
        grad_TR = (grad_TM[self.rows] @ self.b_MR).mul_(self.scale)
        if self.others_TR is not None:
            grad_TR.masked_fill_(self.others_TR, 0.0)
        if grad_x_TN is not None:
            grad_x_TN[self.rows].addmm_(grad_TR, self.a_RN)
        return grad_TR

    def gradients(
        self, grad_TM: Tensor, grad_TR: Tensor, x_TN: Tensor, inner_TR: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of A and B; A x is computed again if it was not kept."""
        own_TM, own_TN = grad_TM[self.rows], x_TN[self.rows]
        inner_TR = self._inner(own_TN) if inner_TR is None else inner_TR
        return grad_TR.t() @ own_TN, (own_TM.t() @ inner_TR).mul_(self.scale)


def _transposed(weight: Tensor) -> Tensor:
    """A CPU multiplies by a transposed copy up to four times faster than by a transposed view."""
    return weight.t() if weight.is_cuda else weight.t().contiguous()
