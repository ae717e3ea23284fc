"""TextWorld: what the narrator writes of given facts; generated games where the package is installed."""

import importlib
import json
import os
import random
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from ludic import registry
from ludic.envs import check_env
from ludic.types import ConfigError, MissingPackage
from ludic_envs.adapters import textworld
from ludic_envs.adapters.textworld import Fact, TextWorldEnv, goals_told, sketched, told

NAMES = {
    "r_0": "cellar", "r_1": "attic", "r_2": "shed", "c_0": "chest", "c_1": "box", "s_0": "shelf", "d_0": "hatch", "k_0": "key",
    "o_0": "coin", "o_1": "cup",
}  # fmt: skip


def facts(*texts: str) -> list[Fact]:
    """`at o_0 r_0` as a fact."""
    return [Fact(name, tuple(of)) for name, *of in map(str.split, texts)]


CELLAR = facts(
    "at P r_0", "at c_0 r_0", "at c_1 r_0", "at s_0 r_0", "open c_0", "locked c_1", "in o_0 c_0", "in k_0 c_1", "on o_1 s_0",
    "north_of r_1 r_0", "south_of r_0 r_1", "free r_0 r_1", "west_of r_2 r_0", "east_of r_0 r_2", "link r_0 d_0 r_2",
    "link r_2 d_0 r_0", "closed d_0",
)  # fmt: skip


# --- games ---


def test_episodes_that_ask_for_the_same_game_at_once_share_one(monkeypatch):
    """With a generator in the place of the package's, so that it runs without it."""
    asked = []

    def generate(options):
        asked.append(options.seeds)
        time.sleep(0.05)  # the others ask meanwhile
        return object()

    fake = types.SimpleNamespace(GameOptions=types.SimpleNamespace, make_game=generate)
    monkeypatch.setattr(textworld, "_package", lambda name: fake)
    monkeypatch.setattr(textworld, "Game", lambda generated: generated)
    settings = json.dumps(
        {"level": None, "rooms": 1, "objects": 1, "quest_length": 1, "quest_breadth": "none but here"}
    )
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda number: textworld.make_game(settings, number % 2), range(8)))
    assert sorted(asked) == [0, 1] and len(set(map(id, made))) == 2


# --- the narrator ---


def test_the_player_sees_the_room_open_containers_exits_and_doors_but_nothing_behind_a_lock():
    assert told(CELLAR, NAMES) == (
        "You are in the cellar. You see: chest (open, with coin), box (locked), shelf (with cup). "
        "Exits: north, west through the hatch (closed). You carry: nothing."
    )
    assert "key" not in told(CELLAR, NAMES)


def test_things_change_place_with_their_facts():
    moved = [fact for fact in CELLAR if fact.of not in (("P", "r_0"), ("o_0", "c_0"))] + facts("at P r_1", "in o_0 I")
    assert told(moved, NAMES) == "You are in the attic. You see: nothing. Exits: south. You carry: coin."
    assert sketched(moved, NAMES) == "@attic\n\n+coin".replace("\n\n", "\n")


def test_the_order_of_the_facts_changes_nothing():
    shuffled = random.Random(0).sample(CELLAR, len(CELLAR))
    assert told(shuffled, NAMES) == told(CELLAR, NAMES) and sketched(shuffled, NAMES) == sketched(CELLAR, NAMES)


def test_goals_are_facts_without_the_player_and_fitting_keys():
    wanted = facts("at P r_0", "in k_0 I", "match k_0 c_0", "closed c_0")
    assert goals_told(wanted, NAMES) == "in key you, closed chest"


# --- without the package ---


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingPackage, match=r"'\.\[textworld\]'.*docs/envs/textworld.md"):
        TextWorldEnv()


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"rooms": 0}, "rooms=0"), ({"max_moves": 0}, "max_moves=0"), ({"level": 31}, "levels 1 to 30"), ({"view": "x"}, "view='x'")],
)  # fmt: skip
def test_wrong_settings_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        TextWorldEnv(**settings)


# --- generated games ---


@pytest.fixture
def package():
    try:
        textworld.require_package()
    except MissingPackage as error:
        pytest.skip(str(error))


SMALL = dict(registry.envs.spec("textworld").example)


def solved(env: TextWorldEnv, seed: int) -> float:
    env.reset(seed=seed)
    total = 0.0
    while env.active_agents:
        total += env.step({"agent_0": env.reference_action("agent_0")})["agent_0"].reward
    return total


@pytest.mark.parametrize("settings", [SMALL, {"level": 11}, {**SMALL, "numbered": True, "view": "short"}])
def test_the_reference_solution_wins_every_game(package, settings):
    env = TextWorldEnv(**settings)
    assert [solved(env, seed) for seed in range(5)] == [1.0] * 5


async def test_games_keep_the_contract(package):
    await check_env(lambda: TextWorldEnv(**SMALL, numbered=True))


def test_a_command_that_is_not_listed_changes_nothing_and_may_cost(package):
    env = TextWorldEnv(**SMALL, illegal_reward=-0.1, max_moves=2)
    opening = env.reset(seed=0)["agent_0"][0]
    outcome = env.step({"agent_0": "dance"})["agent_0"]
    assert outcome.reward == -0.1 and outcome.info["illegal_move"]
    assert outcome.obs.startswith("That is not possible here. ") and opening.endswith(outcome.obs.split("here. ")[1])
    last = env.step({"agent_0": env.legal_actions("agent_0")[0].upper()})["agent_0"]
    assert last.truncated and not last.info["illegal_move"] and env.active_agents == []


def test_seeds_lead_to_as_many_games_as_asked_for(package):
    env = TextWorldEnv(**SMALL)
    shown = [env.reset(seed=seed)["agent_0"][0] for seed in range(6)]
    assert shown[:3] == shown[3:] and len(set(shown)) == 3


def test_a_seed_gives_the_same_game_in_every_process(package):
    """Python orders sets of texts differently in each process."""
    program = (
        "from ludic_envs.adapters.textworld import TextWorldEnv\n"
        "print(TextWorldEnv(rooms=3, objects=4, quest_length=3).reset(seed=1)['agent_0'])"
    )
    path = os.pathsep.join(sys.path)
    shown = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(shown) == 1 and "Commands:" in shown.pop()
