"""Real datasets for the tests, one gzipped JSONL file each; LICENSES.md says whose they are.

Only tests read this folder: the library loads the same tasks from the hub or from a file that the user names.
"""

import gzip
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def read_jsonl(name: str) -> list[dict[str, Any]]:
    """All records of ``name``, e.g. ``read_jsonl("gsm8k_test")``, in the order of the file."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
