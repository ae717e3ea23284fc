"""The critic in a training run: its construction, its values before each update, and how well they matched the returns."""

from dataclasses import replace
from typing import Any

import numpy as np

from ludic.distributed.ranks import Ranks
from ludic.models.execution import recompute_activations
from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.critic.critic import Critic, HeadCritic, ModelCritic, expected_values
from ludic.training.critic.gae import CriticKind
from ludic.training.learner.batches import RankBatch, credit_over_ranks
from ludic.training.learner.gradients import equal_micro_batches
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import BatchFacts
from ludic.types import ConfigError, SAWItem


def make_critic(
    given: Any, algo: RLAlgorithm, policy: TrainedPolicy, cfg: TrainerConfig, *, is_spread: bool
) -> Critic | None:
    """The critic that the algorithm asks for, if it does; `given` is the model of a separate one."""
    _check_request(given, algo, policy, cfg, is_spread=is_spread)
    if not algo.loss.needs.values:
        return None
    if algo.critic is not CriticKind.SEPARATE:
        return HeadCritic(policy, is_detached=algo.critic is CriticKind.DETACHED)
    trunk = TrainedPolicy(
        given.to(policy.device).train(),
        packed=cfg.packed,
        mixed_precision_dtype=cfg.mixed_precision_dtype,
        offload=cfg.offload_activations,
    )
    if cfg.gradient_checkpointing:
        recompute_activations(given)
    if trunk.head.shape[0] < policy.head.shape[0]:
        raise ConfigError(
            f"Trainer(critic=…) has {trunk.head.shape[0]} tokens and the policy {policy.head.shape[0]}; take a critic of the "
            "policy's family."
        )
    return ModelCritic(trunk)


def _check_request(
    given: Any, algo: RLAlgorithm, policy: TrainedPolicy, cfg: TrainerConfig, *, is_spread: bool
) -> None:
    is_wanted = algo.loss.needs.values
    is_separate = is_wanted and algo.critic is CriticKind.SEPARATE
    if given is not None and not is_separate:
        raise ConfigError(
            f"Trainer(critic=…) was given, but {algo.name} "
            f"{'has a critic on the policy itself' if is_wanted else 'has no critic'}. Use make_ppo(critic='separate')."
        )
    if cfg.critic_lr is not None and not is_wanted:
        raise ConfigError(f"critic_lr={cfg.critic_lr}, but {algo.name} has no critic. Leave it None.")
    if not is_wanted:
        return
    if algo.advantages is None:
        raise ConfigError(
            f"{algo.name} trains a critic, but has no rule to use its values; set advantages=TokenGAE(…) or TurnGAE(…)."
        )
    if not is_separate:
        return
    if given is None or given is policy.model:
        raise ConfigError(
            f"{algo.name} has a critic that is a second model; give Trainer(critic=model), another one than the policy, such "
            "as copy.deepcopy(policy) before training."
        )
    if is_spread:
        raise ConfigError(
            f"{algo.name} has a critic that is a second model, which is not supported for a policy spread over ranks. Use "
            "make_ppo(critic='shared') or 'detached'."
        )


def with_advantages(
    critic: Critic, algo: RLAlgorithm, policy: TrainedPolicy, share: RankBatch, cfg: TrainerConfig, ranks: Ranks
) -> tuple[list[SAWItem], BatchFacts]:
    """The share's samples with weights from the critic's present values, and the batch's facts with these weights."""
    bins = equal_micro_batches(policy, share.items, cfg.micro_token_budget, ranks)
    values = expected_values(policy, critic, bins, cfg.pad_token_id)
    expected = [
        replace(item, attachments=replace(item.attachments, token_values=values[id(item)])) for item in share.items
    ]

    def credit(items: list[SAWItem]) -> list[SAWItem]:
        """An episode that became several samples is credited as one, also if they are on several ranks."""
        assert algo.advantages is not None, "make_critic has checked"
        return algo.advantages.credit(items, [_values(item) for item in items])

    return credit_over_ranks(ranks, expected, credit)


def _values(item: SAWItem) -> np.ndarray:
    assert item.attachments.token_values is not None, "written just before"
    return item.attachments.token_values


_MOMENTS = ("critic/return", "critic/return_square", "critic/residual", "critic/residual_square")


def value_moments(items: list[SAWItem]) -> dict[str, tuple[float, float]]:
    """Sums over this rank's tokens, from which `explained_variance` is computed over all ranks."""
    if not items:  # fewer samples than ranks
        return {}
    returns = np.concatenate([item.attachments.token_returns for item in items]).astype(np.float64)
    residuals = returns - np.concatenate([_values(item) for item in items])
    sums = (returns.sum(), np.square(returns).sum(), residuals.sum(), np.square(residuals).sum())
    return {name: (float(total), float(len(returns))) for name, total in zip(_MOMENTS, sums, strict=True)}


def explained_variance(stats: dict[str, float]) -> dict[str, float]:
    """`stats` with 1 − Var(return − value) / Var(return) in the place of the moments, if returns differ at all: 1 is a perfect
    critic, 0 one that predicts a constant."""
    if _MOMENTS[0] not in stats:
        return stats
    mean, square, residual, residual_square = (stats.pop(name) for name in _MOMENTS)
    spread = square - mean**2
    if spread <= 1e-8 * max(square, 1e-8):
        return stats
    return {**stats, "value/explained_variance": 1 - (residual_square - residual**2) / spread}
