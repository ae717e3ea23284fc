"""Elo ratings with confidence intervals, from the results of games.

The ratings are the maximum-likelihood fit of the Bradley-Terry model (1952): a player's expected score against another is
1 / (1 + 10^((theirs − own) / 400)), a draw counts half a point. All games count equally, so their order does not matter; online
Elo, which chess uses because players change, depends on the order.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import numpy.typing as npt

from ludic.batch_gen.requests.groups import assign_roles
from ludic.eval.statistics import Z95
from ludic.types import ConfigError, Rollout, RolloutRequest, derive_seed

Floats = npt.NDArray[np.float64]
SCALE = 400.0 / math.log(10.0)
"""Elo points per unit of log-odds."""
_MAX_ITERATIONS = 200
_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Match:
    """One game."""

    first: str
    second: str
    score: float
    """Score of the first player: 1 for a win, ½ for a draw, 0 for a loss."""

    def __post_init__(self) -> None:
        if self.first == self.second:
            raise ConfigError(f"A match of {self.first!r} against itself says nothing about its rating.")
        if self.score not in (0.0, 0.5, 1.0):
            raise ConfigError(f"Match.score={self.score}; it is 1 (won), 0.5 (drawn) or 0 (lost).")


@dataclass(frozen=True, slots=True)
class Rating:
    """Rating of one player."""

    player: str
    elo: float
    low: float
    """95 % confidence interval of the difference to the anchor, whose rating is fixed."""
    high: float
    num_games: int
    score: float
    """Points per game."""


# Letters: P players. points_PP[i, j] is the score of i against j, games_PP[i, j] the number of their games.
def fit_elo(
    matches: Iterable[Match], *, anchor: str, anchor_elo: float = 1000.0, prior_draws: float = 0.0
) -> list[Rating]:
    """Maximum-likelihood ratings, best first, with `anchor` at `anchor_elo`.

    They exist only if no player, alone or as a group, won every game against all others (or lost every one); else this is a
    ConfigError, unless `prior_draws` imagined draws between any two who met keep ratings finite. They pull all ratings together,
    the more the fewer real games a pair has. Intervals come from the curvature of the likelihood (Fisher), of real games
    alone. A draw varies less than the win or loss it is counted as, so they are too wide rather than too narrow.
    """
    if not 0 <= prior_draws < math.inf:
        raise ConfigError(f"fit_elo(prior_draws={prior_draws}); it is a number of games, 0 or more.")
    games = list(matches)
    players = sorted({name for match in games for name in (match.first, match.second)})
    if anchor not in players:
        raise ConfigError(f"The anchor {anchor!r} has played no match; players are {players}.")
    points_PP, games_PP = _count(games, players)
    imagined_PP = prior_draws * (games_PP > 0)
    _require_finite(players, points_PP + imagined_PP / 2, games_PP)
    free = np.arange(len(players)) != players.index(anchor)
    strength_P = _likeliest(points_PP + imagined_PP / 2, games_PP + imagined_PP, free)
    margin_P = np.zeros(len(players))
    information = _information(_expected(strength_P), games_PP)[np.ix_(free, free)]
    margin_P[free] = Z95 * SCALE * np.sqrt(np.diag(np.linalg.inv(information)))
    elo_P, num_games_P = anchor_elo + SCALE * strength_P, games_PP.sum(axis=1)
    columns = elo_P, elo_P - margin_P, elo_P + margin_P, num_games_P, points_PP.sum(axis=1) / num_games_P
    rows = zip(players, *(column.tolist() for column in columns), strict=True)
    ratings = [Rating(name, elo, low, high, int(num_games), score) for name, elo, low, high, num_games, score in rows]
    return sorted(ratings, key=lambda rating: (-rating.elo, rating.player))


def elo_table(ratings: Sequence[Rating]) -> str:
    """The ratings as a text table."""
    width = max(len(name) for name in ("player", *(rating.player for rating in ratings)))
    rows = [f"{'player':{width}}    elo   95 % interval   games  score"]
    rows += [
        f"{r.player:{width}}  {r.elo:5.0f}  [{r.low:5.0f}, {r.high:5.0f}]  {r.num_games:5d}  {r.score:.3f}"
        for r in ratings
    ]
    return "\n".join(rows)


def _count(matches: Sequence[Match], players: Sequence[str]) -> tuple[Floats, Floats]:
    index = {name: number for number, name in enumerate(players)}
    points_PP, games_PP = np.zeros((len(players), len(players))), np.zeros((len(players), len(players)))
    for match in matches:
        i, j = index[match.first], index[match.second]
        points_PP[i, j] += match.score
        points_PP[j, i] += 1.0 - match.score
        games_PP[[i, j], [j, i]] += 1
    return points_PP, games_PP


def _expected(strength_P: Floats) -> Floats:
    """Expected score of each player against each."""
    return 1.0 / (1.0 + np.exp(strength_P[None, :] - strength_P[:, None]))


def _likeliest(points_PP: Floats, games_PP: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """Newton's method on a concave function; a step that lowers the likelihood is halved."""
    strength_P = np.zeros(len(points_PP))
    best = _log_likelihood(points_PP, strength_P)
    for _ in range(_MAX_ITERATIONS):
        expected_PP = _expected(strength_P)
        slope_P = (points_PP - games_PP * expected_PP).sum(axis=1)
        step_P = np.zeros_like(strength_P)
        step_P[free] = np.linalg.solve(_information(expected_PP, games_PP)[np.ix_(free, free)], slope_P[free])
        while _log_likelihood(points_PP, strength_P + step_P) < best - _TOLERANCE * abs(best):
            step_P /= 2
        strength_P = strength_P + step_P
        best = _log_likelihood(points_PP, strength_P)
        if np.abs(step_P).max() < _TOLERANCE:
            break
    return strength_P


def _log_likelihood(points_PP: Floats, strength_P: Floats) -> float:
    return -float((points_PP * np.logaddexp(0.0, strength_P[None, :] - strength_P[:, None])).sum())


def _information(expected_PP: Floats, games_PP: Floats) -> Floats:
    """Fisher information about the strengths."""
    weight_PP = games_PP * expected_PP * expected_PP.T
    information: Floats = np.diag(weight_PP.sum(axis=1)) - weight_PP
    return information


def _require_finite(players: Sequence[str], points_PP: Floats, games_PP: Floats) -> None:
    """Raise ConfigError unless each player has scored against each other, directly or through others (Ford, 1957)."""
    if not _reaches(games_PP > 0).all():
        raise ConfigError(
            f"The players {players} are not connected by games, directly or through others; they cannot be rated together."
        )
    reaches_PP = _reaches(points_PP > 0)
    if reaches_PP.all():
        return
    i, j = map(int, np.argwhere(~reaches_PP)[0])
    raise ConfigError(
        f"{players[i]!r} has not scored against {players[j]!r}, directly or through others: their difference is unbounded. Run "
        "more games, or use fit_elo(prior_draws=1)."
    )


def _reaches(edges_PP: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Reflexive transitive closure of the graph."""
    reached = edges_PP | np.eye(len(edges_PP), dtype=np.bool_)
    for _ in range(len(edges_PP)):
        reached = reached | ((reached.astype(np.int64) @ reached.astype(np.int64)) > 0)
    return reached


def round_robin(
    template: RolloutRequest, players: Sequence[str], seats: tuple[str, str], *, num_games: int, seed: int = 0
) -> list[RolloutRequest]:
    """`num_games` requests for every pair in both role assignments, so that moving first gives no advantage.

    `template` names the env and the protocol (one of `Policies`); players are policies, such as the members of a league;
    `seats` are the two agent ids.
    """
    if len(set(players)) < 2 or len(set(players)) != len(players):
        raise ConfigError(f"round_robin was given the players {list(players)}; it needs two or more, each once.")
    if num_games < 1:
        raise ConfigError(f"round_robin(num_games={num_games}); a pair plays at least one game.")
    pairs = [pair for pair in permutations(players, 2) for _ in range(num_games)]
    return [
        replace(
            assign_roles(template, dict(zip(seats, pair, strict=True))),
            env_seed=derive_seed(seed, 0, number),
            sampling_seed=derive_seed(seed, 1, number),
            num_episodes=1,
        )
        for number, pair in enumerate(pairs)
    ]


def matches_of(rollouts: Iterable[Rollout], seats: tuple[str, str]) -> list[Match]:
    """One match per two-player episode; the player with the higher reward wins. Failed episodes are skipped.

    A player that never moved has no rollout and counts as reward 0.
    """
    failed = set()
    earned: dict[str, dict[str, float]] = {}
    names: dict[str, list[str]] = {}
    for rollout in (rollout for rollout in rollouts if not rollout.is_thread):
        if "policies" not in rollout.meta:
            raise ConfigError(
                f"Rollout {rollout.id} does not name its policies. Take requests from round_robin or assign_roles."
            )
        episode = rollout.engine_facts["episode_run"]
        names[episode] = [rollout.meta["policies"][seat] for seat in seats]
        earned.setdefault(episode, {})[rollout.agent_id or ""] = rollout.total_reward
        if rollout.failure is not None:
            failed.add(episode)
    matches = []
    for episode, (first, second) in names.items():
        own, other = (earned[episode].get(seat, 0.0) for seat in seats)
        if episode not in failed:
            matches.append(Match(first, second, 0.5 if own == other else float(own > other)))
    return matches
