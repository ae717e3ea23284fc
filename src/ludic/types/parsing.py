"""JSON and TOML from outside: whatever is wrong with it, the reader raises a ValueError.

Python's own parsers answer arrays within arrays within arrays with a RecursionError, which callers that expect a ValueError miss.
"""

import json
import tomllib
from typing import Any


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text; `options` are those of `json.loads`."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("the TOML is nested too deeply") from None
