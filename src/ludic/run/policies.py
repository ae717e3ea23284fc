"""Several policies, resolved: the settings of each as a run with it alone, and who plays which role. Nothing is loaded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

from ludic.run.config.entries import POLICIES, PolicyEntry
from ludic.run.config.run_config import RunConfig
from ludic.run.features.core import pair_problems
from ludic.run.given import EnvFactory, Parts
from ludic.run.parts.samples import eval_samples, first_env, train_samples
from ludic.run.protocols.agents import uses_gateway
from ludic.run.resolve import NamedPolicy, ResolvedRun, default_name, resolve, with_entry
from ludic.run.settings import refuse, with_values
from ludic.types import ConfigError

MIN_KEPT = 2
"""Checkpoints that a policy keeps at least: a run that is killed between two policies' saves is resumed from the one before."""


def resolve_run(config: RunConfig, env: EnvFactory, parts: Parts | None = None) -> ResolvedRun:
    """The run with all its defaults, of several policies each; ConfigError for features that exclude each other."""
    parts = parts or Parts()
    refuse(pair_problems(config, parts))
    if not config.policies:
        return resolve(config, env, parts)
    name = config.run.name or default_name(config)
    alone = replace(config, policies={}, run=replace(config.run, name=name))
    # Groups are played once for all policies, so they have one size: that of an algorithm that compares siblings.
    trained = [entry for entry in config.policies.values() if not entry.frozen]
    size = max(resolve(_config_of(alone, entry), env, parts).group_size for entry in trained)
    alone = with_values(alone, {"group_size": size})
    policies = tuple(_named_policy(alone, policy, entry, env, parts) for policy, entry in config.policies.items())
    whole = resolve(alone, env, parts)
    filled = {
        **config.train.limits,
        "name": name,
        "group_size": size,
        "max_lag": 0,
        "correction": whole.config.algo.correction,
    }
    whole = replace(whole, config=with_values(config, filled), policies=policies)
    whole = replace(whole, seatings=seatings(first_env(whole).agent_ids, config.policies, config.env.id))
    refuse(_seat_problems(whole))
    return whole


def _seat_problems(run: ResolvedRun) -> Iterator[str]:
    """An update or an evaluation with too few episodes for every policy to have its turn."""
    learning, config = run.trained_names, run.config
    ways = league_seatings(run) if config.league.league_every else run.seatings
    seats_all = all(set(learning) <= set(seats.values()) for seats in ways)
    samples = train_samples(run)
    num_groups = run.num_groups if samples is None else min(run.num_groups, len(samples))  # a task has one seating
    if not seats_all and num_groups < len(learning):
        yield (
            f"An update has groups of {num_groups} tasks, but {len(learning)} policies learn, {', '.join(learning)}, and not every "
            f"group has a seat for each of them. Give at least {len(learning)} tasks, and --rollouts-per-update "
            f"{len(learning) * run.group_size} or more."
        )
    samples = eval_samples(run) if config.is_evaluated else None
    num_tasks = config.eval.eval_episodes if samples is None else min(config.eval.eval_episodes, len(samples))
    if config.is_evaluated and num_tasks < len(run.seatings):
        yield (
            f"An evaluation has {num_tasks} tasks, but there are {len(run.seatings)} seatings of the policies, which take turns; "
            f"some would not be evaluated. Raise --eval-episodes to a multiple of {len(run.seatings)}."
        )


def _named_policy(alone: RunConfig, name: str, entry: PolicyEntry, env: EnvFactory, parts: Parts) -> NamedPolicy:
    own = _config_of(alone, entry, name=f"{alone.run.name}/{POLICIES}/{name}")
    run = resolve(own, env, parts)
    if uses_gateway(run.config.agent, parts):
        raise ConfigError(
            f"The agent of [policies.{name}] is a function or a command, which plays envs with one role. Take an agent of "
            "ludic.agents."
        )
    kept = run.checkpoint.max_to_keep
    checkpoint = replace(run.checkpoint, max_to_keep=None if kept is None else max(kept, MIN_KEPT))
    return NamedPolicy(name=name, run=replace(run, checkpoint=checkpoint), is_frozen=entry.frozen)


def _config_of(config: RunConfig, entry: PolicyEntry, **values: Any) -> RunConfig:
    if entry.frozen and entry.lora_rank is None:  # [model] has that of those that learn
        values |= {"lora_rank": 0, "lora_experts": False}
    return with_entry(config, entry, **values)


def seatings(roles: Sequence[str], policies: Mapping[str, PolicyEntry], env: str) -> tuple[Mapping[str, str], ...]:
    """All ways to give each role to a policy that plays it, with as many different policies as possible at one table."""
    shown = ", ".join(roles)
    refuse([f"Several policies are for envs with several roles; {env!r} has one, {shown}."] if len(roles) < 2 else [])
    refuse(
        f"[policies.{name}] plays {', '.join(unknown)}, but {env!r} has the roles {shown}."
        for name, entry in policies.items()
        if (unknown := [role for role in entry.roles if role not in roles])
    )
    players = {role: [name for name, entry in policies.items() if role in (entry.roles or roles)] for role in roles}
    refuse(
        f"No policy plays {role}: the roles of {env!r} are {shown}. Add it to the roles of a policy, or add a policy; one with "
        "frozen = true is not trained."
        for role, names in players.items()
        if not names
    )
    ways = [dict(zip(roles, names, strict=True)) for names in product(*players.values())]
    most = max(len(set(way.values())) for way in ways)
    found = [way for way in ways if len(set(way.values())) == most]
    seated = {name for way in found for name in way.values()}
    refuse(
        f"The policy {name} would never play. Give it other roles, or leave it out."
        for name in policies
        if name not in seated
    )
    return tuple(found)


def past(policy: str) -> str:
    """Name of the league of a policy's snapshots; the names of policies have no spaces."""
    return f"past {policy}"


def league_seatings(run: ResolvedRun) -> list[Mapping[str, str]]:
    """The seatings, and in the league's share of the groups one role with its policy and the others with snapshots of theirs."""
    learning = run.trained_names
    against = [
        {role: name if role == own or name not in learning else past(name) for role, name in seats.items()}
        for seats in run.seatings
        for own, policy in seats.items()
        if policy in learning and any(name in learning for role, name in seats.items() if role != own)
    ]
    if not against:
        raise ConfigError(
            f"league_every takes snapshots of {', '.join(learning)}, but no policy that learns plays against one. Leave [league] "
            "out, or let another policy learn."
        )
    share = Fraction(run.config.league.league_share).limit_denominator(100)
    alone = [*run.seatings] * (len(against) * (share.denominator - share.numerator))
    return [*alone, *against * (len(run.seatings) * share.numerator)]
