"""The import tables of CONTRIBUTING as tests: arrows go down only, and the core never sees a plug-in."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
ROOT = CHECKOUT / "src" / "ludic"
PLUGINS = sorted(package.parent.name for package in CHECKOUT.glob("plugins/*/ludic_*"))

BASE = {"types", "seeds", "tasks", "registry", "catalog", "plugins", "util", "compat"}
MAY_IMPORT: dict[str, set[str]] = {
    "util": set(),
    "types": {"util"},
    "seeds": set(),
    "tasks": set(),
    "compat": {"types"},
    "catalog": set(),
    "plugins": {"types", "util"},
    "registry": {"types", "catalog", "plugins", "util"},
    "parsers": BASE,
    "context": BASE,
    "http": BASE,
    "envs": BASE | {"tools"},
    "tools": BASE,
    "models": BASE,
    "inference": BASE | {"http"},
    "inference.local": BASE | {"inference", "models", "http"},
    "agents": BASE | {"parsers", "tools", "context", "inference"},
    "interaction": BASE | {"agents", "envs", "parsers"},
    "rewards": BASE | {"parsers"},
    "batch_gen": BASE | {"interaction", "envs", "inference", "rewards"},
    "distributed": BASE | {"inference", "models"},
    "training": BASE | {"models", "distributed"},
    "eval": BASE | {"batch_gen"},
    "run": BASE
    | {
        "agents",
        "batch_gen",
        "distributed",
        "envs",
        "eval",
        "inference",
        "interaction",
        "models",
        "parsers",
        "rewards",
        "tools",
        "training",
    },
}
"""What may import everything: cli. `interaction` also sees `parsers`, since a step's parse result is one
of its types."""
SHIMS = {"sandbox", "gateway", "judges"}
"""Names that the documents put into the core; their code is in plug-ins."""
PLUGIN_MAY_IMPORT: dict[str, set[str]] = {
    "envs": {"sandbox"},
    "gpu": set(),
    "judges": set(),
    "ops": set(),
    "pipeline": {"vllm"},
    "sandbox": set(),
    "serve": {"sandbox"},
    "tinker": {"gpu"},
    "view": set(),
    "vllm": set(),
}
"""Which plug-ins a plug-in may import. All of them may import the core."""
HEAVY = {"torch", "transformers", "vllm"}
MAY_BE_HEAVY = {"training", "distributed", "models", "inference.local"}


def files_of(package: str) -> list[Path]:
    path = package.replace(".", "/")
    found = [*ROOT.glob(f"{path}.py"), *ROOT.glob(f"{path}/**/*.py")]
    if package == "inference":  # the embedded engine is the one part of it that may load torch, and has its own row
        found = [file for file in found if "inference/local/" not in file.as_posix()]
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


def plugin_imports(file: Path) -> set[str]:
    """The plug-ins that a file imports anywhere but for types, by their short names."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in (node for node in ast.walk(tree) if id(node) not in for_types):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[0].removeprefix("ludic_") for name in names if name.startswith("ludic_")}
    return found & set(PLUGINS)


def built_packages() -> set[str]:
    inside = {path.stem if path.is_file() else path.name for path in ROOT.iterdir()}
    return {name for name in inside if not name.startswith("_") and name != "py"}


def test_every_part_has_a_row():
    assert built_packages() <= MAY_IMPORT.keys() | SHIMS | {"cli", "py.typed"}, "add the new part"
    assert PLUGIN_MAY_IMPORT.keys() == set(PLUGINS)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugin_imports_only_the_plugins_that_it_may(plugin: str):
    files = (CHECKOUT / "plugins" / plugin).glob(f"ludic_{plugin}/**/*.py")
    extra = {f.name: bad for f in files if (bad := plugin_imports(f) - {plugin} - PLUGIN_MAY_IMPORT[plugin])}
    assert not extra, "find it through an entry point, or move what both need into the core"


def test_the_core_imports_no_plugin():
    shims = {ROOT / "inference" / "vllm_server.py"}
    files = [file for file in ROOT.rglob("*.py") if file not in shims]
    extra = {file.relative_to(ROOT).as_posix(): bad for file in files if (bad := plugin_imports(file))}
    assert not extra, "find it through an entry point"


def test_arrows_between_plugins_make_no_circle():
    left = {name: set(may) for name, may in PLUGIN_MAY_IMPORT.items()}
    while free := {name for name, may in left.items() if not may}:
        left = {name: may - free for name, may in left.items() if name not in free}
    assert not left


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
