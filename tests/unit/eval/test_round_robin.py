"""All pairs meet in both role assignments, and the better player wins."""

import asyncio
from collections import Counter

import pytest

from ludic.batch_gen import RolloutEngine, assign_roles
from ludic.eval import Match, matches_of, round_robin
from ludic.inference import ScriptedClient
from ludic.interaction import Policies
from ludic.types import ConfigError, EnvSpec, ProtocolSpec, RolloutRequest
from tests.fakes import make_agent

SEATS = ("X", "O")
GAME = RolloutRequest(env=EnvSpec("tic_tac_toe_duel"), protocol=ProtocolSpec("duel"))


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
