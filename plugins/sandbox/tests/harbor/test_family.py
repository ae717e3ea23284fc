"""The generated family: the same seed gives the same task, and seeds, levels and kinds give different ones."""

import itertools

import pytest

from ludic.types import ConfigError
from ludic_sandbox.harbor import HarborEnv, HarborFamilyEnv, HarborTask
from ludic_sandbox.harbor.family import KINDS, generate, stream, write_task


def test_one_seed_gives_one_task():
    tasks = {(seed, level): generate(seed, level) for seed in range(20) for level in (1, 2, 3, 4)}
    assert all(generate(*key) == files for key, files in tasks.items())
    assert len({files["instruction.md"] for files in tasks.values()}) == len(tasks)


@pytest.mark.parametrize(("level", "pieces"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_levels_have_more_pieces(level, pieces):
    task = HarborTask.from_files(generate(5, level), "t")
    assert task.instruction.count("\n") == pieces - 1 and len(task.name.split("-")) == pieces + 2
    assert not task.needs and task.solution_script == "solve.sh"


def test_kinds_are_chosen_from_those_given():
    for kind in KINDS:
        assert generate(3, 1, [kind])["task.toml"].count(f"ludic/{kind}-1-3") == 1


def test_the_stream_repeats_for_a_seed_and_its_difficulty_is_the_level():
    first, again, other = (list(itertools.islice(stream(seed, 2), 5)) for seed in (0, 0, 1))
    assert first == again and not {sample["id"] for sample in first} & {sample["id"] for sample in other}
    assert HarborEnv(first[0]).task.name.split("-")[1] == "2"
    assert HarborEnv(next(stream(0, 99))).task.name.split("-")[3] == "4", "the highest level"


def test_a_written_task_reads_as_the_same_task(tmp_path):
    files = generate(11, 3)
    read = HarborTask.read(write_task(files, tmp_path / "t"))
    assert read == HarborTask.from_files(files, "t")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": 9}, "levels 1 to 4"),
        ({"level": 3, "max_level": 2}, "cannot be the lower one"),
        ({"kinds": ["sing"]}, "'sing'; there are count"),
        ({"play": "sing"}, "it is 'tool'"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        HarborFamilyEnv(**settings)
