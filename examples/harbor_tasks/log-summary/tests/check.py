"""Writes the share of the three keys that are right."""

import json
import sys
from pathlib import Path

rows = [line.split() for line in Path("/tests/access.log").read_text().splitlines()]
expected = {
    "requests": len(rows),
    "errors": sum(int(row[3]) >= 500 for row in rows),
    "slowest": max(rows, key=lambda row: int(row[4]))[2],
}
try:
    found = json.loads(Path("/app/summary.json").read_text())
except (OSError, ValueError):
    found = {}
right = [isinstance(found, dict) and found.get(key) == value for key, value in expected.items()]
sys.stdout.write(str(1.0 if all(right) else round(sum(right) / len(right), 3)))
