"""Samples made by hand: which of a test's facts belong to a sample's origin and which to its meta."""

from dataclasses import fields
from typing import Any

from ludic.types import SampleOrigin

_ORIGIN = {field.name for field in fields(SampleOrigin)}


def meta_and_origin(**facts: Any) -> dict[str, Any]:
    """Arguments for SAWItem: facts that SampleOrigin has a field for, and all others as meta."""
    return {
        "meta": {name: fact for name, fact in facts.items() if name not in _ORIGIN},
        "origin": SampleOrigin(**{name: fact for name, fact in facts.items() if name in _ORIGIN}),
    }
