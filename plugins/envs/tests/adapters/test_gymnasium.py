"""The Gymnasium adapter, on real Gymnasium environments."""

import asyncio
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ludic.envs.check import check_env
from ludic.types import ConfigError, ResetNeeded
from ludic_envs.adapters.gymnasium import AGENT, GymnasiumEnv

pytestmark = pytest.mark.slow


class Riddle(gymnasium.Env):
    """Free text in, a dict out: the word is the env's colour."""

    action_space = spaces.Text(max_length=8)
    observation_space = spaces.Dict({"length": spaces.Discrete(9), "weights": spaces.Box(-1, 1, (2,))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = ("red", "green")[self.np_random.integers(2)]
        return {"length": len(self.word), "weights": np.array([0.123456, -1.0], np.float32)}, {
            "tries": (0, np.int64(1))
        }

    def step(self, action):
        return {"length": len(self.word), "weights": np.zeros(2, np.float32)}, 1.0, action == self.word, False, {}


class Picture(gymnasium.Env):
    action_space = spaces.Discrete(2, start=5)
    observation_space = spaces.Box(0, 255, (64, 64), np.uint8)

    def reset(self, *, seed=None, options=None):
        return np.zeros((64, 64), np.uint8), {}

    def step(self, action):
        return np.full((64, 64), action, np.uint8), float(action), False, False, {}


@pytest.fixture(autouse=True, scope="module")
def registered():
    gymnasium.register("ludic_tests/Riddle-v0", Riddle)
    gymnasium.register("ludic_tests/Picture-v0", Picture)
    yield
    del gymnasium.registry["ludic_tests/Riddle-v0"], gymnasium.registry["ludic_tests/Picture-v0"]


def brightness(observation):
    return f"brightness {observation.mean():g}"


def started(env_id, *, seed=0, **settings):
    env = GymnasiumEnv(env_id, **settings)
    env.reset(seed=seed)
    return env


def act(env, action):
    return env.step({AGENT: action})[AGENT]


@pytest.mark.parametrize(
    ("env_id", "settings"),
    [
        ("FrozenLake-v1", {}),
        ("Taxi-v4", {"env_args": {"max_episode_steps": 12}}),
        ("CartPole-v1", {}),
        ("Blackjack-v1", {"env_args": {"sab": True}}),
        ("CliffWalking-v1", {"env_args": {"max_episode_steps": 10}, "render": "observation"}),
        ("FrozenLake8x8-v1", {"env_args": {"max_episode_steps": 10}}),
        ("MountainCar-v0", {"env_args": {"max_episode_steps": 10}}),
        ("Acrobot-v1", {"env_args": {"max_episode_steps": 10}}),
        ("ludic_tests/Riddle-v0", {}),
        ("ludic_tests/Picture-v0", {"render": brightness, "env_args": {"max_episode_steps": 5}}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*ended within")
async def test_the_env_keeps_the_contract(env_id, settings):
    await check_env(lambda: GymnasiumEnv(env_id, **settings), seeds=(0, 1, 2, 3), max_steps=40)


def test_a_walk_over_the_ice_reads_as_a_picture_and_ends_in_the_reward():
    env = started("FrozenLake-v1", env_args={"is_slippery": False})
    assert env.current_obs()[AGENT] == "[S:red]FFF\nFHFH\nFFFH\nHFFG"
    outcomes = [act(env, move) for move in ("down", " DOWN\n", "right", "2", "down", "right")]
    assert [o.reward for o in outcomes] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert outcomes[0].obs == "  (Down)\nSFFF\n[F:red]HFH\nFFFH\nHFFG"
    assert (outcomes[-1].terminated, outcomes[-1].truncated) == (True, False)
    with pytest.raises(ResetNeeded):
        act(env, "down")


def test_without_a_seed_episodes_differ_and_can_still_be_copied():
    env = GymnasiumEnv("CartPole-v1")
    assert len({env.reset()[AGENT][0] for _ in range(4)}) == 4
    copied = pickle.loads(pickle.dumps(env))
    assert act(copied, "left") == act(env, "left")


def test_out_of_time_is_a_truncation_and_no_termination():
    env = started("Taxi-v4", env_args={"max_episode_steps": 2})
    assert not act(env, "pickup").truncated
    last = act(env, "south")
    assert (last.truncated, last.terminated) == (True, False)


@pytest.mark.parametrize("said", ["", "jump", "4", "left right", "²"])
def test_an_invalid_action_changes_nothing_and_lists_the_legal_ones(said):
    env = started("FrozenLake-v1", invalid_reward=-0.25)
    before = env.current_obs()[AGENT]
    outcome = act(env, said)
    assert (outcome.reward, outcome.info["illegal_move"]) == (-0.25, True)
    assert "Legal actions: left, down, right, up." in outcome.obs and outcome.obs.endswith(before)
    assert env.active_agents == [AGENT]


def test_actions_go_by_their_names_and_numbers():
    assert started("Blackjack-v1").legal_actions(AGENT) == ["stick", "hit"]
    env = started("CartPole-v1", action_names=["push left", "0"])
    assert "push left, 0" in env.suggested_sysprompt
    # "0" is the name of action 1 here, and a name goes before a number.
    twin = started("CartPole-v1")
    assert act(env, "0").obs == act(twin, "right").obs != act(started("CartPole-v1"), "left").obs


def test_numbers_of_a_space_that_starts_elsewhere_reach_the_env_as_they_are():
    env = started("ludic_tests/Picture-v0", render=brightness)
    assert env.legal_actions(AGENT) == ["5", "6"]
    outcome = act(env, "6")
    assert (outcome.obs, outcome.reward) == ("brightness 6", 6.0)


def test_dicts_tuples_and_small_arrays_are_told_in_words():
    env = started("ludic_tests/Riddle-v0", seed=0)
    assert env.current_obs()[AGENT].splitlines()[1] == "weights: [ 0.1235, -1.    ]"
    player, dealer, _ = started("Blackjack-v1", render="observation")._seen
    assert started("Blackjack-v1").current_obs()[AGENT] == f"({player}, {dealer}, 0)"


def test_text_actions_pass_and_what_the_space_refuses_does_not():
    env = started("ludic_tests/Riddle-v0")
    assert env.legal_actions(AGENT) is None
    assert act(env, "much too long for it").info["illegal_move"]
    assert any(act(env, word).terminated for word in ("red", "green") if env.active_agents)


def test_info_of_the_env_becomes_plain_json():
    env = GymnasiumEnv("ludic_tests/Riddle-v0")
    assert env.reset(seed=0)[AGENT][1] == {"env": {"tries": [0, 1]}}


def test_a_picture_without_a_renderer_says_what_to_pass():
    with pytest.raises(ConfigError, match="render=<a function"):
        started("ludic_tests/Picture-v0")


def test_close_closes_the_env_and_a_reset_opens_it_again():
    env = started("CartPole-v1")
    asyncio.run(env.async_close())
    assert env.active_agents == []
    with pytest.raises(ResetNeeded):
        act(env, "left")
    env.reset(seed=1)
    assert env.active_agents == [AGENT]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"env_id": "FrozenLak-v1"}, "Did you mean: `FrozenLake`"),
        ({"env_id": "Pendulum-v1"}, "needs a Discrete or a Text space"),
        ({"env_id": "FrozenLake-v1", "env_args": {"slippery": True}}, "slippery"),
        ({"env_id": "FrozenLake-v1", "render": "png"}, "auto, ansi, observation"),
        ({"env_id": "FrozenLake-v1", "action_names": ["left", "down", "right"]}, "has 4 actions"),
        ({"env_id": "FrozenLake-v1", "action_names": ["a", "b", "c", "A"]}, "name each of them once"),
    ],
)
def test_wrong_settings_are_refused_with_a_hint(settings, says):
    with pytest.raises(ConfigError, match=says):
        GymnasiumEnv(**settings)
