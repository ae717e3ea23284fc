"""docs/training.md: its program learns as it says, its pieces run, its tables leave nothing out."""

import re
from dataclasses import fields
from math import log

import pytest

from ludic.batch_gen import AsyncRolloutBatchSource
from ludic.training import TrainerConfig, make_dapo, make_gmpo, make_ppo, make_reinforce_baseline, make_sapo, make_sft
from ludic.training.algorithms import __all__ as algorithms
from tests.contract.pages import BLOCK, DOCS, run
from tests.unit.training.bandit import bandit_trainer

PAGE = (DOCS / "training.md").read_text()
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(PAGE) if kind == language]


@pytest.mark.slow
def test_the_program_learns_as_the_page_says_and_the_pieces_run_after_it(tmp_path):
    printed = run("python", "\n".join(blocks("python")), tmp_path)
    (promised,) = blocks("text")
    lines = promised.splitlines()
    found = printed.splitlines()[: len(lines)]
    assert [NUMBER.sub("#", line) for line in found] == [NUMBER.sub("#", line) for line in lines]
    # What holds for every seed, and so on every machine: rounding changes the run as another seed does.
    steps, rewards, entropies, esses, lags = zip(*map(numbers, found), strict=True)
    assert steps == (10, 20, 30, 40) and set(lags) == {0} and min(esses) > 0.99
    assert rewards[-1] > 0.8, "chance is one half; 0.88 was the lowest of eight seeds"
    assert 5.3 < entropies[0] < log(264), "that of 264 tokens, all but equally likely"
    assert sorted(entropies, reverse=True) == list(entropies) and entropies[-1] < 5
    assert (tmp_path / "runs" / "letters" / "metrics.jsonl").read_text().count("\n") == 5


def numbers(line: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(line)]


def rows(heading: str) -> set[str]:
    """The names in the first column of the tables under a heading."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_setting_has_a_row():
    assert rows("TrainerConfig") == {field.name for field in fields(TrainerConfig)}


def test_every_preset_says_how_it_bounds_its_ratio():
    assert rows("How far stale data can push") == {name for name in algorithms if name.startswith("make_")}


@pytest.mark.parametrize("make", [make_dapo, make_gmpo, make_sapo], ids=lambda make: make.__name__)
async def test_every_metric_of_a_group_algorithm_has_a_row(make):
    trainer, engine = bandit_trainer(
        make(group_size=4), group_size=4, make_source=lambda source: AsyncRolloutBatchSource(source)
    )
    async with trainer.batch_source:
        stats = await trainer.train_step()
    engine.close()
    assert unexplained(stats) == set()


@pytest.mark.parametrize("make", [make_reinforce_baseline, make_ppo, make_sft], ids=lambda make: make.__name__)
async def test_every_metric_of_the_others_has_a_row(make):
    trainer, engine = bandit_trainer(make(), group_size=1)
    stats = await trainer.train_step()
    engine.close()
    assert unexplained(stats) == set()


def unexplained(stats: dict[str, float]) -> set[str]:
    names = {"reward/{component}" if "/reward/" in name else name.rsplit("/", 1)[1] for name in stats}
    return names - rows("Metrics")
