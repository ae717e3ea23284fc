"""A small run, trained with the tiny model: two turns, two starts, records of the trainer."""

from pathlib import Path

import pytest

from ludic.run import build, load
from ludic_view.index import Runs
from plugins.view.tests.letters_env import LettersEnv

GROUP_SIZE, NUM_ROLLOUTS = 4, 8


def train_letters(folder: Path, *, steps: int = 2, **settings):
    run = build(
        env=LettersEnv,
        model="tiny",
        runs=folder.parent,
        name=folder.name,
        steps=steps,
        rollouts_per_update=NUM_ROLLOUTS,
        group_size=GROUP_SIZE,
        max_tokens=6,
        lr=1e-3,
        logger=(),
        cut_off="read",
        checkpoint_every=steps,
        **settings,
    )
    with run:
        run.train()
    return run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Path:
    """A folder of runs: "letters", three updates, resumed after the second."""
    root = tmp_path_factory.mktemp("runs")
    train_letters(root / "letters")
    with load(root / "letters", env=LettersEnv) as run:
        run.resume(1)
    return root


@pytest.fixture
def runs(recorded) -> Runs:
    return Runs(recorded)


@pytest.fixture
def index(runs):
    found = runs.get("letters")
    assert found.refresh(float("inf"))
    return found


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
