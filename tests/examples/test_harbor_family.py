"""The generated Harbor tasks: the same seed gives the same task, solutions earn full reward, an empty attempt none."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.types import ConfigError, UnknownName
from ludic_sandbox import is_bubblewrap_available
from ludic_sandbox.harbor import HarborEnv, HarborTask, find_tasks
from tests import programs

SCRIPT = Path(__file__).parents[2] / "examples" / "harbor_tasks" / "family.py"
family = programs.load(SCRIPT)


def test_seeds_levels_and_kinds_give_different_tasks():
    tasks = {(seed, level): family.generate(seed, level) for seed in range(20) for level in (1, 2, 3, 4)}
    assert all(family.generate(*key) == files for key, files in tasks.items())
    assert len({files["instruction.md"] for files in tasks.values()}) == len(tasks)
    for (seed, level), files in tasks.items():
        task = HarborTask.from_files(files, "t")
        assert task.instruction.count("\n") == max(1, level - 1) - 1 and not task.needs
        assert task.solution_script == "solve.sh" and task.name.endswith(f"-{level}-{seed}")
    for kind in family.KINDS:
        assert family.generate(3, 1, [kind])["task.toml"].count(f"ludic/{kind}-1-3") == 1


def test_the_stream_repeats_for_a_seed_and_its_difficulty_is_the_level():
    first, again, other = (list(itertools.islice(family.stream(seed, 2), 5)) for seed in (0, 0, 1))
    assert first == again and not {sample["id"] for sample in first} & {sample["id"] for sample in other}
    assert HarborEnv(first[0]).task.name.split("-")[1] == "2"
    assert HarborEnv(next(family.stream(0, 99))).task.name.split("-")[3] == "4", "the highest level"


def test_written_tasks_read_as_the_same_tasks(tmp_path):
    subprocess.run([sys.executable, SCRIPT, "--num", "2", "--level", "3", "--out", tmp_path], check=True)
    for seed, folder in enumerate(find_tasks(tmp_path)):
        files = HarborTask.from_files(family.generate(seed, 3), folder.name)
        assert HarborTask.read(folder) == files


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": 9}, "levels 1 to 4"),
        ({"level": 3, "max_level": 2}, "cannot be the lower one"),
        ({"kinds": ["sing"]}, "'sing'; there are count"),
        ({"max_comands": 3}, "'max_comands'. Did you mean 'max_commands'.*command_timeout_s"),
        ({"max_output_chars": 5}, "at least 100"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        family.HarborFamilyEnv(**settings)


@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
@pytest.mark.parametrize("level", [1, 2, 3, 4])
async def test_reference_solutions_earn_full_reward_and_an_empty_attempt_none(level):
    env = family.HarborFamilyEnv(level=level)
    for seed, action, reward in [(level, None, 1.0), (level + 100, None, 1.0), (level, "true", 0.0)]:
        await env.async_reset(seed=seed)
        outcome = (await env.async_step({"agent_0": action or env.reference_action("agent_0")}))["agent_0"]
        assert outcome.reward == reward and outcome.info["level"] == level
