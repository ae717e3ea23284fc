"""Tests that step a model are slow: `make test-fast` leaves them out, `make test` does not."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "inference/local" in item.path.as_posix() and item.path.stem not in ("test_blocks", "test_scheduler"):
            item.add_marker(pytest.mark.slow)
