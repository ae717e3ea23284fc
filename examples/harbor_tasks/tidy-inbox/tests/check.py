"""Compares /app with the files that the inbox had."""

import json
import sys
from pathlib import Path

expected = {}
for name, text in json.loads(Path("/tests/inbox.json").read_text()).items():
    kind = Path(name).suffix.removeprefix(".").lower() or "other"
    if text:
        expected[f"{kind}/{name}"] = text
root = Path("/app/sorted")
found = {
    path.relative_to(root).as_posix(): path.read_text(errors="replace")
    for path in root.rglob("*")
    if path.is_file() and not path.is_symlink()
}
left = list(Path("/app/inbox").iterdir()) if Path("/app/inbox").is_dir() else []
report = {
    "missing": sorted(expected.keys() - found.keys()),
    "unexpected": sorted(found.keys() - expected.keys()),
    "changed": sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name]),
    "left in the inbox": sorted(path.name for path in left),
}
sys.stdout.write(json.dumps(report, indent=1) + "\n")
raise SystemExit(0 if found == expected and not left else 1)
