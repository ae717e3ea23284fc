"""Seconds of generation and of training, from what one H200 was measured to do with one model.

Both rates are carried over to other models by counting operations and bytes; docs/scaling.md says how far that was checked.
"""

import math
from dataclasses import dataclass

from ludic.scaling.memory import TrainingSetup, cache_bytes_per_token
from ludic.scaling.shapes import QWEN_1_5B, ModelShape
from ludic.types import ConfigError

# Measured on an H200, docs/log.md: the 1.5B shape, bf16, compiled, 16 × 1024 tokens of which 70 % were actions.
MEASURED_TRAINING = 51_950.0
_TRAINED_LENGTH, _TRAINED_ACTIONS = 1024, 0.7
# The same model served to 512 at a time, 128 tokens of prompt and 256 new ones each.
MEASURED_GENERATION = 66_334.0
_SERVED, _SERVED_CONTEXT = 512, 128 + 256 / 2
# The most that was measured of any model, SmolLM2-135M: what the host can keep up with, however small the model.
MOST_TRAINED = 316_000.0
LEAST_DECODE_S = 2.15e-3

TENSOR_PARALLEL_EFFICIENCY = 0.85
"""Of each doubling of the GPUs that serve one copy. Assumed."""
HOST_LINK = 50e9
"""Bytes per second between a GPU and its host. Assumed."""
HOST_OPTIMIZER = 1e9
"""Parameters per second that AdamW updates on the cores of one GPU's share of the host. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The GPUs of a run."""

    gpus: int
    memory_gib: float = 141.0
    """Of one GPU. Cards sold as 80 and 141 GB report about one GiB less than that."""
    usable: float = 0.9
    """The share that is planned with; the rest is for fragments, kernels and NCCL."""
    flops: float = 989e12
    """Dense bf16 operations per second; H100 and H200."""
    bandwidth: float = 4.2e12
    """Bytes per second from its memory, as measured on an H200."""
    gpus_per_node: int = 8
    node_network: float = 300e9
    """Bytes per second that each GPU gets of others on its machine. Assumed."""
    network: float = 150e9
    """The same across machines with eight cards of 400 Gb/s each. Assumed."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ConfigError(f"gpus={self.gpus} and gpus_per_node={self.gpus_per_node}; there is at least one.")
        if self.memory_gib <= 0 or not 0 < self.usable <= 1:
            raise ConfigError(
                f"memory_gib={self.memory_gib} must be above 0, and usable={self.usable} a share of it above 0 and at most 1."
            )
        if min(self.flops, self.bandwidth, self.node_network, self.network) <= 0:
            raise ConfigError("flops, bandwidth and the network's speeds must be above 0.")

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_gib * self.usable * 2**30)

    def network_among(self, ranks: int) -> float:
        return self.node_network if ranks <= self.gpus_per_node else self.network


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What was measured of the very model that is planned for, per GPU; None is estimated."""

    training: float | None = None
    """Tokens per second, prompts included, without checkpointing."""
    generation: float | None = None
    """New tokens per second."""

    def __post_init__(self) -> None:
        for name, rate in (("training", self.training), ("generation", self.generation)):
            if rate is not None and rate <= 0:
                raise ConfigError(f"The measured {name} rate is {rate} tokens/s; it must be above 0.")


# --- training ---


def forward_flops(shape: ModelShape, length: float, head_share: float = 1.0) -> float:
    """Per token of a sequence of this length; `head_share` of the tokens reach the head."""
    blocks = 2 * shape.layers * shape.block_params
    head = 2 * shape.vocab * shape.width * head_share
    # Scores and their sums, each 2 · q_width per token seen; a causal token sees half of the sequence on average.
    attention = 2 * shape.layers * shape.q_width * length
    return blocks + head + attention


def training_flops(
    shape: ModelShape, length: float, action_share: float, *, checkpointing: bool = False, is_lora: bool = False
) -> float:
    """Per token: forward, the gradients of activations and (but for LoRA) of weights; blocks once more if checkpointed, the
    head always, since its logits are not kept."""
    blocks = forward_flops(shape, length, 0.0)
    head = forward_flops(shape, length, action_share) - blocks
    passes = 2 if is_lora else 3
    return blocks * (passes + checkpointing) + head * (passes + 1)


ACHIEVED_FLOPS = MEASURED_TRAINING * training_flops(QWEN_1_5B, _TRAINED_LENGTH, _TRAINED_ACTIONS)
"""Operations per second of the measured training step: half of what the GPU is sold for."""


def training_rate(
    shape: ModelShape, hardware: Hardware, rates: Rates, *, length: float, action_share: float, setup: TrainingSetup
) -> float:
    """Tokens per second of one GPU, before it waits for others."""
    is_lora = setup.lora_rank > 0
    own = training_flops(shape, length, action_share, checkpointing=setup.checkpointing, is_lora=is_lora)
    if rates.training is not None:
        return rates.training * training_flops(shape, length, action_share, is_lora=is_lora) / own
    return min(MOST_TRAINED, ACHIEVED_FLOPS * (hardware.flops / Hardware(gpus=1).flops) / own)


def communication_s(shape: ModelShape, hardware: Hardware, setup: TrainingSetup) -> float:
    """Per update: each micro-batch gathers the weights twice, and gradients are summed with the last or with each."""
    if setup.ranks == 1:
        return 0.0
    trained = shape.lora_params(setup.lora_rank) if setup.lora_rank else shape.params
    num_sums = setup.micro_batches if setup.sync_gradients == "every" else 1
    sent = setup.micro_batches * 2 * 2 * shape.params + num_sums * 4 * trained
    return sent * (setup.ranks - 1) / setup.ranks / hardware.network_among(setup.ranks)


def offload_s(shape: ModelShape, setup: TrainingSetup) -> float:
    """Per update: weights to the GPU for each pass, gradients back, and AdamW on the host."""
    if not setup.offload:
        return 0.0
    trained = shape.lora_params(setup.lora_rank) if setup.lora_rank else shape.params
    moved = setup.micro_batches * 2 * 4 * shape.params + 4 * trained
    return (moved / HOST_LINK + trained / HOST_OPTIMIZER) / setup.ranks


# --- generation ---


def ideal_decode_s(shape: ModelShape, hardware: Hardware, *, sequences: int, context: float) -> float:
    """One new token for each of so many sequences on one GPU: reading everything once, then computing."""
    reading = (2 * shape.params + sequences * context * cache_bytes_per_token(shape)) / hardware.bandwidth
    computing = sequences * forward_flops(shape, context) / hardware.flops
    return reading + computing


DECODE_EFFICIENCY = ideal_decode_s(QWEN_1_5B, Hardware(gpus=1), sequences=_SERVED, context=_SERVED_CONTEXT) / (
    _SERVED / MEASURED_GENERATION
)
"""How much of a measured step reading and computing take at the GPU's full speed."""


def decode_s(shape: ModelShape, hardware: Hardware, *, sequences: int, context: float, tensor_parallel: int) -> float:
    """The same as it was measured, on several GPUs perhaps."""
    ideal = ideal_decode_s(shape, hardware, sequences=sequences, context=context)
    efficiency = DECODE_EFFICIENCY * TENSOR_PARALLEL_EFFICIENCY ** math.log2(tensor_parallel)
    return max(LEAST_DECODE_S, ideal / (efficiency * tensor_parallel))
