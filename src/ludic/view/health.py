"""Advisories (to be filled)."""

from typing import Any

from ludic.view.index import RunIndex


def advisories(index: RunIndex) -> list[dict[str, Any]]:
    return []
