"""Reads BFCL's samples from the wheel `bfcl-eval`, installed or as a file; nothing of the package is imported.

python -m ludic_envs.adapters.bfcl.data simple_python multiple > bfcl.jsonl
python -m ludic_envs.adapters.bfcl.data --wheel bfcl_eval-2026.3.23-py3-none-any.whl all > bfcl.jsonl
"""

import argparse
import json
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ludic.types import MissingPackage, UnknownName
from ludic.util.files import parse_json

CATEGORIES = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_multiple", "live_parallel",
    "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
"""The supported ones: one turn, Python types."""
_FOLDER = "bfcl_eval/data"


def read_bfcl(categories: Sequence[str], wheel: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """The samples of some categories, each with its `ground_truth` where the benchmark has one."""
    for category in categories:
        if category not in CATEGORIES:
            raise UnknownName.among("supported BFCL category", category, CATEGORIES)
    read = _reader(wheel)
    for category in categories:
        file = f"BFCL_v4_{category}.json"
        rows = _rows(read(file))
        answers = [] if "relevance" in category else _rows(read(f"possible_answer/{file}"))
        accepted = {answer["id"]: answer["ground_truth"] for answer in answers}
        for row in rows:
            yield {**row, "ground_truth": accepted[row["id"]]} if accepted else row


def _rows(text: str) -> list[dict[str, Any]]:
    return [parse_json(line) for line in text.splitlines() if line.strip()]


def _reader(wheel: str | Path | None) -> Callable[[str], str]:
    if wheel is not None:
        archive = zipfile.ZipFile(wheel)
        return lambda name: archive.read(f"{_FOLDER}/{name}").decode("utf-8")
    found = find_spec("bfcl_eval")
    if found is None or not found.submodule_search_locations:
        raise MissingPackage(
            "bfcl-eval", "The samples of BFCL", "pip install --no-deps bfcl-eval (the data needs nothing else)"
        )
    folder = Path(next(iter(found.submodule_search_locations))) / "data"
    return lambda name: (folder / name).read_text(encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Write samples as JSONL to standard output."""
    parser = argparse.ArgumentParser(prog="python -m ludic_envs.adapters.bfcl.data", description=main.__doc__)
    parser.add_argument("categories", nargs="+", metavar="CATEGORY", help=f"{', '.join(CATEGORIES)}, or all")
    parser.add_argument("--wheel", help="file of bfcl-eval, if the package is not installed")
    args = parser.parse_args(argv)
    chosen = CATEGORIES if args.categories == ["all"] else args.categories
    try:
        for sample in read_bfcl(chosen, args.wheel):
            sys.stdout.write(json.dumps(sample, ensure_ascii=False) + "\n")
    except (MissingPackage, UnknownName) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
