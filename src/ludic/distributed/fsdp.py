"""FSDP2: one model over several processes, each with a shard of every weight, gradient and optimizer state.

Every decoder block is one FSDP group, gathered just before it is computed and freed after. Embedding, last norm and head are
the root's group, so that a tied embedding is one parameter in one group. Gradients are summed over ranks, not averaged:
every loss already divides by counts of the whole batch.
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
from ludic.models.kinds import is_quantized
from ludic.types import ConfigError

Precision: TypeAlias = Literal["bf16", "fp32"]
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPSettings:
    """Settings of a model that is sharded over ranks."""

    param_dtype: Precision | None = None
    """dtype in which weights are gathered and computed; None is bf16 on GPUs and the weights' own on CPUs."""
    reduce_dtype: Precision | None = "fp32"
    """dtype in which gradients are summed; None is the dtype in which they were computed."""
    reshard_after_forward: bool = True
    """Free a block after its forward pass and gather it again for backward; False takes more memory and less traffic."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and move them to the GPU block by block."""
    replicas: int = 1
    """Number of groups of ranks that each hold the whole model (HSDP): less traffic between machines."""
    sync_gradients: Literal["last", "every"] = "last"
    """When gradients are summed over ranks. "last", after the last micro-batch of a step: least traffic, but each rank holds full
    gradients until then. "every", after each micro-batch: each rank holds only its shard of them."""
    prefetch: int = 1
    """Blocks gathered ahead in the forward pass."""
    gradient_checkpointing: bool = False
    """Keep only each block's input, and recompute the block in the backward pass."""
    compile: bool = False
    """Compile each block; the trainer does it after its checks of the blocks."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value not in (None, *_DTYPES):
                raise ConfigError(f"FSDPSettings.{name}={value!r}; choose {', '.join(_DTYPES)} or None.")
        if self.sync_gradients not in ("last", "every"):
            raise ConfigError(f"FSDPSettings.sync_gradients={self.sync_gradients!r}; choose 'last' or 'every'.")
        if self.replicas < 1 or self.prefetch < 0:
            raise ConfigError(
                f"FSDPSettings(replicas={self.replicas}, prefetch={self.prefetch}): replicas must be ≥ 1, prefetch ≥ 0."
            )


def shard_model(model: Any, settings: FSDPSettings | None = None, *, device: str | None = None) -> Any:
    """Shard the model in place and return it. Every rank holds it whole before; rank 0's weights are used.

    Add adapters before, create the optimizer after. `device` is "cuda" or "cpu"; default: cuda if there are GPUs.
    """
    settings = settings or FSDPSettings()
    mesh = _mesh(settings, device)
    _check_same_model(model, settings)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0)
    return _sharded(model, settings, mesh)


def _check_same_model(model: Any, settings: FSDPSettings) -> None:
    """Raise if ranks differ; a broadcast between tensors of different shapes ends the process without a message."""
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
    """Call `load()` on rank 0 only, in host memory; other ranks never hold more than their shards.

    They receive the modules without weights (on torch's meta device), then their shard of one weight after the other.
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
        _scatter(parameter, next(values))
    return model


def _without_weights(model: Any) -> bytes:
    """The pickled modules and buffers, parameters on the meta device; tied parameters stay tied."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo: dict[int, Any] = dict(empty)
    kept = io.BytesIO()
    pickle.dump(copy.deepcopy(model, memo), kept)
    return kept.getvalue()


@torch.no_grad()
def _scatter(parameter: Tensor, values: Tensor | None) -> None:
    """Rank 0 passes the values; every rank receives its shard."""
    assert isinstance(parameter, DTensor), "every parameter of a sharded model belongs to an FSDP group"
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
            f"FSDPSettings.replicas={settings.replicas} does not divide the {world_size} ranks evenly. "
            f"Choose one of {[n for n in range(1, world_size + 1) if world_size % n == 0]}."
        )
    if settings.cpu_offload and kind == "cpu":
        raise ConfigError(
            "FSDPSettings.cpu_offload=True, but the model is trained on the CPU, where it already is. Leave cpu_offload off."
        )
    if settings.replicas == 1:
        return init_device_mesh(kind, (world_size,), mesh_dim_names=("shard",))
    shape = settings.replicas, world_size // settings.replicas
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def _sharded(model: Any, settings: FSDPSettings, mesh: DeviceMesh) -> Any:
    blocks: list[Any] = decoder_layers(model)
    if not blocks:
        raise ConfigError(
            f"{type(plain_model(model)).__name__} has no list of decoder blocks, so Ludic cannot shard it."
        )
    if any(map(is_quantized, model.modules())):
        raise ConfigError(
            "A base in four bits (quantize_base) cannot be sharded. Shard it in bf16, or train on one GPU."
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
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[number + 1 : number + 1 + settings.prefetch]))
    _register_compute(model)
    model.ludic_fsdp = settings
    return model


def _reduce_unused(model: Any) -> None:
    """An expert without tokens on this rank has no gradient here, but may have one on another rank."""
    if _TORCH >= (2, 13):
        model.set_reduce_scatter_unused_params(True)
    elif any(count for name, count in plain_model(model).config.to_dict().items() if name in _NUM_EXPERTS):
        raise ConfigError(
            f"{type(plain_model(model)).__name__} has experts, which torch {torch.__version__} cannot shard safely: ranks would "
            "deadlock waiting for each other's gradients. Use torch 2.13 or newer."
        )


def _precision(settings: FSDPSettings, mesh: DeviceMesh) -> MixedPrecisionPolicy:
    default: Precision | None = "bf16" if mesh.device_type == "cuda" else None
    param, reduce = settings.param_dtype or default, settings.reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=None if param is None else _DTYPES[param], reduce_dtype=None if reduce is None else _DTYPES[reduce]
    )


def _groups(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _register_compute(model: Any) -> None:
    """The trainer calls the decoder and a chunked head, never the model itself, so FSDP needs its own forward method."""
    model.ludic_compute = lambda work: work()
    register_fsdp_forward_method(model, "ludic_compute")
    gathering, groups = model.ludic_compute, _groups(model)

    def compute(work: Callable[[], Any]) -> Any:
        result = gathering(work)
        if not torch.is_grad_enabled():  # no backward pass will free the gathered weights
            for group in groups:
                group.reshard()
        return result

    model.ludic_compute = compute


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def settings_of(model: Any) -> FSDPSettings:
    settings: FSDPSettings = model.ludic_fsdp
    return settings


def compute_device(model: nn.Module) -> torch.device:
    """The device of the computation; with offloading, parameters are on another."""
    first = next(model.parameters())
    if not isinstance(first, DTensor):
        return first.device
    kind = first.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def sync_gradients(model: Any, *, is_last: bool) -> None:
    """Set whether the next backward pass sums gradients over ranks."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or settings_of(model).sync_gradients == "every")
        model.set_is_last_backward(is_last)


@torch.no_grad()
def clip_gradients(grads: Sequence[Tensor], limit: float, ranks: Ranks) -> float:
    """Clip gradients to this norm over all ranks; returns the norm before clipping."""
    norm = math.sqrt(_square_norm(grads, ranks))
    factor = limit / (norm + 1e-6)
    if factor < 1:
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], factor)
    return norm


def _square_norm(grads: Sequence[Tensor], ranks: Ranks) -> float:
    """Sum of squares of the full gradients, each counted once: shards are summed over ranks, copies are not."""
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
