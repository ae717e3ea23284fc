"""Random state: what is restored continues with the same numbers."""

import io
import random

import numpy as np
import pytest
import torch

from ludic.training.rng import restore_rng, rng_state


@pytest.fixture(autouse=True)
def the_process_keeps_its_random_state():
    before = rng_state()
    yield
    restore_rng(before)


def draw() -> list[float]:
    # normal draws come in pairs, and the second of a pair is part of the state
    return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.randn(()).item()]


def test_the_same_numbers_follow_after_restoring():
    draw()
    state = rng_state()
    first = draw()
    assert draw() != first
    restore_rng(state)
    assert draw() == first


def test_the_state_survives_a_file_that_may_hold_tensors_and_plain_values_only():
    draw()
    file = io.BytesIO()
    torch.save(rng_state(), file)
    first = draw()
    file.seek(0)
    restore_rng(torch.load(file, weights_only=True))
    assert draw() == first


def test_a_state_from_a_machine_with_more_gpus_is_used_as_far_as_it_goes(caplog):
    state = rng_state()
    first = draw()
    restore_rng({**state, "cuda": [*state["cuda"], torch.get_rng_state()]})
    assert draw() == first
    assert "GPUs" in caplog.text
