"""Names the test files that a change since `main` can affect, by the imports: `make test-changed` runs them.

    python scripts/changed_tests.py [REVISION]      one path a line; REVISION is main unless named

A test file is affected if it, or a module that it reaches through imports (also those inside functions), has changed. Imports do
not show what is reached through entry points, so a change in a plug-in affects all tests of that plug-in and of the plug-ins that
import it. A page or a data file affects the tests that name it. The contract tests are always named, and a change in what all
tests share names all.
"""
# ruff: noqa: T201 - a script prints

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

if __package__ is None:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.structure import ROOT, Tree, imports_of, is_in, targets_of

SHARED = ("pyproject.toml", "conftest.py", "Makefile", "requirements/", "constraints.txt")
"""A change in one of these can affect every test."""


def changed_since(revision: str, root: Path = ROOT) -> set[str]:
    """Paths that differ from where this branch left `revision`, uncommitted and new files included."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout

    base = git("merge-base", revision, "HEAD").strip()
    return {*git("diff", "--name-only", base).splitlines(), *git("ls-files", "-o", "--exclude-standard").splitlines()}


def affected(changed: set[str], tree: Tree) -> list[str]:
    """The test files that a change of these paths can affect."""
    texts = {file.relative_to(tree.root).as_posix(): file.read_text(encoding="utf-8") for file in _tests(tree.root)}
    modules = {m.file.relative_to(tree.root).as_posix(): name for name, m in tree.modules.items()}
    arrows = tree.arrows(functions=True) | {path: _named(path, texts, tree) for path in texts}
    others = {Path(path).name for path in changed if not path.endswith(".py")}
    naming = {path for path, text in texts.items() if any(name in text for name in others)}
    hit = naming | _reaching({modules.get(path, path) for path in changed}, arrows)
    owners = ["tests/contract/", *(f"plugins/{plugin}/" for plugin in _plugins(changed, hit))]
    everything = any(path.startswith(SHARED) for path in changed)
    runs = (path for path in texts if everything or path in hit or path.startswith(tuple(owners)))
    return sorted(path for path in runs if Path(path).name.startswith("test_"))


def _plugins(changed: set[str], hit: set[str]) -> set[str]:
    """The plug-ins in which something changed, and those that import them."""
    if not any(path.startswith("plugins/") and "/tests/" not in path for path in changed):
        return set()
    return {name.partition(".")[0].removeprefix("ludic_") for name in hit if name.startswith("ludic_")}


def _tests(root: Path) -> list[Path]:
    return sorted([*(root / "tests").rglob("*.py"), *(root / "plugins").glob("*/tests/**/*.py")])


def _named(path: str, tests: Iterable[str], tree: Tree) -> set[str]:
    """The modules and the files of tests that a file of tests imports, and the conftest.py files above it."""
    statements = [*imports_of(ast.parse((tree.root / path).read_text(encoding="utf-8")), functions=True)]
    names = {name for node in statements for name in targets_of(node)}
    found = {(parent / "conftest.py").as_posix() for parent in Path(path).parents} & {*tests}
    found |= {each for each in tests if any(is_in(name, each[:-3].replace("/", ".")) for name in names)}
    return found.union(*map(tree.named, statements))


def _reaching(targets: set[str], arrows: dict[str, set[str]]) -> set[str]:
    """These, and everything from which arrows lead to them."""
    back: dict[str, set[str]] = {}
    for name, named in arrows.items():
        for target in named:
            back.setdefault(target, set()).add(name)
    reached, waiting = set(targets), [*targets]
    while waiting:
        new = back.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def main() -> None:
    for path in affected(changed_since(*(sys.argv[1:] or ["main"])), Tree()):
        print(path)


if __name__ == "__main__":
    main()
