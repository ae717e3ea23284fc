import torch

from ludic.models import execution as threads


def test_the_fastest_number_of_threads_is_used(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_time_steps", {1: 3.0, 2: 1.0, 4: 2.0}.__getitem__)
    try:
        assert threads.use_fastest_num_threads(most=4) == 2 == torch.get_num_threads()
        assert threads.use_fastest_num_threads(most=1) == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_a_real_measurement_stays_within_what_there_is():
    before = torch.get_num_threads()
    try:
        assert threads.use_fastest_num_threads(most=2) in (1, 2)
    finally:
        torch.set_num_threads(before)


def test_the_wish_of_the_environment_is_the_limit(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(threads, "_time_steps", {1: 3.0, 2: 1.0}.__getitem__)
    try:
        assert threads.use_fastest_num_threads() == 1
    finally:
        torch.set_num_threads(before)
