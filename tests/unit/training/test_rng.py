"""Random state: what is restored continues with the same numbers."""

import io
import random

import numpy as np
import pytest
import torch

from ludic.training.checkpoint.rng import restore_rng, rng_state
from ludic.types import ConfigError


@pytest.fixture(autouse=True)
def the_process_keeps_its_random_state():
    before = rng_state()
    yield
    restore_rng(before)


def draw() -> list[float]:
    # normal draws come in pairs, and the second of a pair is part of the state
    return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.randn(()).item()]


def test_restored_rng_draws_the_same_numbers():
    draw()
    state = rng_state()
    first = draw()
    assert draw() != first
    restore_rng(state)
    assert draw() == first


def test_rng_state_is_plain_values_and_tensors():
    draw()
    file = io.BytesIO()
    torch.save(rng_state(), file)
    first = draw()
    file.seek(0)
    restore_rng(torch.load(file, weights_only=True))
    assert draw() == first


def test_rng_state_of_more_gpus_is_restored_with_a_warning(caplog):
    state = rng_state()
    first = draw()
    restore_rng({**state, "cuda": [*state["cuda"], torch.get_rng_state()]})
    assert draw() == first
    assert "GPUs" in caplog.text


@pytest.mark.parametrize(
    "broken", [{}, {"python": (3, ("x",), None)}, {"python": None}, {"torch": torch.zeros(3)}, {"cuda": 5}]
)
def test_invalid_rng_state_is_refused(broken):
    state = {**rng_state(), **broken} if broken else {}
    with pytest.raises(ConfigError, match="The random state cannot be restored"):
        restore_rng(state)
    restore_rng(rng_state())
