"""Samples made by hand, for tests of what happens after rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ludic.types import ActorTokenLogps, ChatResponse, SampleAttachments, SAWItem
from tests.origins import meta_and_origin


def random_items(
    lengths: Sequence[int], *, vocab: int = 128, seed: int = 0, temperature: float | None = None, **facts: Any
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
                attachments=SampleAttachments(
                    actor_logps=ActorTokenLogps(rng.uniform(-5.2, -4.6, size=count).astype(np.float32)),
                    token_weights=weights,
                    temperature=temperature,
                ),
                **meta_and_origin(rollout_id=f"r{number}", total_reward=1.0, **facts),
            )
        )
    return items


def in_three_episodes(items: Sequence[SAWItem]) -> list[SAWItem]:
    """The samples, dealt out to three episodes."""
    return [item.with_origin(episode=f"e{number % 3}") for number, item in enumerate(items)]


def with_prefix(item: SAWItem, prefix: np.ndarray) -> SAWItem:
    """The sample behind further prompt tokens."""
    mask = np.concatenate([np.zeros(len(prefix), dtype=bool), item.action_mask])
    return replace(item, input_ids=np.concatenate([prefix, item.input_ids]), attention_mask=None, action_mask=mask)


def item_of(response: ChatResponse, temperature: float, weight: float = 1.0) -> SAWItem:
    """The sample that a reply is."""
    prompt, written = response.prompt_token_ids, response.completion_token_ids
    attached = SampleAttachments(
        actor_logps=ActorTokenLogps(response.completion_logprobs),
        temperature=temperature,
        candidates=response.candidates,
    )
    mask = [False] * len(prompt) + [True] * len(written)
    return SAWItem(np.concatenate([prompt, written]), None, mask, weight, {}, attached)


def assert_same_up_to_rounding(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Sums over the same terms in another order: see "Tolerances" in CONTRIBUTING.md.

    A sum of n products in fp32 is off by at most n * 2**-24 of the sum of their absolute values, usually by sqrt(n) * 2**-24. The limit is
    relative to the largest element, as one near zero is the difference of larger terms. Sums here have some thousand terms.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        limit = 1e-5 * float(value.abs().max())
        difference = float((found[name] - value).abs().max())
        assert difference <= limit, f"{name}: {difference:.1e} apart, {limit:.1e} allowed"


def first_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Adam's running means of the gradients, by name: linear in the gradients, where weights are not."""
    moments = {
        name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters() if p in optimizer.state
    }
    assert moments and max(float(moment.abs().max()) for moment in moments.values()) > 0
    return moments
