"""Algorithms: the one of the settings or the given one, with corrections, regularisers and mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ludic import registry
from ludic.run.config.entries import RecordedEntry
from ludic.run.config.training import AlgoSettings
from ludic.run.protocols.agents import uses_gateway
from ludic.run.protocols.factory import delegates_tasks
from ludic.run.resolve import ResolvedRun, open_reduction
from ludic.run.settings import require_kind
from ludic.types import ConfigError

if TYPE_CHECKING:
    from ludic.training import RLAlgorithm


PLAYED = "played"
"""Objective of the samples that the run plays, where there are recorded ones as well."""


def make_algorithm(run: ResolvedRun) -> RLAlgorithm:
    """The algorithm for played episodes, of one env or several, and for recorded ones among them."""
    from ludic.training.algorithms import Objective, mix_objectives

    objectives = {}
    if run.has_own_algorithms:  # weighted as if the samples of all envs were one batch
        objectives = {env.name: Objective(algorithm=_played_algorithm(env.run), weight=env.share) for env in run.envs}
    elif run.config.recorded:
        objectives = {PLAYED: Objective(algorithm=_played_algorithm(run.each[0]))}
    if not objectives:
        return _played_algorithm(run.each[0])
    for entry in run.config.recorded:
        objectives[entry.name] = Objective(algorithm=recorded_algorithm(entry), weight=entry.weight)
    return mix_objectives(objectives, default=PLAYED if PLAYED in objectives else None)


def recorded_algorithm(entry: RecordedEntry) -> RLAlgorithm:
    reduction = open_reduction(AlgoSettings(algo=entry.algo, algo_set=entry.algo_set))
    arguments = entry.algo_set if reduction is None else {**entry.algo_set, "reduction": reduction}
    made: RLAlgorithm = registry.algorithms.make(entry.algo, **arguments)
    return made


def _played_algorithm(run: ResolvedRun) -> RLAlgorithm:
    """The given or named algorithm, with the group size if it takes one, reduction, regularisers, a given loss. For agents behind
    the gateway its credit is that of whole episodes."""
    from ludic.training.algorithms import RLAlgorithm, settings_of, with_episode_credit

    config, given = run.config.algo, run.parts.algorithm
    if given is None:
        arguments = dict(config.algo_set)
        if "group_size" in settings_of(registry.algorithms.spec(config.algo).load()):
            arguments.setdefault("group_size", run.group_size)
        if config.reduction is not None:
            arguments["reduction"] = config.reduction
        if config.train_on:
            arguments["train_on"] = _trained_roles(config)
        given = registry.algorithms.make(config.algo, **arguments)
    hint = f". Call it: algo={given.__name__}(…)" if callable(given) and hasattr(given, "__name__") else ""
    require_kind(given, RLAlgorithm, f"algo = {config.algo!r}", f"return an RLAlgorithm, as make_grpo() does{hint}")
    if uses_gateway(run.config.agent, run.parts):
        given = with_episode_credit(given)  # a session with several threads counts once
    _check_sub_agents(given, run)
    given = given if run.parts.loss is None else replace(given, loss=run.parts.loss)
    return _regularised(_corrected(given, config), config)


def _check_sub_agents(algorithm: RLAlgorithm, run: ResolvedRun) -> None:
    """ConfigError if the rollouts of sub-agents would be compared in groups, which have no fixed size."""
    from ludic.training.credit_assignment import FoldedReturn
    from ludic.training.credit_assignment.grouping import GroupRule

    named, rule = run.config.agent.protocol, algorithm.credit_assigner
    if named is None or run.parts.protocol is not None or not delegates_tasks(registry.protocols.spec(named).load()):
        return
    if isinstance(rule, GroupRule) and not isinstance(rule, FoldedReturn) and not rule.allow_partial:
        raise ConfigError(
            f"protocol = {named!r} adds rollouts of sub-agents, which algo = {run.config.algo.algo!r} would compare in groups of "
            f"{rule.group_size}, but their number differs. Take fold_grpo, which credits them as their parent."
        )


def _trained_roles(settings: AlgoSettings) -> tuple[str, ...]:
    """`train_on` for an algorithm that takes it; commas may stand between roles."""
    from ludic.training.algorithms import settings_of

    if "train_on" not in settings_of(registry.algorithms.spec(settings.algo).load()):
        raise ConfigError(
            f"train_on = {list(settings.train_on)}, but {settings.algo} learns from sampled tokens alone. Take sft or rft, which "
            "imitate texts, or echo, which also predicts the answers to its replies."
        )
    return tuple(role for part in settings.train_on for role in part.split(",") if role)


def _corrected(algorithm: RLAlgorithm, settings: AlgoSettings) -> RLAlgorithm:
    """The algorithm with its loss inside the corrections that the settings name."""
    from ludic.training.losses.corrections import CorrectedLoss, make_correction

    corrections = [make_correction(text) for text in settings.correction]
    again = [c for c, text in zip(corrections, settings.correction, strict=True) if "mask" not in text]
    if again and algorithm.loss.needs.old_logps:
        raise ConfigError(
            f"correction = {', '.join(settings.correction)}: the loss of {algorithm.name} has ratios itself, and a truncation or "
            "rejection would count them twice. Take masks."
        )
    return replace(algorithm, loss=CorrectedLoss(algorithm.loss, corrections)) if corrections else algorithm


def _regularised(algorithm: RLAlgorithm, settings: AlgoSettings) -> RLAlgorithm:
    """The algorithm with an entropy bonus and a KL to the frozen reference, where the settings ask for them."""
    from ludic.training.losses import EntropyBonus, Loss, Regularized, TokenKLLoss

    terms: dict[str, Loss] = {}
    if settings.kl_coeff:
        terms["reference"] = TokenKLLoss(
            coeff=settings.kl_coeff,
            to="reference",
            estimator=settings.kl_estimator,
            reduction="token_mean",
            importance_weighted=settings.kl_weighted,
        )
    if settings.entropy_bonus:
        terms["bonus"] = EntropyBonus(coeff=settings.entropy_bonus)
    return replace(algorithm, loss=Regularized(algorithm.loss, terms)) if terms else algorithm
