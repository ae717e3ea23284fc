"""The import table of DESIGN and CONTRIBUTING, as a test: arrows go down only."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2] / "src" / "ludic"

BASE = {"types", "tasks", "registry", "catalog"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "tasks": set(),
    "catalog": set(),
    "registry": {"types", "catalog"},
    "parsers": BASE,
    "context": BASE,
    "sandbox": BASE,
    "sandbox.remote": BASE | {"inference"},
    "envs": BASE | {"sandbox", "tools"},
    "tools": BASE | {"sandbox"},
    "models": BASE,
    "scaling": BASE,
    "inference": BASE,
    "inference.local": BASE | {"inference", "models"},
    "agents": BASE | {"parsers", "tools", "context", "inference"},
    "interaction": BASE | {"agents", "envs", "parsers"},
    "rewards": BASE | {"parsers"},
    "judges": BASE | {"rewards", "inference", "agents", "tools", "interaction", "parsers", "context"},
    "batch_gen": BASE | {"interaction", "envs", "inference", "rewards"},
    "gateway": BASE | {"interaction", "inference", "envs", "batch_gen", "parsers", "sandbox", "tools"},
    "gateway.training": BASE | {"batch_gen", "eval", "gateway", "run"},
    "prompt_search": BASE | {"batch_gen", "judges"},
    "distributed": BASE | {"inference", "models"},
    "training": BASE | {"models", "distributed"},
    "eval": BASE | {"batch_gen"},
    "tinker": BASE | {"training", "inference", "distributed", "models"},
    "run": BASE
    | {
        "agents",
        "batch_gen",
        "distributed",
        "envs",
        "eval",
        "gateway",
        "inference",
        "interaction",
        "judges",
        "models",
        "parsers",
        "rewards",
        "sandbox",
        "tinker",
        "training",
    },
    "view": BASE | {"batch_gen", "inference", "models", "run", "training"},
}
"""What may import everything: minimal (all but cli) and cli. A row for a part that is not built yet is checked as
soon as it is there. `interaction` also sees `parsers`, since a step's parse result is one of its types."""
HEAVY = {"torch", "transformers", "vllm"}
MAY_BE_HEAVY = {"training", "distributed", "models", "inference.local", "gateway.training"}


def files_of(package: str) -> list[Path]:
    path = package.replace(".", "/")
    found = [*ROOT.glob(f"{path}.py"), *ROOT.glob(f"{path}/**/*.py")]
    if package == "inference":  # the embedded engine is the one part of it that may load torch, and has its own row
        found = [file for file in found if "inference/local/" not in file.as_posix()]
    if package == "sandbox":  # its server and client stand on the HTTP parts of `inference`
        found = [file for file in found if "sandbox/remote/" not in file.as_posix()]
    if package == "gateway":  # the one file above `run`; the package loads it when its names are used
        found = [file for file in found if not file.as_posix().endswith("gateway/training.py")]
    return found


@functools.cache
def ludic_imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            module = node.module or ""
            if module == "ludic":
                found |= {alias.name for alias in node.names} - {"__version__"}
            elif module.startswith("ludic."):
                found.add(module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ludic.")}
    return found


def built_packages() -> set[str]:
    inside = {path.stem if path.is_file() else path.name for path in ROOT.iterdir()}
    return {name for name in inside if not name.startswith("_") and name != "py"}


def test_every_part_has_a_row():
    assert built_packages() <= MAY_IMPORT.keys() | {"cli", "minimal", "py.typed"}, "add the new part to the table"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_package_imports_only_what_it_may(package: str):
    extra = {
        f.name: bad
        for f in files_of(package)
        if (bad := ludic_imports(f) - {package.split(".")[0]} - MAY_IMPORT[package])
    }
    assert not extra, f"ludic.{package} reaches too far: {extra}. Move the shared name down to ludic.types."


def test_no_package_imports_the_cli():
    importers = [f for p in MAY_IMPORT for f in files_of(p) if "cli" in ludic_imports(f)]
    assert not importers


ALONE = {"cli.main", "inference.client", "inference.sampling", "training.batching.rollout_engine"}
"""Modules that load without torch, too."""
LIGHT = ["", *sorted((MAY_IMPORT.keys() | ALONE) - MAY_BE_HEAVY)]
IMPORT_EACH_ALONE = f"""
import json, multiprocessing, sys, traceback
import msgspec, numpy  # the slow part of each import, and no part's own

def loaded(module, answers):
    try:
        __import__(module)
        answers.put((module, sorted({HEAVY!r} & set(sys.modules))))
    except BaseException:
        answers.put((module, traceback.format_exc()))

fork = multiprocessing.get_context("fork")
answers = fork.SimpleQueue()
for module in sys.argv[1:]:
    process = fork.Process(target=loaded, args=(module, answers))
    process.start()
    process.join()
print(json.dumps(dict(answers.get() for _ in sys.argv[1:])))
"""


def module_of(package: str) -> str:
    return f"ludic.{package}" if package else "ludic"


@pytest.fixture(scope="module")
def loaded_alone() -> dict[str, list[str] | str]:
    """The heavy packages that each module loads in a process in which it is the first of ludic, or its traceback."""
    built = [package for package in LIGHT if package in ("", *ALONE) or files_of(package)]
    command = [sys.executable, "-c", IMPORT_EACH_ALONE, *map(module_of, built)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[str] | str] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("package", LIGHT)
def test_package_loads_without_torch(package: str, loaded_alone):
    assert loaded_alone.get(module_of(package), []) == []  # a part that is not built yet is not there


def test_the_floor_needs_numpy_only():
    outside = set()
    for file in files_of("types"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            outside |= {n.split(".")[0] for n in names}
    assert outside - set(sys.stdlib_module_names) - {"ludic"} == {"numpy"}


def test_contributing_shows_the_same_table():
    """CONTRIBUTING holds the table for people; each row must say what this test enforces."""
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text()
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        if len(cells) == 2 and cells[0] in MAY_IMPORT:
            rows[cells[0]] = {name.strip(" `") for name in cells[1].split(",")} - {"", "—"}
    expected = {name: (may - BASE if may >= BASE else may) for name, may in MAY_IMPORT.items()}
    assert rows == expected
