"""Checks for mistakes that do not stop training but spoil what it learns. Why a run learns nothing is told by causes.py.

The checks of the model and of the first batch only warn. Weights that are not finite, and a GPU without memory, end the run.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ludic.distributed.ranks import Ranks
from ludic.models.lora import adapter_problem
from ludic.models.weights import FiniteCheck, not_finite
from ludic.training.config import TrainerConfig
from ludic.types import OutOfGPUMemory, SAWItem

logger = logging.getLogger(__name__)


def check_model(model: Any) -> list[str]:
    """Warn if training cannot have any effect."""
    found = []
    problem = adapter_problem(model)
    if problem is not None:
        found.append(f"The adapter is inactive: {problem}. Nothing would be learned.")
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        found.append("No parameter of the model requires a gradient. Nothing would be learned.")
    return _warn(found)


def require_finite(check: FiniteCheck, ranks: Ranks, what: str, advice: str) -> None:
    """NotFinite on every rank if a tensor of any of them holds NaN or infinity."""
    gathered = ranks.gather(check.names())
    names = ranks.broadcast(None if gathered is None else list(dict.fromkeys(n for own in gathered for n in own)))
    if names:
        raise not_finite(what, names, advice)


@contextmanager
def explained_memory(cfg: TrainerConfig) -> Iterator[None]:
    """OutOfGPUMemory, with what to change, instead of torch's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        use = ""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            own = torch.cuda.memory_reserved()
            sizes = [f"{size / 2**30:.1f} GiB" for size in (total, own, max(total - free - own, 0), free)]
            use = "Of {}, this process holds {}, others and CUDA {}; {} is free. ".format(*sizes)
        recompute = "" if cfg.gradient_checkpointing else ", set gradient_checkpointing, which recomputes activations"
        recompute += "" if cfg.offload_activations else ", set offload_activations, which keeps them in host memory"
        raise OutOfGPUMemory(
            f"The GPU ran out of memory while training. {use}Lower micro_token_budget (now {cfg.micro_token_budget:,} tokens in "
            f"one forward pass; the gradient stays the same){recompute}, or train an adapter (lora_rank). `ludic plan` says what "
            "fits."
        ) from error


def check_masks(items: Sequence[SAWItem], tokenizer: Any = None) -> list[str]:
    """Warn about action masks and weights that cannot be right, and log the first sample's actions."""
    num_tokens = sum(len(item.input_ids) for item in items)
    num_actions = sum(item.num_action_tokens for item in items)
    found = []
    if num_actions == num_tokens:
        found.append("Every token is an action token: prompts would be trained on too.")
    if not any(item.token_weights.any() for item in items):
        found.append("Every weight is zero: all rewards of each group are equal, or there are no rewards.")
    ids = items[0].input_ids[items[0].action_mask][:40].tolist()
    shown = repr(tokenizer.decode(ids)) if tokenizer is not None else str(ids)
    message = "first batch: %d samples, %d tokens, of which %d are actions; the first sample's actions: %s"
    logger.info(message, len(items), num_tokens, num_actions, shown)
    return _warn(found)


def check_parity(stats: Mapping[str, float], tolerance: float) -> list[str]:
    """Warn if the trainer's probabilities of the sampled tokens are not the sampler's."""
    difference = stats.get("logp_difference_abs")
    if difference is None or difference <= tolerance:
        return []
    return _warn(
        [
            f"Sampler and trainer disagree: on the first batch, before any update, log-probs differ by {difference:.3g} nats per "
            f"token on average (more than {tolerance:g}). Usual causes: another precision, dropout, a sampling "
            "temperature that the samples do not record, an adapter that only one of them has, or samples of another model. "
            "kl_actor_policy_q1 to _q4 show where in a sample they differ."
        ]
    )


def _warn(messages: list[str]) -> list[str]:
    for message in messages:
        logger.warning(message)
    return messages
