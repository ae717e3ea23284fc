"""reasoning-gym, the real package: every generator, its own scorer, and what must not happen around them."""

import inspect
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from ludic.envs import check_env
from ludic.types import ConfigError, ResetNeeded, UnknownName
from ludic_envs.adapters import reasoning_gym as puzzles
from ludic_envs.adapters.reasoning_gym import WITHOUT_REFERENCE, ReasoningGymEnv
from tests.extended import cases

MIX = [
    {"name": "chain_sum", "weight": 1, "config": {"max_terms": 3}},
    {"name": "ransom_note", "weight": 1, "config": {}},
]


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("reasoning_gym.factory", reason="the reasoning_gym extra is not installed").DATASETS


pytestmark = [pytest.mark.usefixtures("datasets"), pytest.mark.slow]


def reward(env: ReasoningGymEnv, answer: str, *, seed: int = 1) -> float:
    env.reset(seed=seed)
    return env.step({"agent_0": answer})["agent_0"].reward


@pytest.mark.filterwarnings("ignore:loadtxt")  # pool_matrix reads answers with numpy
@pytest.mark.parametrize("share", cases(["each fifth", "all"], default=["each fifth"]))
def test_every_generators_own_answer_earns_the_full_score_and_a_wrong_one_less(datasets, share):
    assert len(datasets) >= 106
    for task in sorted(datasets.keys() - {"composite"})[:: 1 if share == "all" else 5]:
        env = ReasoningGymEnv(task)
        env.reset(seed=1)
        reference = env.reference_action("agent_0")
        if task in WITHOUT_REFERENCE:
            assert reference is None and env.full_reward is None, task
        else:
            assert reference is not None and reward(env, reference) == env.full_reward == 1.0, task
        assert all(0.0 <= reward(env, wrong) < 1.0 for wrong in ("", "no idea")), task


def test_the_scorers_partial_scores_are_the_reward():
    env = ReasoningGymEnv("countdown")
    assert reward(env, "1 + 1") == 0.05  # other numbers than the given ones
    env = ReasoningGymEnv("spiral_matrix", min_n=2, max_n=2)
    env.reset(seed=1)
    as_a_list = str(env.reference_action("agent_0").split()).replace("'", "")
    assert reward(env, as_a_list) == 0.1


def test_settings_of_a_generator_shape_its_puzzles():
    env = ReasoningGymEnv("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    obs, info = env.reset(seed=5)["agent_0"]
    assert re.search(r"\d [+-] \d =", obs) and info == {"task": "chain_sum", "puzzle_seed": 5}
    assert env.env_current_obs() == obs and "<answer>" in env.suggested_sysprompt


def test_a_mixture_says_which_generator_made_the_puzzle():
    env = ReasoningGymEnv("composite", datasets=MIX)
    seen = set()
    for seed in range(6):
        _, info = env.reset(seed=seed)["agent_0"]
        seen.add(info["task"])
        outcome = env.step({"agent_0": env.reference_action("agent_0")})["agent_0"]
        assert outcome.reward == 1.0 and outcome.info["task"] == info["task"]
    assert seen == {"chain_sum", "ransom_note"}


# --- one seed, one puzzle -----------------------------------------------------------------------------------

FRAGILE = sorted(puzzles.ITERATE_OVER_SETS | {"pool_matrix"})
SHOW = """
import json, sys
from reasoning_gym.factory import create_dataset
print(json.dumps([create_dataset(task, seed=seed, size=1)[0]["question"] for task in sys.argv[1:] for seed in (3, 4)]))
"""


def test_a_seed_means_the_same_puzzle_in_every_process():
    """The reference is the bare package with a fixed hash seed; this process has another one."""
    here = [ReasoningGymEnv(task).reset(seed=seed)["agent_0"][0] for task in FRAGILE for seed in (3, 4)]
    there = subprocess.run(
        [sys.executable, "-c", SHOW, *FRAGILE],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(there.stdout.splitlines()[-1]) == here


def test_a_generator_that_uses_global_random_state_is_repeatable():
    first = ReasoningGymEnv("list_functions").reset(seed=3)
    puzzles.make_puzzle.cache_clear(), puzzles._made.cache_clear()
    random.seed(5)
    assert ReasoningGymEnv("list_functions").reset(seed=3) == first


@pytest.mark.parametrize("task", ["list_functions", "pool_matrix"])
def test_a_generator_leaves_the_global_random_state_unchanged(task):
    python, arrays = random.getstate(), np.random.get_state()[1].copy()
    ReasoningGymEnv(task).reset(seed=777)
    assert random.getstate() == python and (np.random.get_state()[1] == arrays).all()


@pytest.mark.parametrize(
    "task",
    [
        "chain_sum", "string_manipulation", "puzzle24", "game_of_life_halting", "rush_hour", "countdown", "leg_counting",
        "mini_sudoku", "number_sequence", "propositional_logic", "shortest_path", "spell_backward", "tower_of_hanoi", "composite",
    ],
)  # fmt: skip
async def test_it_keeps_the_env_contract(task):
    settings = {"datasets": MIX} if task == "composite" else {}
    await check_env(lambda: ReasoningGymEnv(task, **settings), seeds=(0, 1))


# --- scorers that run what they are given --------------------------------------------------------------------

EVALUATING = sorted(puzzles.EVALUATE_PYTHON | puzzles.READ_EXPRESSIONS)


def planting(path) -> str:
    return f"__import__('pathlib').Path({str(path)!r}).write_text('planted')"


def test_the_packages_own_scorer_runs_code_in_an_answer(tmp_path):
    """Why the next test is there. When this one fails the package has become careful, and ours may do less."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("string_insertion", seed=0, size=1)
    dataset.score_answer(planting(tmp_path / "planted"), dataset[0])
    assert (tmp_path / "planted").exists()


@pytest.mark.parametrize("task", EVALUATING)
def test_code_in_an_answer_is_not_run(task, tmp_path):
    path = tmp_path / "planted"
    env = ReasoningGymEnv(task)
    for code in (planting(path), f" \n[{planting(path)}]", f"x + {planting(path)}", f"(lambda: {planting(path)})()"):
        assert reward(env, code) == 0.0
    assert not path.exists()


def test_every_scorer_that_evaluates_an_answer_is_known(datasets):
    """A new release may add one; then it belongs into the sets of ludic_envs.adapters.reasoning_gym."""
    risky = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(\s*(?:answer|user|pred|student)")
    found = {
        task for task, (made_by, _) in datasets.items() if risky.search(inspect.getsource(inspect.getmodule(made_by)))
    }
    assert found == set(EVALUATING)


def test_an_integral_is_not_solved_by_writing_it_down_again():
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("simple_integration", seed=1, size=1)
    entry = dataset[0]
    trick = f"Integral({entry['metadata']['integrand']}, {entry['metadata']['variable']})"
    assert dataset.score_answer(trick, entry) == 1.0 and reward(ReasoningGymEnv("simple_integration"), trick) == 0.0


def test_an_endless_answer_is_given_up_and_the_next_one_is_scored(monkeypatch):
    monkeypatch.setattr(puzzles, "_SCORE_S", 0.3)
    env = ReasoningGymEnv("countdown")
    assert reward(env, "9**9**9**9") == 0.0
    monkeypatch.setattr(puzzles, "_SCORE_S", 30.0)
    assert reward(env, env.reference_action("agent_0")) == 1.0


@pytest.mark.parametrize("answer", ["1e999999999", "9" * 30_000])
def test_a_number_too_long_to_write_down_earns_nothing_at_once(answer):
    assert reward(ReasoningGymEnv("coin_flip"), answer) == 0.0


def test_a_scorer_that_raises_gives_nothing():
    assert reward(ReasoningGymEnv("prime_factorization"), "two times three") == 0.0


def test_game_of_life_halting_compares_the_answer_itself():
    env = ReasoningGymEnv("game_of_life_halting")
    env.reset(seed=1)
    right = env.reference_action("agent_0")
    wrong = {"True": "False", "False": "True"}[right]
    assert [reward(env, text) for text in (right, right.lower(), wrong, "maybe")] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("puzzle24", "6*4*1*1"),
        ("coin_flip", "0"),
        ("coin_flip", "0."),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nan + nani"),
        ("number_sorting", "[NaN, NaN, NaN, NaN]"),
    ],
)
def test_no_answer_is_right_for_every_puzzle_of_a_kind(task, answer):
    env = ReasoningGymEnv(task, **({"min_numbers": 4, "max_numbers": 4} if task == "number_sorting" else {}))
    assert [reward(env, answer, seed=seed) for seed in range(12)] == [0.0] * 12


def test_a_probability_may_be_rounded_and_written_as_a_fraction():
    env = ReasoningGymEnv("coin_flip")
    env.reset(seed=3)
    right = float(env.reference_action("agent_0"))
    assert [reward(env, text, seed=3) for text in (f"{right:.4f}", str(right), f"{right + 0.01}")] == [1.0, 1.0, 0.0]


def test_endless_turns_of_a_cube_are_given_up(monkeypatch):
    monkeypatch.setattr(puzzles, "_SCORE_S", 0.5)
    env = ReasoningGymEnv("rubiks_cube")
    assert reward(env, "R4000000") == 0.0


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "config", "error", "message"),
    [
        ("chain_sums", {}, UnknownName, "Did you mean 'chain_sum'"),
        ("chain_sum", {"terms": 2}, ConfigError, "min_terms"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, ConfigError, "cannot make 'chain_sum'"),
        ("chain_sum", {"seed": 2}, ConfigError, "reset sets the seed"),
        ("composite", {}, ConfigError, "name them: datasets="),
        ("composite", {"datasets": [{"nam": "chain_sum"}]}, ConfigError, "cannot make 'composite'"),
    ],
)
def test_a_mistake_is_named_when_the_env_is_made(task, config, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ReasoningGymEnv(task, **config)


def test_without_a_reset_there_is_no_puzzle():
    with pytest.raises(ResetNeeded):
        ReasoningGymEnv("chain_sum").reference_action("agent_0")


SLOW_IMPORT = """
import importlib, sys, threading
from ludic_envs.adapters import reasoning_gym as puzzles

first = threading.Thread(target=importlib.import_module, args=("reasoning_gym",))
first.start()
while "reasoning_gym.factory" not in sys.modules:  # set by the other thread, which then waits for the pipe
    pass
threading.Timer(0.1, lambda: print("asking", flush=True)).start()
print(sorted(puzzles._generators()))
"""


def test_a_thread_that_asks_while_another_imports_the_package_gets_all_generators(tmp_path):
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "factory.py").write_text("DATASETS = {}\n")
    (package / "__init__.py").write_text(
        "import sys\nfrom reasoning_gym.factory import DATASETS\nsys.stdin.readline()\nDATASETS['late'] = None\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command, pipe = [sys.executable, "-c", SLOW_IMPORT], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as asking:
        said = asking.stdout.readline()
        if said == "asking\n":  # it waits for the import, which may go on now
            said = asking.communicate("\n")[0]
        assert said == "['late']\n"
