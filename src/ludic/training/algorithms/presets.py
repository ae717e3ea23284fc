"""The presets: which credit rule and which loss make an algorithm, and their defaults. A new one is an entry here.

What a credit rule does is in `credit_assignment`, what a loss does in `losses`; docs/algorithms has a page for each.
Algorithms that need code are functions: `make_echo`, `make_ppo` and `make_spo` below, imitation.py and distillation.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from ludic.training.algorithms.algorithm import Preprocess, Preset, RLAlgorithm, Settings, checked
from ludic.training.credit_assignment import (
    BetaValueTracker,
    ComponentNormalizedReturn,
    ConstantCredit,
    FoldedReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    LeaveOneOutReturn,
    MaximumLikelihoodReturn,
    MonteCarloReturn,
    PerStepReward,
    ProposerSolverReturn,
    StateGroupReturn,
    TrackedValueReturn,
    fold_penalties,
    observation_before,
)
from ludic.training.critic.gae import CriticKind, TokenGAE, TurnGAE
from ludic.training.filters import checked_roles, compose_preprocess, forget_temperature, observe_roles
from ludic.training.losses import (
    BatchNormalized,
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    EntropyBonus,
    GMPOLoss,
    KTOLoss,
    Loss,
    LossTerm,
    ObservationLoss,
    PreferencePairLoss,
    Reduction,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    ValueLoss,
)
from ludic.training.losses.tokens import TOKEN_MEAN
from ludic.types import ConfigError

_CLIP: Settings = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
_RATIO: Settings = {"reduction": None, "ratio_clip": None}
_DROP: Settings = {"drop_zero_weight": False, "drop_zero_weight_eps": 1e-4}
_GROUP: Settings = {"group_size": 8, "group_normalize_adv": True, "positive_only": False}


def _in_group(group_size: int, group_normalize_adv: bool, positive_only: bool) -> GroupNormalizedReturn:
    return GroupNormalizedReturn(group_size, group_normalize_adv, positive_only)


# --- GRPO and its variants: a group of samples per prompt, each compared with its siblings, under PPO's clip ---

make_grpo = Preset(
    name="grpo",
    doc="""GRPO (arXiv 2402.03300): return minus the group's mean, over its standard deviation; ratios clipped to 0.8 … 1.2.

    `behavior_cap` decouples the clip from the policy that sampled (docs/importance_sampling.md).
    """,
    credit=_in_group,
    credit_settings=_GROUP,
    loss=TokenClippedSurrogateLoss,
    loss_settings={**_CLIP, "length_normalize": False, **_RATIO, "behavior_cap": None},
    preprocess_settings=_DROP,
)


def _loss_of_constant_length(
    *, constant_length: int | None, reduction: Reduction | str | None, **settings: Any
) -> TokenClippedSurrogateLoss:
    if constant_length is not None:
        reduction = Reduction("constant" if reduction is None else str(reduction), constant_length)
    return TokenClippedSurrogateLoss(reduction=reduction, **settings)


make_dr_grpo = replace(
    make_grpo,
    name="dr_grpo",
    doc="""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the division by the group's deviation and by length.

    Token sums are divided by `constant_length` if it is given (the paper's max_tokens).
    """,
    credit=partial(_in_group, group_normalize_adv=False),
    credit_settings={"group_size": 8, "positive_only": False},
    loss=_loss_of_constant_length,
    loss_settings={**_CLIP, "constant_length": None, **_RATIO},
)

make_maxrl = replace(
    make_grpo,
    name="maxrl",
    doc="MaxRL (arXiv 2602.02710): the log of the success rate instead of the rate, by dividing through the group's mean reward.",
    credit=MaximumLikelihoodReturn,
    credit_settings={"group_size": 8},
    loss_settings={**_CLIP, **_RATIO},
)


def _component_credit(group_size: int, component_weights: Mapping[str, float] | None) -> ComponentNormalizedReturn:
    return ComponentNormalizedReturn(group_size, dict(component_weights or {}))


def _normalized_loss(*, normalize_batch: bool = True, **settings: Any) -> Loss:
    loss = TokenClippedSurrogateLoss(**settings)
    return BatchNormalized(loss) if normalize_batch else loss


make_gdpo = replace(
    make_grpo,
    name="gdpo",
    doc="""GDPO (arXiv 2601.05242): GRPO for several rewards, each divided by its own deviation in the group before they are added.

    `normalize_batch`: the sums are centred and scaled over the batch, so that their size does not grow with the number of rewards.
    """,
    credit=_component_credit,
    credit_settings={"group_size": 8, "component_weights": None},
    loss=_normalized_loss,
    loss_settings={"normalize_batch": True, **_CLIP, **_RATIO},
    facts={"compares_components": True},
)

make_dapo = Preset(
    name="dapo",
    doc="""DAPO (arXiv 2503.14476): GRPO with a higher upper clip and a token mean, without groups of equal returns.

    Its dynamic sampling, fresh prompts in place of such groups, is in `ludic.batch_gen.sources.rollouts`.
    """,
    credit=partial(GroupNormalizedReturn, normalize_adv=True),
    credit_settings={"group_size": 8},
    loss=partial(TokenClippedSurrogateLoss, reduction="token_mean"),
    loss_settings={"clip_eps_low": 0.2, "clip_eps_high": 0.28},
    preprocess_settings={"filter_zvp": True, "zvp_filter_eps": 1e-6},
)

make_gigpo = replace(
    make_grpo,
    name="gigpo",
    doc="GiGPO (arXiv 2505.10978): episodes compared with their siblings, plus turns with turns taken in the same state.",
    credit=StateGroupReturn,
    credit_settings={"group_size": 8, "gamma": 0.95, "step_weight": 1.0, "state_of": observation_before},
    loss_settings={**_CLIP, "reduction": None},
)

make_proposer_solver = replace(
    make_grpo,
    name="proposer_solver",
    doc="One role invents tasks, others attempt them: attempts are compared within their task, proposals with each other.",
    credit=ProposerSolverReturn,
    credit_settings={"group_size": 8, "proposer": "proposer", "normalize_adv": True},
    loss_settings={**_CLIP, **_RATIO},
)


def _folded(group_size: int, **penalties: Any) -> FoldedReturn:
    return FoldedReturn(group_size, process=fold_penalties(**penalties))


make_fold_grpo = Preset(
    name="fold_grpo",
    doc="FoldGRPO (arXiv 2510.11967): branches get the advantage of the episode that started them, less penalties of single turns.",
    credit=_folded,
    credit_settings={"group_size": 8, "max_main_tokens": None, "unfolded": 1.0, "failed_call": 1.0},
    loss=TokenClippedSurrogateLoss,
    loss_settings={"clip_eps_low": 0.2, "clip_eps_high": 0.28, **_RATIO},
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


# --- GRPO's credit under other losses ---

make_gspo = replace(
    make_grpo,
    name="gspo",
    doc="GSPO (arXiv 2507.18071): GRPO's credit; one ratio per sample, clipped very close to 1.",
    loss=ClippedSurrogateLoss,
    loss_settings={
        "clip_eps_low": 3e-4,
        "clip_eps_high": 4e-4,
        "length_normalize": True,
        "ratio_clip": None,
        "reduction": "sample_mean",
    },
)

make_gmpo = replace(
    make_grpo,
    name="gmpo",
    doc="GMPO (arXiv 2507.20673): GRPO's credit; the geometric mean of token ratios, log ratios within ±0.4.",
    loss=GMPOLoss,
    loss_settings={
        "clip_eps_low": 0.4,
        "clip_eps_high": 0.4,
        "length_normalize": True,
        "ratio_clip": None,
        "reduction": "sample_mean",
    },
)


def _cispo_loss(*, kl_coeff: float, **settings: Any) -> Loss:
    """The loss, and a KL term to the policy that sampled, if asked for."""
    loss = CISPOLoss(**settings)
    kl = TokenKLLoss(coeff=kl_coeff)
    return CompositeLoss([LossTerm(name="policy", loss=loss), LossTerm(name="kl", loss=kl)]) if kl_coeff else loss


make_cispo = replace(
    make_grpo,
    name="cispo",
    doc="CISPO (MiniMax-M1, arXiv 2506.13585): GRPO's credit; REINFORCE with token ratios capped at 1.2.",
    loss=_cispo_loss,
    loss_settings={"clip_eps_low": 1e6, "clip_eps_high": 0.2, "length_normalize": True, "kl_coeff": 0.0},
    masked_when_old=True,
)

make_scalerl = Preset(
    name="scalerl",
    doc="ScaleRL (arXiv 2510.13786): CISPO with group-centred, batch-scaled returns, without groups of equal returns.",
    credit=HybridNormalizedReturn,
    credit_settings={"group_size": 8, "positive_only": False},
    loss=_cispo_loss,
    loss_settings={"clip_eps_low": 0.20, "clip_eps_high": 0.28, "length_normalize": True, "kl_coeff": 0.0},
    preprocess_settings={"filter_zvp": True, "zvp_filter_eps": 1e-6, **_DROP},
    masked_when_old=True,
)

make_sapo = replace(
    make_grpo,
    name="sapo",
    doc="SAPO (arXiv 2511.20347): GRPO's credit; a sigmoid in place of the clip.",
    loss=SAPOLoss,
    loss_settings={"tau_pos": 1.0, "tau_neg": 1.05, "length_normalize": False, "reduction": None},
    masked_when_old=True,
)


# --- REINFORCE ---

make_reinforce = Preset(
    name="reinforce",
    doc="REINFORCE: each turn is weighted by its return-to-go, discounted per turn.",
    credit=MonteCarloReturn,
    credit_settings={"gamma": 1.0},
    loss=ReinforceLoss,
    loss_settings={"reduction": None},
    preprocess_settings=_DROP,
)


def _baseline_loss(*, normalize_adv: bool, reduction: Reduction | str | None) -> ReinforceBaselineLoss:
    return ReinforceBaselineLoss(normalize=normalize_adv, reduction=reduction)


make_reinforce_baseline = Preset(
    name="reinforce_baseline",
    doc="REINFORCE with the batch's mean as a baseline.",
    credit=MonteCarloReturn,
    credit_settings={"gamma": 1.0},
    loss=_baseline_loss,
    loss_settings={"normalize_adv": False, "reduction": None},
    preprocess_settings=_DROP,
)


def _loss_near_reference(*, kl_coeff: float, **clip: Any) -> Loss:
    policy = _normalized_loss(reduction="token_mean", **clip)
    if not kl_coeff:
        return policy
    kl = TokenKLLoss(coeff=kl_coeff, to="reference", estimator="k2", reduction="token_mean")
    return CompositeLoss([LossTerm(name="policy", loss=policy), LossTerm(name="kl", loss=kl)])


make_reinforce_pp = Preset(
    name="reinforce_pp",
    doc="""REINFORCE++ (arXiv 2501.03262): returns centred and scaled by the batch, PPO's clip, a token mean; no groups.

    With `kl_coeff`, a KL to a frozen reference is added. It is k2: the same gradient as subtracting it from the reward.
    """,
    credit=MonteCarloReturn,
    credit_settings={"gamma": 1.0},
    loss=_loss_near_reference,
    loss_settings={**_CLIP, "kl_coeff": 0.0},
)

make_rloo = Preset(
    name="rloo",
    doc="RLOO (arXiv 2402.14740): REINFORCE on whole samples, each against the mean of the others in its group.",
    credit=LeaveOneOutReturn,
    credit_settings={"group_size": 4},
    loss=ReinforceLoss,
    loss_settings={"length_normalize": False, "reduction": None, "ratio_clip": 2.0},
    preprocess_settings=_DROP,
)


# --- preferences: no credit to assign, a frozen reference ---


def _without_temperature() -> Preprocess:
    return forget_temperature


make_dpo = Preset(
    name="dpo",
    doc="Direct preference optimisation: a logistic loss on the gap of a pair's implied rewards.",
    credit=ConstantCredit,
    credit_settings={},
    loss=partial(PreferencePairLoss, "dpo"),
    loss_settings={"beta": 0.1, "length_normalize": False},
    preprocess=_without_temperature,
)

make_ipo = Preset(
    name="ipo",
    doc="Identity preference optimisation: the gap is drawn to 1 / (2 β) and no further, so sure preferences do not run away.",
    credit=ConstantCredit,
    credit_settings={},
    loss=partial(PreferencePairLoss, "ipo"),
    loss_settings={"beta": 0.1, "length_normalize": False},
    preprocess=_without_temperature,
)

make_kto = Preset(
    name="kto",
    doc="Kahneman–Tversky optimisation: single samples, each wanted or not.",
    credit=ConstantCredit,
    credit_settings={},
    loss=KTOLoss,
    loss_settings={"beta": 0.1, "wanted": 1.0, "unwanted": 1.0, "length_normalize": False},
    preprocess=_without_temperature,
)


# --- a critic, or the prompt's own history ---

Over: TypeAlias = Literal["tokens", "turns"]


def make_ppo(
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    over: Over = "tokens",
    normalize_adv: bool = True,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    critic: CriticKind | str = CriticKind.SHARED,
    value_coeff: float = 0.5,
    value_clip_eps: float | None = 0.2,
    entropy_coeff: float = 0.0,
    behavior_cap: float | None = None,
    name: str = "ppo",
) -> RLAlgorithm:
    """PPO (arXiv 1707.06347): clipped surrogate and clipped value loss, both as token means.

    `gamma` and `lam` count what the estimate goes `over`.

    `behavior_cap` decouples the clip from the policy that sampled. The trainer makes the value head; the model of a "separate"
    critic is given to it: Trainer(critic=…).
    """
    if over not in get_args(Over):
        raise ConfigError(f"make_ppo(over={over!r}); there are {', '.join(get_args(Over))}.")
    if critic not in list(CriticKind):
        raise ConfigError(f"make_ppo(critic={critic!r}); there are {', '.join(CriticKind)}.")
    policy = TokenClippedSurrogateLoss(
        clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction=TOKEN_MEAN, behavior_cap=behavior_cap
    )
    terms = [
        LossTerm(name="policy", loss=policy),
        LossTerm(name="value", loss=ValueLoss(coeff=value_coeff, clip_eps=value_clip_eps)),
    ]
    if entropy_coeff:
        terms.append(LossTerm(name="entropy", loss=EntropyBonus(coeff=entropy_coeff)))
    rule = TokenGAE if over == "tokens" else TurnGAE
    return RLAlgorithm(
        name=name,
        credit_assigner=PerStepReward(),
        loss=CompositeLoss(terms),
        advantages=rule(gamma=gamma, lam=lam, normalize=normalize_adv),
        critic=CriticKind(critic),
        preprocess=checked(),
    )


def make_spo(
    *,
    tracker: BetaValueTracker | None = None,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    name: str = "spo",
) -> tuple[RLAlgorithm, BetaValueTracker]:
    """Reward minus the prompt's tracked value, centred and scaled by the batch; token mean. Returns the tracker too."""
    tracker = tracker if tracker is not None else BetaValueTracker()
    loss = TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction="token_mean")
    rule = TrackedValueReturn(tracker)
    return RLAlgorithm(name=name, credit_assigner=rule, loss=BatchNormalized(loss), preprocess=checked()), tracker


def spo_algorithm(
    *,
    d_half: float = 0.1,
    rho_min: float = 0.875,
    rho_max: float = 0.96,
    low: float = 0.0,
    high: float = 1.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    name: str = "spo",
) -> RLAlgorithm:
    """`make_spo` from plain settings, for the registry; the tracker is `credit_assigner.tracker`."""
    tracker = BetaValueTracker(d_half=d_half, rho_min=rho_min, rho_max=rho_max, low=low, high=high)
    return make_spo(tracker=tracker, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, name=name)[0]
