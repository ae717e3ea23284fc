"""`TrainerConfig`, `LRSchedule` and `CheckpointConfig`: the numbers of a training run, checked where they are set.

Loads without torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ludic.types import ConfigError

LengthPolicy: TypeAlias = Literal["raise", "truncate", "drop"]
_COUNTS = (
    "max_empty_batches",
    "log_every",
    "eval_concurrency",
    "updates_per_batch",
    "mini_batches",
    "context_parallel",
)
_OPTIONAL_COUNTS = ("max_lag", "sync_every_steps", "eval_every_n_steps")
OptimizerName: TypeAlias = Literal["adamw", "adamw8bit"]
ScheduleKind: TypeAlias = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """Warm up, then stay or decay: what the learning rate is multiplied by, as a pure function of the step.

    Resuming at step n needs nothing but n. Step 0 is the first optimizer step.
    """

    kind: ScheduleKind = "constant"
    """`wsd` is warm-up, stable, decay: constant until the last `decay_steps`, then linear."""
    warmup_steps: int = 0
    """The first step uses 1/warmup_steps of the rate, and the last of the warm-up all of it."""
    total_steps: int | None = None
    """The step at which the decay arrives at `min_ratio`; later steps stay there. Every kind but `constant` needs it."""
    min_ratio: float = 0.0
    """The share of the rate that is left at the end."""
    decay_steps: int | None = None
    """Length of the decay of `wsd`; None is a fifth of `total_steps`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ConfigError(f"LRSchedule.kind={self.kind!r}; there are {', '.join(get_args(ScheduleKind))}.")
        if self.warmup_steps < 0:
            raise ConfigError(f"LRSchedule.warmup_steps={self.warmup_steps}; it must be 0 or more.")
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ConfigError(f"LRSchedule.min_ratio={self.min_ratio}; it is a share of the rate, between 0 and 1.")
        if self.kind != "constant" and self.total_steps is None:
            raise ConfigError(f"LRSchedule(kind={self.kind!r}) has no end. Set total_steps, or use kind='constant'.")
        if self.kind != "constant" and self._end <= self.warmup_steps:
            raise ConfigError(
                f"LRSchedule.total_steps={self.total_steps} leaves no step after warmup_steps={self.warmup_steps}. "
                "Warm up for less, or train for longer."
            )
        if self.decay_steps is not None and self.kind != "wsd":
            raise ConfigError(f"LRSchedule.decay_steps is for kind='wsd'; kind={self.kind!r} decays all the way.")
        if self.decay_steps is not None and not 1 <= self.decay_steps <= self._end - self.warmup_steps:
            raise ConfigError(
                f"LRSchedule.decay_steps={self.decay_steps}; between warm-up and end is room for "
                f"{self._end - self.warmup_steps}."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        first = self.warmup_steps
        if self.kind == "wsd":
            first = max(self._end - (self.decay_steps or max(self._end // 5, 1)), first)
        progress = min(max((step - first) / (self._end - first), 0.0), 1.0)
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.min_ratio + (1 - self.min_ratio) * left

    @property
    def _end(self) -> int:
        assert self.total_steps is not None, "checked when the schedule was made"
        return self.total_steps


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """Settings of the optimizer, of batches in memory and of evaluations. An algorithm defines what is learned."""

    lr: float = 1e-5
    """Learning rate."""
    learning_rate: float | None = None
    """Another name of `lr`; it wins if both are given."""
    critic_lr: float | None = None
    """Learning rate of a critic's own weights, its head or its model; None is `lr`."""
    optimizer: OptimizerName = "adamw"
    """`adamw8bit` keeps both moments in 8 bits instead of 32 (the package bitsandbytes); not for weights that ranks share."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    eps: float = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; 0 or None leaves them."""
    lr_schedule: LRSchedule | None = None
    """Multiplies `lr` by a function of the step; None is constant."""

    max_seq_len: int = 1024
    """Tokens of a sample, prompt and replies; a run ends an episode that gets longer."""
    too_long: LengthPolicy = "raise"
    """The fate of a sample longer than `max_seq_len`: the run ends, the right end is cut off, or the sample is dropped."""
    micro_token_budget: int = 8192
    """Tokens in one forward pass. The gradient does not depend on it."""
    packed: bool = True
    """Samples end to end; False pads them, for models whose attention cannot be routed."""
    share_prefixes: bool = True
    """Compute the tokens that samples begin with in common (a group's prompt, an episode's history) once, when packed. The gradient
    stays the same. On a GPU for models whose layers are large enough to gain by it (docs/performance.md)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, slower."""
    offload_activations: bool = False
    """Tensors that the decoder saves for the backward pass wait in host memory; the gradient stays the same. With
    gradient_checkpointing it is each layer's input alone. For long samples on a GPU; on a CPU it saves nothing."""
    context_parallel: int = 1
    """Neighbouring ranks that share each packed row, for samples longer than one GPU holds; under torchrun only."""
    compile: bool = False
    """Compile the decoder's layers: about a minute at the start, then faster steps on a GPU. Without effect where the fused pass
    runs (the Llama family in bf16 or fp16 on a GPU, packed, not sharded)."""
    mixed_precision_dtype: Literal["bf16"] | None = "bf16"
    """On a GPU, fp32 parameters are used in this precision; on a CPU it has no effect. (fp16 would need its loss scaled.)"""

    updates_per_batch: int = 1
    """Passes over each batch. A batch takes updates_per_batch × mini_batches optimizer steps; weights are published after the
    last of them."""
    mini_batches: int = 1
    """Parts of a batch, of whole groups, with one optimizer step each. Every pass deals the groups out again, from the seed. A
    batch of fewer groups has fewer parts."""

    balance_experts: float = 0.0
    """For a mixture of experts, the weight of the load-balancing loss (docs/mixtures.md); 0 is off. It is that of the whole batch,
    which takes one more forward pass if a batch is several micro-batches."""
    replay_experts: bool = False
    """For a mixture of experts: send every token to the experts that the sampler recorded (`LocalEngine(record_experts=True)`)."""

    watch_entropy: bool = True
    """Report the entropy of the policy at action tokens, at a small cost."""
    max_lag: int | None = None
    """Samples whose oldest token is more versions behind are dropped and counted; None keeps all."""
    max_empty_batches: int = 8
    """Number of consecutive batches with nothing to train on after which the run stops with an error."""
    sync_every_steps: int | None = None
    """Publish after every n-th step, or where a batch takes several, after the batch in which it is; None is 1 with a publisher and
    never without, 0 is never. Weights that the engine shares are always published."""

    model_device: str | None = None
    """Device to train on; None is that of the model."""
    pad_token_id: Any = 0
    """Only for the padded form. An id, or a tokenizer to ask."""
    seed: int = 0
    """Seed of everything random."""
    log_every: int = 1
    """Log every n-th step."""
    eval_at_start: bool = False
    """Evaluate before the first update."""
    eval_every_n_steps: int | None = None
    """Evaluate after every n-th update, or after its batch; 0 or None never."""
    eval_in_background: bool = False
    """Train on while evaluating; at most one evaluation runs at a time. With shared weights it needs a snapshot."""
    eval_concurrency: int | None = None
    """Episodes at a time while evaluating. Default: the engine's batch size; with servers 64."""
    eval_max_steps: int = 1
    """Turns per episode while evaluating."""
    eval_timeout_s: float | None = None
    """Seconds for one model call while evaluating; None sets no limit."""
    parity_tolerance: float = 0.05
    """A warning is logged if sampler and trainer differ by more on the first batch (mean |log-prob difference| per token)."""

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            self.lr = self.learning_rate
        self.learning_rate = self.lr
        for name in ("lr", "critic_lr"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"{name}={rate}; it must be above 0 and finite.")
        if self.micro_token_budget < self.max_seq_len or self.max_seq_len < 2:
            raise ConfigError(
                f"micro_token_budget={self.micro_token_budget} must be at least max_seq_len={self.max_seq_len}, and that at "
                "least 2: the longest sample has to fit one micro-batch."
            )
        if self.max_grad_norm is not None and not self.max_grad_norm >= 0:
            raise ConfigError(f"max_grad_norm={self.max_grad_norm}; it must be above 0, or 0 or None for no clipping.")
        is_adamw = 0 <= self.weight_decay < math.inf and 0 < self.eps < math.inf and all(0 <= b < 1 for b in self.betas)
        if not is_adamw:
            raise ConfigError(
                f"weight_decay={self.weight_decay}, eps={self.eps}, betas={self.betas}; AdamW takes a finite weight_decay of 0 "
                "or more, a finite eps above 0, and betas from 0 to below 1."
            )
        if not 0 <= self.balance_experts < math.inf:
            raise ConfigError(f"balance_experts={self.balance_experts}; it must be 0 (off) or more, and finite.")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}; a seed lies between -2^63 and 2^63 - 1.")
        at_least_one = [(name, 1) for name in _COUNTS]
        for name, least in (*at_least_one, *((each, 0) for each in _OPTIONAL_COUNTS)):
            count = getattr(self, name)
            if count is not None and count < least:
                or_none = ", or None" if name in _OPTIONAL_COUNTS else ""
                raise ConfigError(f"{name}={count}; it must be {least} or more{or_none}.")
        if self.too_long not in get_args(LengthPolicy):
            raise ConfigError(f"too_long={self.too_long!r}; there are {', '.join(get_args(LengthPolicy))}.")
        if self.optimizer not in get_args(OptimizerName):
            raise ConfigError(f"optimizer={self.optimizer!r}; there are {', '.join(get_args(OptimizerName))}.")
        if self.mixed_precision_dtype not in ("bf16", None):
            raise ConfigError(f"mixed_precision_dtype={self.mixed_precision_dtype!r}; there are 'bf16' and None.")
        if self.context_parallel > 1 and not self.packed:
            raise ConfigError(f"context_parallel={self.context_parallel} cuts packed rows; leave out packed=False.")
        self.pad_token_id = _pad_id(self.pad_token_id)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on a batch that has enough groups."""
        return self.updates_per_batch * self.mini_batches

    def lacks_evaluation(self, step: int, newest: int | None) -> bool:
        """True if an update up to `step`, or the start, was to be evaluated after `newest`, the newest step with a result in the
        record of the run (-1: no step has one). Without a record, None, that cannot be said."""
        every = self.eval_every_n_steps or 0
        due = step // every * every if every and step >= every else 0 if self.eval_at_start else -1
        return newest is not None and newest < due


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The folder of checkpoints, when one is saved and which are kept."""

    output_dir: str | Path
    every_n_steps: int = 0
    """0 saves when training ends, and when asked to."""
    max_to_keep: int | None = 2
    """Number of newest checkpoints that stay, and the best stays as well; None keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are never removed; 0 makes no such exception."""
    save_optimizer: bool = True
    """Without the optimizer a checkpoint is smaller, and a resumed run is not the same run."""
    best_metric: str | None = None
    """Name of the metric that decides which checkpoint is the best, such as "eval/accuracy"."""
    best_mode: Literal["max", "min"] = "max"
    """The largest value of that metric is the best, or the smallest."""
    max_shard_size: str = "5GB"
    """Larger weights are split into several files."""

    def __post_init__(self) -> None:
        if self.every_n_steps < 0:
            raise ConfigError(f"CheckpointConfig.every_n_steps={self.every_n_steps}; it is 0 (never) or more.")
        if self.max_to_keep is not None and self.max_to_keep < 1:
            raise ConfigError(f"CheckpointConfig.max_to_keep={self.max_to_keep}; keep at least 1, or None for all.")
        if self.keep_every < 0:
            raise ConfigError(f"CheckpointConfig.keep_every={self.keep_every}; it is 0 (no step is special) or more.")
        if self.keep_every and self.every_n_steps and self.keep_every % self.every_n_steps:
            raise ConfigError(
                f"CheckpointConfig.keep_every={self.keep_every} is no multiple of every_n_steps={self.every_n_steps}, so most of "
                "the steps to be kept would never be saved. Make it one."
            )
        if self.best_mode not in ("max", "min"):
            raise ConfigError(f"CheckpointConfig.best_mode={self.best_mode!r}; there are 'max' and 'min'.")


def _pad_id(source: Any) -> int:
    if isinstance(source, int):
        return source
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(source, name, None)
        if isinstance(found, int):
            return found
    raise ConfigError(f"pad_token_id={source!r}: give an id, or a tokenizer that has a pad or an eos token.")
