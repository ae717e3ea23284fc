"""FSDP2: one model over several processes, each holding a part of every weight, its gradient and its optimizer state.

Every decoder block is a group of its own, gathered just before it is computed and freed after; embedding, last norm and
head are the root's group, so that a tied embedding is one parameter in one group. Gradients are summed over ranks and not
averaged: every loss divides by numbers of the whole batch already.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ludic.distributed.ranks import Ranks, difference
from ludic.models.execution import decoder_layers
from ludic.models.head import plain_model
from ludic.types import ConfigError

Precision: TypeAlias = Literal["bf16", "fp32"]
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPSettings:
    """How a model is spread over ranks."""

    param_dtype: Precision | None = None
    """What weights are gathered and computed in; None is bf16 on GPUs, and the weights' own on CPUs."""
    reduce_dtype: Precision | None = "fp32"
    """What gradients are summed in; None is what they were computed in."""
    reshard_after_forward: bool = True
    """Free a block after its forward pass and gather it again for backward; False takes more memory and less traffic."""
    cpu_offload: bool = False
    """Weights, gradients and optimizer state live in the host's memory, and come to the GPU block by block."""
    replicas: int = 1
    """Ranks are divided into so many groups that each hold the whole model (HSDP): less traffic between machines."""
    sync_gradients: Literal["last", "every"] = "last"
    """After the last micro-batch of a step: least traffic, but each rank holds whole gradients meanwhile. "every" holds only
    its part of them, and sums after each micro-batch."""
    prefetch: int = 1
    """Blocks that are gathered ahead in the forward pass."""
    gradient_checkpointing: bool = False
    """Block by block: keep only its input, and compute it again for backward."""
    compile: bool = False
    """Compile block by block; the trainer does it, after it has looked at the blocks."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            value = {"param_dtype": self.param_dtype, "reduce_dtype": self.reduce_dtype}[name]
            if value is not None and value not in _DTYPES:
                raise ConfigError(f"FSDPSettings.{name}={value!r}; there are {', '.join(_DTYPES)}, and None.")
        if self.sync_gradients not in ("last", "every"):
            raise ConfigError(f"FSDPSettings.sync_gradients={self.sync_gradients!r}; there are 'last' and 'every'.")
        if self.replicas < 1 or self.prefetch < 0:
            raise ConfigError(
                f"FSDPSettings(replicas={self.replicas}, prefetch={self.prefetch}): there is at least one replica, and 0 or "
                "more blocks are gathered ahead."
            )


def shard_model(model: Any, settings: FSDPSettings | None = None, *, device: str | None = None) -> Any:
    """The model itself, spread over the ranks. Every rank has it whole before; rank 0's weights are the ones that count.

    Adapters are added before, an optimizer is made after. `device` is "cuda" or "cpu"; by default where GPUs are.
    """
    settings = settings or FSDPSettings()
    mesh = _mesh(settings, device)
    _require_alike(model, settings)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0)
    return _sharded(model, settings, mesh)


def _require_alike(model: Any, settings: FSDPSettings) -> None:
    """Tensors of other shapes than the others expect end the process without a word."""
    facts = {f"FSDPSettings.{f.name}": repr(getattr(settings, f.name)) for f in fields(settings)}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    facts |= {f"the weight {name}": f"{t.dtype}{list(t.shape)}" for name, t in tensors}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, facts)
    problem = difference(gathered)
    if problem:
        raise ConfigError(problem)


def load_sharded(
    load: Callable[[], Any], ranks: Ranks, settings: FSDPSettings | None = None, *, device: str | None = None
) -> Any:
    """`load()` on rank 0 only, in its host's memory; the others never hold more than their parts.

    They get the modules without weights (on torch's meta device), and then their part of one weight after the other.
    """
    settings = settings or FSDPSettings()
    mesh = _mesh(settings, device)
    whole = load() if ranks.is_first else None
    skeleton = pickle.loads(ranks.broadcast(_without_weights(whole) if whole is not None else None))
    buffers = [buffer.clone() for buffer in skeleton.buffers()]
    model = _sharded(skeleton, settings, mesh)
    model.to_empty(device="cpu" if settings.cpu_offload else mesh.device_type)
    for empty, buffer in zip(model.buffers(), buffers, strict=True):
        empty.copy_(buffer)
    if settings.cpu_offload:
        for module in model.modules():
            for name, own in module.named_buffers(recurse=False):
                module._buffers[name] = own.to(mesh.device_type)
    values = iter([None] * len(list(model.parameters())) if whole is None else list(whole.parameters()))
    for parameter in model.parameters():
        _deal_out(parameter, next(values))
    return model


def _without_weights(model: Any) -> bytes:
    """The modules with their buffers, their parameters on the meta device; parameters that were shared still are."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo: dict[int, Any] = dict(empty)
    kept = io.BytesIO()
    pickle.dump(copy.deepcopy(model, memo), kept)
    return kept.getvalue()


@torch.no_grad()
def _deal_out(parameter: Tensor, values: Tensor | None) -> None:
    """Rank 0 has the values; everybody gets a part."""
    assert isinstance(parameter, DTensor), "every parameter of a sharded model is in some group"
    kind = parameter.device_mesh.device_type
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=kind) if values is None else values.to(kind)
    parameter.copy_(distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements))


def _mesh(settings: FSDPSettings, device: str | None) -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigError(
            "Sharding needs torch's process group. Start the program with torchrun (--nproc-per-node=1 for one process) and "
            "call ludic.distributed.ranks.join_ranks() first."
        )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    world_size = dist.get_world_size()
    if world_size % settings.replicas:
        raise ConfigError(
            f"FSDPSettings.replicas={settings.replicas} does not divide the {world_size} ranks: each replica needs as many. "
            f"Choose one of {[n for n in range(1, world_size + 1) if world_size % n == 0]}."
        )
    if settings.cpu_offload and kind == "cpu":
        raise ConfigError("FSDPSettings.cpu_offload=True, but the model is trained on the CPU: it is there already.")
    if settings.replicas == 1:
        return init_device_mesh(kind, (world_size,), mesh_dim_names=("shard",))
    shape = settings.replicas, world_size // settings.replicas
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def _sharded(model: Any, settings: FSDPSettings, mesh: DeviceMesh) -> Any:
    blocks = decoder_layers(model)
    if not blocks:
        raise ConfigError(
            f"{type(plain_model(model)).__name__} has no list of decoder blocks; Ludic cannot tell what to shard."
        )
    if settings.gradient_checkpointing:
        plain_model(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        plain_model(model).disable_input_require_grads()
    offload: OffloadPolicy = CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy()
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": _precision(settings, mesh), "offload_policy": offload}
    for block in blocks:
        fully_shard(block, reshard_after_forward=settings.reshard_after_forward, **common)
    fully_shard(model, **common)
    for module in _groups(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _reduce_unused(model)
    _prefetch(blocks, settings.prefetch)
    _let_compute(model)
    model.ludic_fsdp = settings
    return model


def _reduce_unused(model: Any) -> None:
    """An expert that no token of this rank was sent to has no gradient here, but may have one on another rank."""
    if _TORCH >= (2, 13):
        model.set_reduce_scatter_unused_params(True)
    elif any(count for name, count in plain_model(model).config.to_dict().items() if name in _NUM_EXPERTS):
        raise ConfigError(
            f"{type(plain_model(model)).__name__} has experts, which torch {torch.__version__} cannot shard safely: ranks would "
            "wait for each other's gradients for ever. Use torch 2.13 or newer."
        )


def _precision(settings: FSDPSettings, mesh: DeviceMesh) -> MixedPrecisionPolicy:
    default: Precision | None = "bf16" if mesh.device_type == "cuda" else None
    param, reduce = settings.param_dtype or default, settings.reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=None if param is None else _DTYPES[param], reduce_dtype=None if reduce is None else _DTYPES[reduce]
    )


def _groups(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _prefetch(blocks: Sequence[Any], ahead: int) -> None:
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[number + 1 : number + 1 + ahead]))


def _let_compute(model: Any) -> None:
    """The trainer never calls the model itself, but its decoder and a head in chunks: FSDP must know when that begins."""
    model.ludic_compute = lambda work: work()
    register_fsdp_forward_method(model, "ludic_compute")
    gathering, groups = model.ludic_compute, _groups(model)

    def compute(work: Callable[[], Any]) -> Any:
        result = gathering(work)
        if not torch.is_grad_enabled():  # no backward pass will come that frees what forward has left gathered
            for group in groups:
                group.reshard()
        return result

    model.ludic_compute = compute


# --- what a trainer asks of it ---


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def settings_of(model: Any) -> FSDPSettings:
    settings: FSDPSettings = model.ludic_fsdp
    return settings


def compute_device(model: nn.Module) -> torch.device:
    """Where the model computes; with offloading, its parameters are elsewhere."""
    first = next(model.parameters())
    if not isinstance(first, DTensor):
        return first.device
    kind = first.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def sync_gradients(model: Any, *, is_last: bool) -> None:
    """Whether the next backward pass is the one that sums gradients over ranks."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or settings_of(model).sync_gradients == "every")
        model.set_is_last_backward(is_last)


@torch.no_grad()
def clip_gradients(grads: Sequence[Tensor], limit: float, ranks: Ranks) -> float:
    """Scale gradients down to this norm over all ranks; what it was comes back."""
    norm = math.sqrt(square_norm(grads, ranks))
    factor = limit / (norm + 1e-6)
    if factor < 1:
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], factor)
    return norm


def square_norm(grads: Sequence[Tensor], ranks: Ranks) -> float:
    """Sum of squares of whole gradients, each counted once: parts are added up over ranks, copies are not."""
    parts = [_square(grad.to_local()) / _num_copies(grad) for grad in grads if isinstance(grad, DTensor)]
    copies = [_square(grad) for grad in grads if not isinstance(grad, DTensor)]
    return ranks.sum(_total(parts)) + _total(copies)


def _square(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values.detach(), dtype=torch.float32).double().square()


def _total(numbers: Sequence[Tensor]) -> float:
    return float(torch.stack(list(numbers)).sum()) if numbers else 0.0


def _num_copies(tensor: DTensor) -> int:
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    count = 1
    for placement, size in sizes:
        count *= size if placement.is_replicate() else 1
    return count
