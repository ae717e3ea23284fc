"""Samples made by hand, for tests of what happens after rollouts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ludic.types import ActorTokenLogps, ChatResponse, SampleAttachments, SAWItem


def random_items(
    lengths: Sequence[int], *, vocab: int = 128, seed: int = 0, temperature: float | None = None, **meta: Any
) -> list[SAWItem]:
    """Samples with several stretches of action tokens, uneven weights and plausible old log-probs."""
    rng = np.random.default_rng(seed)
    items = []
    for number, length in enumerate(lengths):
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        count = int(mask.sum())
        weights = rng.normal(size=count).astype(np.float32) if number % 2 else None
        items.append(
            SAWItem(
                rng.integers(0, vocab, size=length).astype(np.int32),
                None,
                mask,
                float(rng.normal()) if weights is None else float(weights.mean()),
                {"rollout_id": f"r{number}", "total_reward": 1.0, **meta},
                SampleAttachments(
                    actor_logps=ActorTokenLogps(rng.uniform(-5.2, -4.6, size=count).astype(np.float32)),
                    token_weights=weights,
                    temperature=temperature,
                ),
            )
        )
    return items


def item_of(response: ChatResponse, temperature: float, weight: float = 1.0) -> SAWItem:
    """The sample that a reply is."""
    prompt, written = response.prompt_token_ids, response.completion_token_ids
    attached = SampleAttachments(
        actor_logps=ActorTokenLogps(response.completion_logprobs), temperature=temperature, supports=response.supports
    )
    mask = [False] * len(prompt) + [True] * len(written)
    return SAWItem(np.concatenate([prompt, written]), None, mask, weight, {}, attached)
