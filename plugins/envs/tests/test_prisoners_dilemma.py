"""The iterated prisoner's dilemma: payoffs, unreadable moves, tit for tat."""

import pytest

from ludic.envs.check import check_env
from ludic.types import ConfigError, ResetNeeded
from ludic_envs.prisoners_dilemma import PLAYERS, PrisonersDilemmaEnv


def started(**settings):
    env = PrisonersDilemmaEnv(**settings)
    env.reset(seed=0)
    return env


def rewards(outcomes):
    return tuple(outcomes[player].reward for player in PLAYERS)


@pytest.mark.parametrize("settings", [{}, {"rounds": 1}, {"rounds": 3, "payoffs": (3, 2, 1, -1)}])
async def test_the_env_keeps_the_contract(settings):
    await check_env(lambda: PrisonersDilemmaEnv(**settings), seeds=tuple(range(8)))


@pytest.mark.parametrize(
    ("moves", "paid"),
    [
        (("cooperate", "cooperate"), (3.0, 3.0)),
        (("defect", "cooperate"), (5.0, 0.0)),
        (("cooperate", "defect"), (0.0, 5.0)),
        (("defect", "defect"), (1.0, 1.0)),
        ((" C ", "D\n"), (0.0, 5.0)),
        (("DEFECT", "c"), (5.0, 0.0)),
    ],
)
def test_each_pair_of_moves_pays_both_players(moves, paid):
    assert rewards(started().step(dict(zip(PLAYERS, moves, strict=True)))) == paid


def test_payoffs_can_be_set():
    env = started(payoffs=[10, 6, 2, 1])
    assert rewards(env.step({"player_0": "d", "player_1": "c"})) == (10.0, 1.0)
    assert rewards(env.step({"player_0": "d", "player_1": "d"})) == (2.0, 2.0)


@pytest.mark.parametrize("actions", [{"player_0": "defect"}, {"player_0": "defect", "player_1": "hm"}])
def test_a_missing_or_unreadable_move_counts_as_cooperate_and_is_flagged(actions):
    outcomes = started().step(actions)
    assert rewards(outcomes) == (5.0, 0.0)
    assert (outcomes["player_1"].info["move"], outcomes["player_1"].info["illegal_move"]) == ("cooperate", True)
    assert (outcomes["player_0"].info["opponent_move"], outcomes["player_0"].info["illegal_move"]) == (
        "cooperate",
        False,
    )


def test_both_act_in_every_round_until_the_last():
    env = started(rounds=3)
    ends = []
    while env.active_agents:
        assert env.active_agents == list(PLAYERS)
        ends.append([o.terminated for o in env.step(dict.fromkeys(PLAYERS, "c")).values()])
    assert ends == [[False, False], [False, False], [True, True]]
    with pytest.raises(ResetNeeded):
        env.step({})


def test_the_observation_tells_last_round_scores_and_rounds_left():
    env = started(rounds=2)
    assert env.current_obs()["player_0"] == ("Scores: you 0, the other player 0.\nRounds left: 2. Cooperate or defect?")
    outcomes = env.step({"player_0": "defect", "player_1": "cooperate"})
    assert outcomes["player_1"].obs == (
        "Last round you chose to cooperate, the other player to defect.\n"
        "Scores: you 0, the other player 5.\n"
        "Rounds left: 1. Cooperate or defect?"
    )
    assert env.step({})["player_0"].obs.endswith("The game is over.")


def test_the_reference_is_tit_for_tat():
    env = started()
    assert env.reference_action("player_0") == "cooperate"
    env.step({"player_0": "cooperate", "player_1": "defect"})
    assert (env.reference_action("player_0"), env.reference_action("player_1")) == ("defect", "cooperate")
    env.step({"player_0": "defect", "player_1": "cooperate"})
    assert env.reference_action("player_0") == "cooperate"


@pytest.mark.parametrize(
    "settings",
    [{"rounds": 0}, {"payoffs": (3, 5, 1, 0)}, {"payoffs": (5, 3, 3, 0)}, {"payoffs": (5, 3, 1)}],
)
def test_settings_that_make_no_dilemma_are_refused(settings):
    with pytest.raises(ConfigError):
        PrisonersDilemmaEnv(**settings)
