"""Ratings against closed forms and another computation; tournaments of all pairs in both role assignments."""

import asyncio
import math
import random
from collections import Counter

import numpy as np
import pytest

from ludic.batch_gen import RolloutEngine, assign_roles
from ludic.eval import Match, elo_table, fit_elo, matches_of, round_robin
from ludic.eval.ratings import SCALE
from ludic.inference import ScriptedClient
from ludic.interaction import Policies
from ludic.types import ConfigError, EnvSpec, ProtocolSpec, RolloutRequest
from tests.fakes import make_agent

SEATS = ("X", "O")
GAME = RolloutRequest(env=EnvSpec("tic_tac_toe_duel"), protocol=ProtocolSpec("duel"))


def games(first: str, second: str, *, won: int = 0, drawn: int = 0, lost: int = 0) -> list[Match]:
    return [Match(first, second, 1.0)] * won + [Match(first, second, 0.5)] * drawn + [Match(first, second, 0.0)] * lost


def by_name(ratings) -> dict:
    return {rating.player: rating for rating in ratings}


@pytest.mark.parametrize(("won", "drawn", "lost"), [(7, 2, 1), (1, 0, 9), (0, 5, 0), (30, 1, 1)])
def test_the_difference_of_two_players_is_the_log_odds_of_their_score(won, drawn, lost):
    found = by_name(fit_elo(games("a", "b", won=won, drawn=drawn, lost=lost), anchor="b", anchor_elo=1500))
    num_games = won + drawn + lost
    share = (won + drawn / 2) / num_games
    assert found["a"].elo == pytest.approx(1500 + 400 * math.log10(share / (1 - share)), abs=1e-8)
    margin = 1.959963984540054 * 400 / math.log(10) / math.sqrt(num_games * share * (1 - share))
    assert found["a"].high - found["a"].elo == pytest.approx(margin, rel=1e-9)
    assert found["a"].elo - found["a"].low == pytest.approx(margin, rel=1e-9)
    assert (found["b"].elo, found["b"].low, found["b"].high) == (1500, 1500, 1500)
    assert (found["a"].num_games, found["a"].score) == (num_games, pytest.approx(share))


def test_results_that_agree_with_strengths_of_1_2_and_4_give_these_strengths():
    matches = [
        *games("two", "one", won=2, lost=1),  # 2 / (2 + 1)
        *games("four", "two", won=4, lost=2),  # 4 / (4 + 2)
        *games("four", "one", won=4, lost=1),  # 4 / (4 + 1)
    ]
    found = by_name(fit_elo(matches, anchor="one", anchor_elo=0))
    assert found["two"].elo == pytest.approx(400 * math.log10(2), abs=1e-8)
    assert found["four"].elo == pytest.approx(400 * math.log10(4), abs=1e-8)


def random_results(seed: int, num_players: int = 5, num_games: int = 400) -> list[Match]:
    dice = random.Random(seed)
    strength = {f"p{i}": dice.gauss(0, 1) for i in range(num_players)}
    found = []
    for _ in range(num_games):
        a, b = dice.sample(sorted(strength), 2)
        chance = 1 / (1 + math.exp(strength[b] - strength[a]))
        found.append(Match(a, b, dice.choices((1.0, 0.5, 0.0), (0.8 * chance, 0.2, 0.8 * (1 - chance)))[0]))
    return found


def zermelo(matches: list[Match], anchor: str) -> dict[str, float]:
    """Zermelo's iteration (1929) for the same ratings: strength = points / sum of 1 / (own + other) over games."""
    players = sorted({name for match in matches for name in (match.first, match.second)})
    strength = dict.fromkeys(players, 1.0)
    for _ in range(5000):
        points, load = dict.fromkeys(players, 0.0), dict.fromkeys(players, 0.0)
        for match in matches:
            points[match.first] += match.score
            points[match.second] += 1 - match.score
            share = 1 / (strength[match.first] + strength[match.second])
            load[match.first] += share
            load[match.second] += share
        strength = {name: points[name] / load[name] for name in players}
    return {name: SCALE * math.log(strength[name] / strength[anchor]) for name in players}


def test_the_ratings_are_those_of_zermelos_iteration():
    matches = random_results(3)
    found = by_name(fit_elo(matches, anchor="p0", anchor_elo=0))
    for name, elo in zermelo(matches, "p0").items():
        assert found[name].elo == pytest.approx(elo, abs=1e-6)


def test_the_intervals_are_the_curvature_of_the_likelihood():
    matches = random_results(4, num_players=3, num_games=60)
    found = by_name(fit_elo(matches, anchor="p0", anchor_elo=0))

    def log_likelihood(p1: float, p2: float) -> float:
        elo = {"p0": 0.0, "p1": p1, "p2": p2}
        total = 0.0
        for match in matches:
            chance = 1 / (1 + 10 ** ((elo[match.second] - elo[match.first]) / 400))
            total += match.score * math.log(chance) + (1 - match.score) * math.log(1 - chance)
        return total

    top, h = np.array([found["p1"].elo, found["p2"].elo]), 1.0
    curvature = np.zeros((2, 2))
    for i in range(2):
        for j in range(2):
            up, right = np.eye(2)[i] * h, np.eye(2)[j] * h
            f = log_likelihood
            curvature[i, j] = (
                f(*(top + up + right)) - f(*(top + up - right)) - f(*(top - up + right)) + f(*(top - up - right))
            ) / (4 * h * h)
    errors = np.sqrt(np.diag(np.linalg.inv(-curvature)))
    for name, error in zip(("p1", "p2"), errors, strict=True):
        assert found[name].high - found[name].elo == pytest.approx(1.959963984540054 * error, rel=1e-3)


def test_ratings_do_not_depend_on_the_order_of_games():
    matches = random_results(5)
    shuffled = list(matches)
    random.Random(0).shuffle(shuffled)
    turned = [Match(match.second, match.first, 1 - match.score) for match in shuffled]
    assert fit_elo(matches, anchor="p1") == fit_elo(shuffled, anchor="p1") == fit_elo(turned, anchor="p1")


def test_another_anchor_shifts_all_ratings_equally():
    matches = random_results(6)
    one, other = (by_name(fit_elo(matches, anchor=name)) for name in ("p0", "p3"))
    shifts = [one[name].elo - other[name].elo for name in one]
    assert shifts == pytest.approx([shifts[0]] * len(shifts), abs=1e-8)


def test_infinite_differences_are_refused_without_prior_draws():
    unbeaten = games("a", "b", won=5) + games("b", "c", won=1, lost=1) + games("a", "c", won=5)
    with pytest.raises(ConfigError, match=r"'b' has not scored against 'a'.*prior_draws=1"):
        fit_elo(unbeaten, anchor="b")
    found = by_name(fit_elo(unbeaten, anchor="b", prior_draws=1))
    assert math.isfinite(found["a"].elo) and found["a"].elo > found["b"].elo
    assert found["a"].num_games == 10  # imagined games are not counted


def test_players_who_never_met_are_not_compared():
    with pytest.raises(ConfigError, match="not connected by games"):
        fit_elo(games("a", "b", won=1, lost=1) + games("c", "d", won=1, lost=1), anchor="a", prior_draws=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Match("a", "a", 1.0), "against itself"),
        (lambda: Match("a", "b", 0.7), "won"),
        (lambda: fit_elo(games("a", "b", won=1, lost=1), anchor="c"), "has played no match"),
        (lambda: fit_elo([], anchor="c"), "has played no match"),
        (lambda: fit_elo(games("a", "b", won=1, lost=1), anchor="a", prior_draws=-1), "0 or more"),
    ],
)
def test_invalid_matches_and_anchors_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_table_has_the_best_first():
    lines = elo_table(fit_elo(games("a", "b", won=1, drawn=1, lost=3), anchor="a")).splitlines()
    assert lines == [
        "player    elo   95 % interval   games  score",
        "b        1147  [  815,  1479]      5  0.700",
        "a        1000  [ 1000,  1000]      5  0.300",
    ]


def test_an_empty_table_is_its_heading():
    assert elo_table([]) == "player    elo   95 % interval   games  score"


# --- round robin ---


def first_free(request) -> str:
    """The board says which cells are free."""
    text = bytes(i for i in request.prompt_token_ids.tolist() if i < 256).decode()
    return f"<a>{text.rsplit('Free moves: ', 1)[1][:2]}</a>"


def play(requests, **players: ScriptedClient) -> list:
    all_players = Policies(players, lambda client, name: make_agent(client, model=name))
    engine = RolloutEngine(protocol_registry={"duel": all_players.protocol})
    return asyncio.run(engine.generate_rollouts(requests, max_steps=9, concurrency=16))


def scripts() -> dict[str, ScriptedClient]:
    return {
        "plays": ScriptedClient(first_free),
        "cheats": ScriptedClient(lambda _: "<a>Z9</a>"),
        "silent": ScriptedClient(lambda _: "I resign"),
    }


def test_every_pair_plays_as_often_in_both_assignments_with_different_seeds():
    requests = round_robin(GAME, ["a", "b", "c"], SEATS, num_games=4)
    seatings = Counter(tuple(request.protocol.kwargs["policies"].values()) for request in requests)
    assert seatings == {(x, o): 4 for x in "abc" for o in "abc" if x != o}
    assert len({request.env_seed for request in requests}) == len({r.sampling_seed for r in requests}) == len(requests)
    assert requests == round_robin(GAME, ["a", "b", "c"], SEATS, num_games=4)


def test_the_higher_reward_wins_also_if_the_other_player_never_moved():
    rollouts = play(round_robin(GAME, list(scripts()), SEATS, num_games=1), **scripts())
    found = {(match.first, match.second): match.score for match in matches_of(rollouts, SEATS)}
    assert found == {
        ("plays", "cheats"): 1.0,
        ("plays", "silent"): 1.0,  # whose replies cost it a penalty each, until the game is called off
        ("cheats", "plays"): 0.0,
        ("cheats", "silent"): 0.0,
        ("silent", "plays"): 0.0,
        ("silent", "cheats"): 0.0,
    }


def test_a_legal_game_is_won_by_three_in_a_row():
    """Both take the first free cell: X gets A1 A3 B2 C1, a diagonal."""
    rollouts = play(
        [assign_roles(GAME, {"X": "one", "O": "two"})], one=ScriptedClient(first_free), two=ScriptedClient(first_free)
    )
    assert matches_of(rollouts, SEATS) == [Match("one", "two", 1.0)]


def test_failed_episodes_are_no_matches():
    def breaks(_: object) -> str:
        raise RuntimeError("broken")

    requests = [assign_roles(GAME, {"X": "plays", "O": name}) for name in ("cheats", "broken")]
    rollouts = play(requests, **scripts(), broken=ScriptedClient(breaks))
    assert matches_of(rollouts, SEATS) == [Match("plays", "cheats", 1.0)]


def test_rollouts_that_do_not_say_who_played_are_refused():
    rollouts = play([assign_roles(GAME, {"X": "plays", "O": "cheats"})], **scripts())
    del rollouts[0].meta["policies"]
    with pytest.raises(ConfigError, match="does not name its policies"):
        matches_of(rollouts, SEATS)


@pytest.mark.parametrize("players", [["a"], ["a", "a"]])
def test_a_tournament_needs_two_players(players):
    with pytest.raises(ConfigError, match="two or more"):
        round_robin(GAME, players, SEATS, num_games=1)
