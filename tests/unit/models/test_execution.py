"""The choice of the number of CPU threads."""

import pytest
import torch

from ludic.models import execution

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def restore_num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_fastest_number_of_threads_is_set(monkeypatch):
    monkeypatch.setattr(execution, "_time_steps", {1: 3.0, 2: 1.0, 4: 2.0}.__getitem__)
    assert execution.use_fastest_num_threads(most=4) == 2 == torch.get_num_threads()
    monkeypatch.setattr(execution, "_time_steps", {}.__getitem__)
    assert execution.use_fastest_num_threads(most=1) == 1 == torch.get_num_threads(), "there is nothing to time"


def test_omp_num_threads_is_the_default_limit(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(execution, "_time_steps", {1: 3.0, 2: 1.0}.__getitem__)
    assert execution.use_fastest_num_threads() == 1
