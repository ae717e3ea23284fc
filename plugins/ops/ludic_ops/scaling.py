"""Memory per GPU, computed without torch: training a decoder in one process or sharded, and serving it.

`ludic plan` prints these numbers and benchmarks/memory_check.py compares them with a GPU. They are counted from the operations
of transformers' Llama family and of ludic.models.head, not fitted. `training_memory`, `serving_memory` and their helpers are the
formulae; docs/scaling.md says how far they were checked.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ludic.models.llama_shape import MEMBERS, SIZES, LlamaShape
from ludic.types import ConfigError
from ludic.util.files import parse_json

Precision: TypeAlias = Literal["bf16", "fp32"]
WIDTHS: dict[str, int] = {"bf16": 2, "fp32": 4}
"""Bytes of a number."""
GIB = 2**30
CHUNK_ELEMENTS = 1 << 28
"""Logits held at a time; the same number as in ludic.models.head on a GPU."""
OFFLOAD_AHEAD = GIB
"""Offloaded activations that are on the GPU all the same, on their way; the same number as in ludic_gpu.offload."""
SERVER_WORKSPACE = 2 * GIB
"""Kernels, graphs and activations of a server, beside weights and cache. Assumed."""


# --- shapes ---


ModelShape: TypeAlias = LlamaShape

SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("135m", 576, 1536, 30, 9, 3, 64, 49_152, is_tied=True),  # SmolLM2
        ModelShape("1.5b", 1536, 8960, 28, 12, 2, 128, 151_936, is_tied=True, qkv_bias=True),  # Qwen2.5
        ModelShape("7b", 3584, 18_944, 28, 28, 4, 128, 152_064, qkv_bias=True),  # Qwen2.5
        ModelShape("32b", 5120, 27_648, 64, 40, 8, 128, 152_064, qkv_bias=True),  # Qwen2.5
        ModelShape("70b", 8192, 28_672, 80, 64, 8, 128, 128_256),  # Llama 3.1
    )
}


def read_shape(source: str | Path) -> ModelShape:
    """A name from SHAPES, a config.json, or a folder with one in it."""
    name = str(source).lower()
    if name in SHAPES:
        return SHAPES[name]
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        near = difflib.get_close_matches(name, SHAPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"No model {str(source)!r}: it is neither a config.json, nor a folder with one, nor a known shape "
            f"({', '.join(SHAPES)}).{hint} `ludic plan` fetches nothing; of a hub model, save its config.json first."
        )
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, not the settings of a model.")
    return shape_from_config(config, name=path.parent.name or str(path))


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape in the contents of a transformers config.json."""
    kind = config.get("model_type")
    if kind not in MEMBERS:
        raise ConfigError(
            f"The model {name} is of type {kind!r}; the formulae hold for dense decoders of the types {', '.join(MEMBERS)}. "
            "Take the known shape nearest in size for a rough answer."
        )
    missing = [key for key in SIZES if key not in config]
    if missing:
        raise ConfigError(f"The config of {name} lacks {', '.join(missing)}; is it the model's own config.json?")
    return ModelShape.of(config, name=name)


# --- training ---


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """A way of training a model."""

    ranks: int = 1
    """Training GPUs. One is plain training; more is FSDP2."""
    micro_tokens: int = 16_384
    """Tokens of one forward pass on one rank."""
    micro_batches: int = 1
    """Forward passes of a rank per update."""
    action_share: float = 1.0
    """Share of the tokens that the policy wrote: only they reach the head."""
    computed: Precision = "bf16"
    """Precision of the matrix products."""
    held: Precision = "bf16"
    """Precision of the weights on each rank. With bf16 the optimizer has fp32 copies."""
    checkpointing: bool = False
    """Keep only the input of each block, and recompute the block in backward."""
    sync_gradients: Literal["last", "every"] = "last"
    """Reduce after the last micro-batch only, or after every one (FSDPSettings)."""
    offload: bool = False
    """Weights, gradients and optimizer state live in the host's memory."""
    offload_activations: bool = False
    """Activations that blocks keep for backward wait in the host's memory."""
    lora_rank: int = 0
    """0 trains all weights."""
    fused: bool = True
    """Run the layers through ludic_gpu.llama where it can: all weights in bf16 on one GPU."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.micro_tokens, self.micro_batches) < 1 or self.lora_rank < 0:
            raise ConfigError(
                f"ranks={self.ranks}, micro_tokens={self.micro_tokens}, micro_batches={self.micro_batches} are at least 1, "
                f"lora_rank={self.lora_rank} at least 0."
            )
        if not 0 < self.action_share <= 1:
            raise ConfigError(f"action_share={self.action_share}; it is above 0 and at most 1.")
        if self.offload and self.ranks == 1:
            raise ConfigError("offload=True with ranks=1: only a sharded model is kept in the host's memory.")

    @property
    def num_actions(self) -> int:
        return round(self.micro_tokens * self.action_share)

    @property
    def is_fused(self) -> bool:
        is_plain = self.ranks == 1 and self.lora_rank == 0
        return self.fused and is_plain and self.computed == self.held == "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Bytes on the busiest training GPU, by purpose."""

    weights: int
    gradients: int
    """Kept from one micro-batch to the next."""
    optimizer: int
    """Adam's two moments, and fp32 copies of bf16 weights."""
    gathered: int
    """Whole weights of the gathered blocks and of the root."""
    gradient_buffers: int
    """Whole gradients before they are reduced to shards."""
    activations: int
    """Tensors that forward keeps for backward."""
    working: int
    """The head or one block in backward, the larger of the two: the head is done when the first block begins."""
    step: int
    """Buffers of the optimizer while it steps, when there are no activations."""
    new_gradients: int
    """Gradients of a single micro-batch: they appear while activations go."""
    host: int
    """Bytes in the host's memory, per GPU."""

    @property
    def kept(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def in_backward(self) -> int:
        """At the beginning of backward, with all activations."""
        return self.kept + self.gathered + self.gradient_buffers + self.activations + self.working

    @property
    def in_step(self) -> int:
        return self.kept + self.new_gradients + self.step

    @property
    def peak(self) -> int:
        after_backward = self.kept + self.new_gradients + self.gathered + self.gradient_buffers
        return max(self.in_backward, after_backward, self.in_step)


def training_memory(shape: ModelShape, setup: TrainingSetup) -> TrainingMemory:
    rank, width, held = setup.lora_rank, WIDTHS[setup.computed], WIDTHS[setup.held]
    is_sharded = setup.ranks > 1
    trained = shape.lora_params(rank) if rank else shape.params
    shard, frozen_shard = _divided(trained, setup.ranks), _divided(shape.params if rank else 0, setup.ranks)
    fp32_copies = 4 if setup.held == "bf16" else 0
    weights, optimizer, gradients = held * (frozen_shard + shard), (8 + fp32_copies) * shard, held * shard
    is_one_batch = not is_sharded and setup.micro_batches == 1
    here = 0 if setup.offload else 1
    moved = _moved_activations(shape, setup) if setup.offload_activations else 0
    return TrainingMemory(
        weights=here * weights,
        optimizer=here * optimizer,
        gradients=0 if is_one_batch else here * gradients,
        new_gradients=gradients if is_one_batch else 0,
        # The root stays gathered from forward to the end of backward; of blocks: the current one, the next one, and the
        # buffer that the next one arrives in.
        gathered=is_sharded * width * (shape.root_params + min(3, shape.layers) * shape.block_params),
        gradient_buffers=is_sharded * _gradient_buffers(shape, setup, trained),
        activations=kept_activations(shape, setup) - moved + min(moved, OFFLOAD_AHEAD),
        working=max(_head(shape, setup), _block_in_backward(shape, setup)),
        step=here * fp32_copies * shard,
        host=moved + (weights + gradients + optimizer if setup.offload else 0),
    )


def _divided(number: int, parts: int) -> int:
    return -(-number // parts)


def _gradient_buffers(shape: ModelShape, setup: TrainingSetup, trained: int) -> int:
    """Two blocks: gradients as computed, and in the fp32 of the reduction. The root's gradient is whole at once. All
    gradients stay whole, in fp32, between micro-batches that are not reduced."""
    width = WIDTHS[setup.computed]
    whole = 4 * trained if setup.sync_gradients == "last" and setup.micro_batches > 1 else 0
    if setup.lora_rank:
        return 2 * (width + 4) * _divided(trained, shape.layers) + whole
    return 2 * (width + 4) * shape.block_params + width * shape.root_params + whole


def _block_activations(shape: ModelShape, setup: TrainingSetup) -> int:
    """Bytes per token that are kept of one block for backward; by autograd, uncompiled."""
    w = WIDTHS[setup.computed]
    if setup.is_fused:
        # The input, the residual stream after attention, queries, keys, values, output, the normaliser, gate and up.
        return w * (2 * shape.width + 2 * shape.q_width + 2 * shape.kv_width + 2 * shape.mlp_width) + 4 * shape.heads
    # A norm: its input in fp32 (the residual itself, if that is fp32), the normed values, the output; one scale per token.
    norms = 2 * ((4 + 2 * w) * shape.width + 4)
    # Queries, keys, values, output; flash attention's normaliser per head.
    attention = w * (2 * shape.q_width + 2 * shape.kv_width) + 4 * shape.heads
    if shape.head_norms:
        attention += (4 + w) * (shape.q_width + shape.kv_width) + 4 * (shape.heads + shape.kv_heads)
    mlp = 4 * w * shape.mlp_width  # gate, silu(gate), up, and their product
    return norms + attention + mlp + 7 * w * setup.lora_rank


def kept_activations(shape: ModelShape, setup: TrainingSetup) -> int:
    """Bytes at the end of forward."""
    w = WIDTHS[setup.computed]
    block = w * shape.width if setup.checkpointing else _block_activations(shape, setup)
    last_norm = w * shape.width if setup.is_fused else (4 + w) * shape.width + 4
    rotary, ids = 2 * w * shape.head_dim, 8
    per_action = w * shape.width + 48  # its position, target and temperature, and the loss's fp32 numbers
    return setup.micro_tokens * (shape.layers * block + last_norm + rotary + ids) + setup.num_actions * per_action


def _moved_activations(shape: ModelShape, setup: TrainingSetup) -> int:
    """Bytes that offload moves to the host. In the fused pass the output of attention stays, unless it is recomputed."""
    w = WIDTHS[setup.computed]
    if setup.checkpointing:
        return setup.micro_tokens * shape.layers * w * shape.width
    stays = w * shape.q_width + 4 * shape.heads if setup.is_fused else 0
    return setup.micro_tokens * shape.layers * (_block_activations(shape, setup) - stays)


def _head(shape: ModelShape, setup: TrainingSetup) -> int:
    """In backward: two chunks of logits, whose gradients take their place (a chunk is freed when the next is there), the
    gradient of the hidden states, and that of the weight in fp32, then also in its own precision."""
    w = WIDTHS[setup.computed]
    rows = min(setup.num_actions, max(1, CHUNK_ELEMENTS // shape.vocab))
    of_weight = 0 if setup.lora_rank else (4 + w) * shape.vocab * shape.width
    return 2 * w * rows * shape.vocab + w * setup.num_actions * shape.width + of_weight


def _block_in_backward(shape: ModelShape, setup: TrainingSetup) -> int:
    """In the MLP of the last block: gradients of three of its products while one has been freed, those of a norm in fp32, and
    a weight's gradient before it is added; with checkpointing also the recomputed block."""
    w = WIDTHS[setup.computed]
    recomputed = _block_activations(shape, setup) if setup.checkpointing else 0
    of_weight = 0 if setup.lora_rank else w * shape.width * shape.mlp_width
    if (
        setup.is_fused
    ):  # the gradients of the block's output and of the product of gate and up; the others take its place
        return setup.micro_tokens * (recomputed + w * (shape.width + shape.mlp_width)) + of_weight
    return setup.micro_tokens * (recomputed + 2 * w * shape.mlp_width + (2 * w + 8) * shape.width) + of_weight


# --- serving ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingMemory:
    """Bytes on one of the GPUs that serve a copy of the model together."""

    weights: int
    left: int
    """For keys and values; below 0 where weights and workspace do not fit."""
    cache_per_token: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together, prompts included."""
        return max(0, self.left) // self.cache_per_token


def serving_memory(shape: ModelShape, *, usable: int, tensor_parallel: int = 1) -> ServingMemory:
    """`usable` bytes of one GPU, of `tensor_parallel` GPUs per copy, in bf16."""
    weights = _divided(2 * shape.params, tensor_parallel)
    # A key-value head is not divided: beyond their number, GPUs hold copies of the same heads.
    per_token = shape.cache_per_token // min(tensor_parallel, shape.kv_heads)
    return ServingMemory(weights=weights, left=usable - weights - SERVER_WORKSPACE, cache_per_token=per_token)
