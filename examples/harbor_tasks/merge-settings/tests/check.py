"""Writes the rewards as JSON."""

import json
import sys
from pathlib import Path

EXPECTED = [
    "cache = on",
    "data = disk = fast",
    "host = 0.0.0.0",
    "log_level = debug",
    "port = 8080",
    "region = north",
    "timeout = 30",
    "workers = 16",
]
try:
    found = Path("/app/merged.conf").read_text().splitlines()
except (OSError, ValueError):
    found = []
lines = len(set(found) & set(EXPECTED)) / len(EXPECTED)
clean = float(bool(found) and set(found) <= set(EXPECTED) and len(found) == len(set(found)))
in_order = float(bool(found) and found == sorted(found))
exact = float(found == EXPECTED)
reward = 1.0 if exact else round(0.5 * lines * clean, 3)
json.dump({"reward": reward, "lines": lines, "clean": clean, "in_order": in_order}, sys.stdout)
