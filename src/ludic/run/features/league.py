"""Leagues: frozen snapshots of the policy as opponents, in envs with several players (section [league])."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from ludic.agents import Agent
from ludic.inference import ChatTemplate
from ludic.interaction import Policies
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Feature, because
from ludic.run.given import Parts
from ludic.run.parts.episodes import EpisodeSetup
from ludic.run.parts.samples import first_env
from ludic.run.protocols.agents import agent_factory
from ludic.run.resolve import ResolvedRun
from ludic.types import ChatClient, ConfigError

if TYPE_CHECKING:
    from ludic.inference.local import LocalEngine
    from ludic.inference.local.snapshot import League

CURRENT, _LEAGUE = "policy", "league"
_MEMBER_SEQUENCES = 64
"""Sequences of full length that fit a member's cache."""


class HasLeague(Feature):
    """Some groups are played against a snapshot."""

    name = "league_every"
    excludes = (
        because("the policy and its snapshots are seated by their own protocol. Leave one out.", "protocol")
        | because("opponents are drawn for new tasks, and with a curriculum a task comes again.", "curriculum")
        | because(
            "such an agent plays envs with one role.",
            "reward= of an agent behind the gateway", "policies= of an agent behind the gateway",
        )
    )  # fmt: skip
    needs = because("it needs an engine that can keep copies of the weights.", "engine = 'local'")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.league.league_every)

    def check(self, run: ResolvedRun) -> None:
        _roles(run)

    def says(self, run: ResolvedRun) -> list[str]:
        league = run.config.league
        if run.policies:
            return [
                f"In {league.league_share:.0%} of the groups one role has its policy, and the others have one of the last "
                f"{league.league_size} snapshots of theirs, taken every {league.league_every} updates."
            ]
        return [
            f"{league.league_share:.0%} of the groups are played against one of the last {league.league_size} snapshots of the "
            f"policy, taken every {league.league_every} updates."
        ]


def make_league(run: ResolvedRun, engine: LocalEngine) -> League | None:
    """Snapshots of the engine's weights, if the settings ask for a league."""
    from ludic.inference.local.snapshot import League

    settings = run.config.league
    if not settings.league_every:
        return None
    kv_tokens = _MEMBER_SEQUENCES * run.trainer.max_seq_len
    return League(engine, every=settings.league_every, max_size=settings.league_size, kv_tokens=kv_tokens)


def with_league(run: ResolvedRun, setup: EpisodeSetup, league: League, template: ChatTemplate) -> EpisodeSetup:
    """The setup, whose requests may seat members of the league."""

    def make_agent(client: ChatClient, name: str) -> Agent:
        return agent_factory(run.config.agent, template, name, run.parts)(client)

    return replace(setup, policies=Policies({CURRENT: setup.client, _LEAGUE: league}, make_agent))


def one_policy_seatings(run: ResolvedRun) -> list[dict[str, str]]:
    """In the league's share of the groups the policy has one role, in turn, and a member has the others; in the rest it has all."""
    roles = _roles(run)
    share = Fraction(run.config.league.league_share).limit_denominator(100)
    against = [{role: CURRENT if role == own else _LEAGUE for role in roles} for own in roles]
    alone = [dict.fromkeys(roles, CURRENT)] * len(roles)
    return against * share.numerator + alone * (share.denominator - share.numerator)


def _roles(run: ResolvedRun) -> tuple[str, ...]:
    roles = tuple(first_env(run).agent_ids)
    if len(roles) < 2:
        raise ConfigError(
            f"league_every is for envs with several players; {run.config.env.id!r} has one. Leave [league] out."
        )
    return roles
