"""GRPO (arXiv 2402.03300) and its variants: a group of samples per prompt, each compared with its siblings, under PPO's clip."""

from collections.abc import Mapping, Sequence
from functools import partial

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import (
    ComponentNormalizedReturn,
    FoldedReturn,
    GroupNormalizedReturn,
    MaximumLikelihoodReturn,
    ProposerSolverReturn,
    StateFn,
    StateGroupReturn,
    fold_penalties,
    observation_before,
)
from ludic.training.filters import checked_roles, compose_preprocess, observe_roles
from ludic.training.losses import (
    BatchNormalized,
    CompositeLoss,
    LossTerm,
    ObservationLoss,
    Reduction,
    TokenClippedSurrogateLoss,
)
from ludic.types import ConfigError


def make_grpo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    behavior_cap: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "grpo",
) -> RLAlgorithm:
    """Return minus the group's mean, over its standard deviation; token ratios clipped to 0.8 … 1.2.

    `behavior_cap` decouples the clip from the policy that sampled (docs/importance_sampling.md).
    """
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, group_normalize_adv, positive_only),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
            reduction=reduction,
            behavior_cap=behavior_cap,
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


def make_dr_grpo(
    *,
    group_size: int = 8,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    constant_length: int | None = None,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "dr_grpo",
) -> RLAlgorithm:
    """Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the division by the group's deviation and by length.

    Token sums are divided by `constant_length` if it is given (the paper's max_tokens).
    """
    if constant_length is not None:
        reduction = Reduction("constant" if reduction is None else str(reduction), constant_length)
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, normalize_adv=False, positive_only=positive_only),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            ratio_clip=ratio_clip,
            reduction=reduction,
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


def make_maxrl(
    *,
    group_size: int = 8,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "maxrl",
) -> RLAlgorithm:
    """MaxRL (arXiv 2602.02710): the log of the success rate instead of the rate, by dividing through the group's mean reward."""
    return RLAlgorithm(
        name=name,
        credit_assigner=MaximumLikelihoodReturn(group_size),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            ratio_clip=ratio_clip,
            reduction=reduction,
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


def make_echo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    observation_coeff: float = 0.05,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    train_on: str | Sequence[str] = (),
    name: str = "echo",
) -> RLAlgorithm:
    """ECHO (arXiv 2605.24517): GRPO plus `observation_coeff` · cross-entropy on what the env answered, in the same forward pass.

    No sample is dropped: a group that all solve, or none, still says how the env responds. With `train_on`, the cross-entropy is
    on the texts of messages of these roles: ("assistant", "tool") leaves out the env's own observations and the template's tokens.
    """
    roles = checked_roles(train_on)
    if roles and ("assistant" not in roles or len(roles) == 1):
        raise ConfigError(
            f"train_on = {list(roles)}: echo trains on replies of the assistant and on what answers them; name assistant and "
            "at least one of user, tool and system. For replies alone take grpo, for texts alone sft."
        )
    observed_roles = [role for role in roles if role != "assistant"]
    policy = TokenClippedSurrogateLoss(
        clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, ratio_clip=ratio_clip, reduction=reduction
    )
    observed = ObservationLoss(coeff=observation_coeff)
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, group_normalize_adv),
        loss=CompositeLoss([LossTerm(name="policy", loss=policy), LossTerm(name="observation", loss=observed)]),
        preprocess=compose_preprocess(checked(), partial(observe_roles, roles=observed_roles)) if roles else checked(),
        needs_message_spans=bool(roles),
    )


def make_gdpo(
    *,
    group_size: int = 8,
    component_weights: Mapping[str, float] | None = None,
    normalize_batch: bool = True,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "gdpo",
) -> RLAlgorithm:
    """GDPO (arXiv 2601.05242): GRPO for several rewards, each divided by its own deviation in the group before they are added.

    `normalize_batch`: the sums are centred and scaled over the batch, so that their size does not grow with the number of rewards.
    """
    loss = TokenClippedSurrogateLoss(
        clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, ratio_clip=ratio_clip, reduction=reduction
    )
    return RLAlgorithm(
        name=name,
        credit_assigner=ComponentNormalizedReturn(group_size, dict(component_weights or {})),
        loss=BatchNormalized(loss) if normalize_batch else loss,
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


def make_dapo(
    *,
    group_size: int = 8,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    filter_zvp: bool = True,
    zvp_filter_eps: float = 1e-6,
    name: str = "dapo",
) -> RLAlgorithm:
    """DAPO (arXiv 2503.14476): GRPO with a higher upper clip and a token mean, without groups of equal returns.

    Its dynamic sampling, fresh prompts in place of such groups, is in `ludic.batch_gen.sources.rollouts`.
    """
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, normalize_adv=True),
        loss=TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction="token_mean"),
        preprocess=checked(zvp_filter_eps=zvp_filter_eps if filter_zvp else None),
    )


def make_gigpo(
    *,
    group_size: int = 8,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    state_of: StateFn = observation_before,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    reduction: Reduction | str | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "gigpo",
) -> RLAlgorithm:
    """GiGPO (arXiv 2505.10978): episodes compared with their siblings, plus turns with turns taken in the same state."""
    return RLAlgorithm(
        name=name,
        credit_assigner=StateGroupReturn(group_size, gamma=gamma, step_weight=step_weight, state_of=state_of),
        loss=TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


def make_proposer_solver(
    *,
    group_size: int = 8,
    proposer: str = "proposer",
    normalize_adv: bool = True,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "proposer_solver",
) -> RLAlgorithm:
    """One role invents tasks, others attempt them: attempts are compared within their task, proposals with each other."""
    return RLAlgorithm(
        name=name,
        credit_assigner=ProposerSolverReturn(group_size, proposer, normalize_adv),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, ratio_clip=ratio_clip, reduction=reduction
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


def make_fold_grpo(
    *,
    group_size: int = 8,
    max_main_tokens: int | None = None,
    unfolded: float = 1.0,
    failed_call: float = 1.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    name: str = "fold_grpo",
) -> RLAlgorithm:
    """FoldGRPO (arXiv 2510.11967): branches get the advantage of the episode that started them, less penalties of single turns."""
    penalties = fold_penalties(max_main_tokens=max_main_tokens, unfolded=unfolded, failed_call=failed_call)
    return RLAlgorithm(
        name=name,
        credit_assigner=FoldedReturn(group_size, process=penalties),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, ratio_clip=ratio_clip, reduction=reduction
        ),
        preprocess=checked(),
    )
