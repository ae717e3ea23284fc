"""Refuses samples whose probabilities the trainer cannot compute as the sampler did: a wrong ratio teaches silently."""

from collections.abc import Sequence

from ludic.training.losses import Loss
from ludic.types import ConfigError, SAWItem

_FULL = "Turn that off: top_p=1, top_k=0, min_p=0, min_tokens=0, no penalties"


def require_repeatable(items: Sequence[SAWItem], loss: Loss) -> None:
    """ConfigError for the first sample that this loss would compare with something else than what it was drawn from."""
    if not loss.needs_old_logps:
        return
    for item in items:
        attached = item.attachments
        if attached.unrepeatable is not None and attached.actor_logps is not None:
            raise ConfigError(
                f"{_name(item)} was sampled with {attached.unrepeatable}, and what that left to draw from was not recorded: "
                f"its log-probs are of a distribution that the trainer cannot repeat. {_FULL}. The embedded engine records it "
                "for top_p, top_k and min_p, if log-probs are asked for: ReturnSpec.for_rl()."
            )
        has_candidates = attached.supports is not None and len(attached.supports.ids) > 0
        if has_candidates and attached.teacher_logps is not None:
            raise ConfigError(
                f"{_name(item)} was drawn from a part of the vocabulary, but its teacher's log-probs are over all of it; their "
                f"difference means nothing. {_FULL}, no max_think."
            )


def _name(item: SAWItem) -> str:
    return f"A sample (rollout {item.meta.get('rollout_id')})"
