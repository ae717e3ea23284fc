"""Bytes on one GPU: what training a model takes, in one process or sharded, and what serving it takes.

Counted from the operations of transformers' Llama family and of ludic.models.head, not fitted. docs/scaling.md has every
formula with its reasons, and how far each was checked.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ludic.scaling.shapes import ModelShape
from ludic.types import ConfigError

Precision: TypeAlias = Literal["bf16", "fp32"]
WIDTHS: dict[str, int] = {"bf16": 2, "fp32": 4}
"""Bytes of a number."""
GIB = 2**30
CHUNK_ELEMENTS = 1 << 27
"""Logits held at a time; ludic.models.head's own number."""
_LOSS_BYTES = 48
"""Per action token: its place, target and temperature, and a handful of fp32 numbers of the loss."""
SERVER_WORKSPACE = 2 * GIB
"""What a server takes beside weights and cache: its kernels, graphs and activations. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """How a model is trained."""

    ranks: int = 1
    """Training GPUs. One is plain training; more is FSDP2."""
    micro_tokens: int = 16_384
    """Tokens of one forward pass on one rank."""
    micro_batches: int = 1
    """Forward passes of a rank per update."""
    action_share: float = 1.0
    """Of the tokens, those that the policy wrote: only they reach the head."""
    computed: Precision = "bf16"
    """What weights are multiplied in."""
    held: Precision = "bf16"
    """What each rank keeps of the weights. With bf16 the optimizer has fp32 copies."""
    checkpointing: bool = False
    """Keep the input of each block, and compute it again for backward."""
    sync_gradients: Literal["last", "every"] = "last"
    """As in FSDPSettings: after the last micro-batch only, or after every one."""
    offload: bool = False
    """Weights, gradients and optimizer state live in the host's memory."""
    lora_rank: int = 0
    """0 trains all weights."""
    prefetch: int = 1
    """Blocks that are gathered ahead."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.micro_tokens, self.micro_batches) < 1 or self.lora_rank < 0 or self.prefetch < 0:
            raise ConfigError(
                f"ranks={self.ranks}, micro_tokens={self.micro_tokens}, micro_batches={self.micro_batches} are at least 1, "
                f"lora_rank={self.lora_rank} and prefetch={self.prefetch} at least 0."
            )
        if not 0 < self.action_share <= 1:
            raise ConfigError(f"action_share={self.action_share}; it is above 0 and at most 1.")
        if self.offload and self.ranks == 1:
            raise ConfigError("offload=True with ranks=1: only a sharded model is kept in the host's memory.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Bytes on one training GPU, by what they are for."""

    weights: int
    gradients: int
    """From one micro-batch to the next."""
    optimizer: int
    """Adam's two moments, and fp32 copies of bf16 weights."""
    gathered: int
    """Whole weights of the blocks at hand, and of the root."""
    gradient_buffers: int
    """Whole gradients on their way to the ranks that keep a part of them."""
    activations: int
    """What forward keeps for backward."""
    recomputed: int
    """One checkpointed block, while it is computed again."""
    head: int
    """Logits of a chunk, and the gradient of the head's weight while it is added up."""
    backward: int
    """Gradients of activations in the block at hand."""
    step: int
    """What the optimizer takes while it steps, when there are no activations."""
    new_gradients: int
    """Those that appear only as activations go, in the first micro-batch."""
    host: int
    """In the host's memory, per GPU."""

    @property
    def kept(self) -> int:
        """There all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def working(self) -> int:
        """The head or a block at hand, whichever takes more: the head is done when the first block begins."""
        return max(self.head, self.recomputed + self.backward)

    @property
    def in_backward(self) -> int:
        """When backward begins, and activations are all there."""
        return self.kept + self.gathered + self.gradient_buffers + self.activations + self.working

    @property
    def after_backward(self) -> int:
        """When activations have gone and gradients have come."""
        return self.kept + self.new_gradients + self.gathered + self.gradient_buffers

    @property
    def in_step(self) -> int:
        return self.kept + self.new_gradients + self.step

    @property
    def peak(self) -> int:
        return max(self.in_backward, self.after_backward, self.in_step)


# --- training ---


def training_memory(shape: ModelShape, setup: TrainingSetup) -> TrainingMemory:
    """What the busiest GPU holds."""
    plain = setup.ranks == 1
    computed, held = WIDTHS[setup.computed], WIDTHS[setup.held]
    frozen = shape.params if setup.lora_rank else 0
    trained = shape.lora_params(setup.lora_rank) if setup.lora_rank else shape.params
    own_frozen, own = _share(frozen, setup.ranks), _share(trained, setup.ranks)
    copies = 4 if setup.held == "bf16" else 0
    weights, optimizer, gradients = held * (own_frozen + own), (8 + copies) * own, held * own
    is_first_only = plain and setup.micro_batches == 1
    whole = _accumulated(setup, trained)
    host = weights + gradients + optimizer if setup.offload else 0
    return TrainingMemory(
        weights=0 if setup.offload else weights,
        optimizer=0 if setup.offload else optimizer,
        gradients=0 if setup.offload or is_first_only else gradients,
        new_gradients=gradients if is_first_only else 0,
        gathered=0 if plain else _gathered(shape, setup, computed),
        gradient_buffers=0 if plain else _buffers(shape, setup, computed) + whole,
        activations=kept_activations(shape, setup),
        recomputed=_recomputed(shape, setup),
        head=_head(shape, setup),
        backward=_backward(shape, setup),
        step=0 if setup.offload else copies * own,
        host=host,
    )


def _share(numbers: int, ranks: int) -> int:
    return -(-numbers // ranks)


def _gathered(shape: ModelShape, setup: TrainingSetup, width: int) -> int:
    """The root stays gathered from forward to the end of backward; of blocks there are the one at hand, those ahead, and
    the buffer that one of them arrives in."""
    return width * (shape.root_params + min(2 + setup.prefetch, shape.layers) * shape.block_params)


def _buffers(shape: ModelShape, setup: TrainingSetup, width: int) -> int:
    """Of two blocks: gradients as computed, and in the fp32 that they are summed in. The root's head has its own at once."""
    if setup.lora_rank:
        return 2 * (width + 4) * _share(shape.lora_params(setup.lora_rank), shape.layers)
    return 2 * (width + 4) * shape.block_params + width * shape.root_params


def _accumulated(setup: TrainingSetup, trained: int) -> int:
    """Whole fp32 gradients, where they are only summed over ranks with the last micro-batch."""
    is_kept = setup.ranks > 1 and setup.sync_gradients == "last" and setup.micro_batches > 1
    return 4 * trained if is_kept else 0


# Letters in comments: D width, F mlp_width, T tokens, A action tokens, w bytes of a number as computed.
def block_activations(shape: ModelShape, computed: Precision, lora_rank: int = 0) -> int:
    """Bytes per token that autograd keeps of one block, uncompiled."""
    w = WIDTHS[computed]
    # A norm: its input in fp32 (the residual itself, if that is fp32), the normed values, the output; one scale per token.
    norms = 2 * ((4 + 2 * w) * shape.width + 4)
    # Queries, keys, values, output; flash attention's normaliser per head.
    attention = w * (2 * shape.q_width + 2 * shape.kv_width) + 4 * shape.heads
    if shape.head_norms:
        attention += (4 + w) * (shape.q_width + shape.kv_width) + 4 * (shape.heads + shape.kv_heads)
    # gate, silu(gate), up, and their product.
    mlp = 4 * w * shape.mlp_width
    return norms + attention + mlp + 7 * w * lora_rank


def kept_activations(shape: ModelShape, setup: TrainingSetup) -> int:
    """Bytes at the end of forward."""
    w = WIDTHS[setup.computed]
    whole = block_activations(shape, setup.computed, setup.lora_rank)
    block = w * shape.width if setup.checkpointing else whole
    last_norm = (4 + w) * shape.width + 4
    rotary = 2 * w * shape.head_dim
    per_action = w * shape.width + _LOSS_BYTES
    return setup.micro_tokens * (shape.layers * block + last_norm + rotary + 8) + _num_actions(setup) * per_action


def _recomputed(shape: ModelShape, setup: TrainingSetup) -> int:
    if not setup.checkpointing:
        return 0
    return setup.micro_tokens * block_activations(shape, setup.computed, setup.lora_rank)


def _num_actions(setup: TrainingSetup) -> int:
    return round(setup.micro_tokens * setup.action_share)


def _head(shape: ModelShape, setup: TrainingSetup) -> int:
    """In backward: two chunks of logits and one of their gradients (a chunk is let go when the next is there), the gradient
    of the hidden states, and that of the weight in fp32 with what is being added to it."""
    w, num_actions = WIDTHS[setup.computed], _num_actions(setup)
    rows = min(num_actions, max(1, CHUNK_ELEMENTS // shape.vocab))
    of_weight = 0 if setup.lora_rank else (4 + w) * shape.vocab * shape.width
    return 3 * w * rows * shape.vocab + w * num_actions * shape.width + of_weight


def _backward(shape: ModelShape, setup: TrainingSetup) -> int:
    """In the MLP of the last block: gradients of three of its products while one has been freed, those of a norm in fp32,
    and a weight's gradient before it is added."""
    w = WIDTHS[setup.computed]
    of_weight = 0 if setup.lora_rank else w * shape.width * shape.mlp_width
    return setup.micro_tokens * (2 * w * shape.mlp_width + (2 * w + 8) * shape.width) + of_weight


# --- serving ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingMemory:
    """Bytes on one inference GPU, and how much of a conversation fits."""

    weights: int
    workspace: int
    left: int
    """For keys and values; below 0 where not even the rest fits."""
    cache_per_token: int
    """On one GPU."""

    @property
    def cache(self) -> int:
        return max(0, self.left)

    @property
    def tokens(self) -> int:
        """Of all sequences together, prompts included."""
        return self.cache // self.cache_per_token


def cache_bytes_per_token(shape: ModelShape, width: int = 2) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_width * width


def serving_memory(shape: ModelShape, *, usable: int, tensor_parallel: int = 1, width: int = 2) -> ServingMemory:
    """`usable` bytes of one GPU, of `tensor_parallel` that serve one copy of the model together."""
    weights = _share(width * shape.params, tensor_parallel)
    # Heads of keys and values cannot be divided further: beyond their number each GPU holds one that another has, too.
    per_token = cache_bytes_per_token(shape, width) // min(tensor_parallel, shape.kv_heads)
    return ServingMemory(
        weights=weights,
        workspace=SERVER_WORKSPACE,
        left=usable - weights - SERVER_WORKSPACE,
        cache_per_token=per_token,
    )
