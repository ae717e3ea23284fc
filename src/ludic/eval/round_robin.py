"""Everybody against everybody, in both seats: the games that ratings are made of."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations

from ludic.batch_gen.seated_requests import seated
from ludic.eval.elo import Match
from ludic.types import ConfigError, Rollout, RolloutRequest, derive_seed


def round_robin(
    template: RolloutRequest, players: Sequence[str], seats: tuple[str, str], *, num_games: int, seed: int = 0
) -> list[RolloutRequest]:
    """`num_games` requests for every pair in each of the two ways to seat it, so that whoever moves first gains nothing.

    `template` says which env and protocol (one of `Policies`); players are policies, such as the members of a league.
    """
    if len(set(players)) < 2 or len(set(players)) != len(players):
        raise ConfigError(f"round_robin was given the players {list(players)}; it needs two or more, each once.")
    if num_games < 1:
        raise ConfigError(f"round_robin(num_games={num_games}); a pair plays at least one game.")
    pairs = [pair for pair in permutations(players, 2) for _ in range(num_games)]
    return [
        replace(
            seated(template, dict(zip(seats, pair, strict=True))),
            env_seed=derive_seed(seed, 0, number),
            sampling_seed=derive_seed(seed, 1, number),
            num_episodes=1,
        )
        for number, pair in enumerate(pairs)
    ]


def matches_of(rollouts: Iterable[Rollout], seats: tuple[str, str]) -> list[Match]:
    """One match per episode of two: whoever earned more has won. Failed episodes are left out.

    A player who never came to move has no rollout, and earned nothing.
    """
    failed = set()
    earned: dict[str, dict[str, float]] = {}
    names: dict[str, tuple[str, str]] = {}
    for rollout in rollouts:
        if "policies" not in rollout.meta:
            raise ConfigError(
                f"Rollout {rollout.id} does not say who played. Take requests from round_robin or seated."
            )
        episode = rollout.meta["engine"]["episode_run"]
        names[episode] = rollout.meta["policies"][seats[0]], rollout.meta["policies"][seats[1]]
        earned.setdefault(episode, {})[rollout.meta.get("agent_id", "")] = rollout.total_reward
        if rollout.failure is not None:
            failed.add(episode)
    return [
        Match(*names[episode], _score(earned[episode].get(seats[0], 0.0), earned[episode].get(seats[1], 0.0)))
        for episode in names
        if episode not in failed
    ]


def _score(own: float, other: float) -> float:
    return 0.5 if own == other else float(own > other)
