"""Counts what REDESIGN bounds: lines, files, what an import loads, circles, arrows between packages, parameters, docstrings.

    python scripts/structure.py [PATH]      a table of this clone (or of another tree), with the target of each number

Standard library only; nothing that it counts is imported. tests/contract/test_structure.py holds what must not grow again.
"""
# ruff: noqa: T201 - a script prints

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAGMENTS = re.compile(r"(Of|That|As|By|What|Which|Where|How|Whether|From)\b")
CLOSURES = {"ludic_view.server": "6,000", "ludic.training.trainer": "19,000", "ludic.run.run": ""}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One file: its syntax tree and what it imports."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        text = file.read_text(encoding="utf-8")
        self.lines = text.count("\n")
        self.tree = ast.parse(text)

    @functools.cache  # noqa: B019 - a tree lives as long as the script
    def imports(self, functions: bool) -> list[ast.AST]:
        """The import statements that run when the module is imported; with `functions`, also those inside functions."""
        return [*imports_of(self.tree, functions)]

    @functools.cached_property
    def face(self) -> ast.FunctionDef | ast.Assign | None:
        """What makes the module's `__getattr__`: a function, or a call of `lazy` or `forward`."""
        made = (node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.Assign))
        return next((node for node in made if "__getattr__" in _bound_by(node)), None)

    @functools.cached_property
    def table(self) -> dict[str, str]:
        """Name -> module, of the tables from which lazy faces are made."""
        tables = (node for node in ast.walk(self.tree) if isinstance(node, ast.Dict))
        pairs = (pair for table in tables for pair in zip(table.keys, table.values, strict=True))
        texts = ((k.value, v.value) for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Constant))
        return {name: str(module) for module, names in texts if isinstance(names, str) for name in names.split()}

    def homes(self, name: str) -> list[str]:
        """The modules in which a lazy face looks for a name; empty where the module itself has it."""
        if self.face is None or any(name in _bound_by(node) for node in self.tree.body):
            return []
        if name in self.table:
            return [self.table[name], f"{self.name}.{self.table[name]}"]
        texts = [node.value for node in ast.walk(self.face) if isinstance(node, ast.Constant)]
        inside = [target for node in imports_of(self.face, functions=True) for target in targets_of(node)]
        return [text for text in texts if isinstance(text, str) and text.startswith("ludic")] + inside


class Tree:
    """The modules of `src/ludic` and of the plug-ins."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        tops = [root / "src" / "ludic", *sorted((root / "plugins").glob("*/ludic_*"))]
        self.modules = {module.name: module for top in tops for module in _modules(top)}

    def core(self) -> list[Module]:
        """The modules of `ludic`."""
        return [module for name, module in self.modules.items() if is_in(name, "ludic")]

    def named(self, node: ast.AST) -> set[str]:
        """The modules that an import statement names; of a lazy face, those in which it finds the names."""
        return set().union(*map(self._find, targets_of(node)))

    def _find(self, dotted: str, asked: tuple[str, ...] = ()) -> set[str]:
        module, _, name = dotted.rpartition(".")
        if dotted in self.modules or dotted in asked or not module:
            return {dotted} & self.modules.keys()
        if module not in self.modules:
            return self._find(module)
        for home in self.modules[module].homes(name):
            if home in self.modules or home.rpartition(".")[0] in self.modules:
                inside = f"{home}.{name}" if home in self.modules else home
                return {module} | self._find(inside, (*asked, dotted))
        return {module}

    def closure(self, *starts: str) -> set[str]:
        """The modules that importing these loads: by statements outside of functions, with the packages around each."""
        reached: set[str] = set()
        waiting = [*starts]
        while waiting:
            parts = waiting.pop().split(".")
            for name in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & self.modules.keys() - reached:
                reached.add(name)
                waiting += [target for node in self.modules[name].imports(False) for target in self.named(node)]
        return reached

    def program(self, page: str = "docs/training.md") -> set[str]:
        """The closure of the first Python program of a page."""
        text = (self.root / page).read_text(encoding="utf-8")
        code = ast.parse(text.partition("```python\n")[2].partition("```")[0])
        return self.closure(*(name for node in imports_of(code, functions=True) for name in self.named(node)))

    def lines(self, names: Iterable[str]) -> int:
        return sum(self.modules[name].lines for name in names)

    def arrows(self, functions: bool) -> dict[str, set[str]]:
        """What each module names in its imports, itself and the packages around a module not counted."""
        found = {name: map(self.named, module.imports(functions)) for name, module in self.modules.items()}
        return {name: set().union(*targets) - {name} for name, targets in found.items()}

    def package_arrows(self) -> Counter[tuple[str, str]]:
        """Arrows that leave a package (the core or a plug-in), also from inside functions: (from, to) -> number."""
        pairs = ((name, target) for name, targets in self.arrows(functions=True).items() for target in targets)
        tops = Counter((name.partition(".")[0], target.partition(".")[0]) for name, target in pairs)
        return Counter({pair: count for pair, count in tops.items() if pair[0] != pair[1]})

    def folders(self) -> Counter[str]:
        """Folder -> number of its Python files."""
        return Counter(str(module.file.parent.relative_to(self.root)) for module in self.modules.values())


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _modules(top: Path) -> Iterator[Module]:
    for file in sorted(top.rglob("*.py")):
        parts = file.relative_to(top.parent).with_suffix("").parts
        yield Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), file)


def imports_of(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from imports_of(other, functions)
        elif isinstance(child, ast.stmt | ast.excepthandler) and (functions or not isinstance(child, Function)):
            yield from imports_of(child, functions)


def _bound_by(node: ast.AST) -> set[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def targets_of(node: ast.AST) -> list[str]:
    """The dotted names that an import statement asks for."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, largest first."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = arrows[waiting.pop()] - found
            found |= new
            waiting += new
        reached[start] = found
    groups = {tuple(sorted(t for t in found if name in reached[t])) for name, found in reached.items() if name in found}
    return sorted(map(list, groups), key=len, reverse=True)


def parameters(modules: Iterable[Module]) -> tuple[int, str]:
    """The most parameters of a function, without self, *args and **kwargs, and its name."""
    most = (0, "")
    for module in modules:
        for node in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef | ast.Module)):
            owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for function in (each for each in node.body if isinstance(each, Function)):
                if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                    continue  # Triton's language, whose functions take each pointer and stride by itself
                given = function.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                most = max(most, (count, f"{module.name}.{owner}{function.name}"))
    return most


def public_definitions(modules: Iterable[Module]) -> int:
    """Classes and functions at the top of a module whose names have no underscore in front."""
    top = (node for module in modules for node in module.tree.body)
    return sum(isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") for node in top)


def docstrings(modules: Iterable[Module]) -> tuple[int, int]:
    """(fragments, all): texts that document a module, class, function or attribute, and those that begin in mid-sentence."""
    nodes = (node for module in modules for node in ast.walk(module.tree))
    inside = (s for node in nodes if isinstance(node, Function | ast.ClassDef | ast.Module) for s in node.body)
    values = [s.value.value for s in inside if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    texts = [value for value in values if isinstance(value, str)]
    return sum(bool(FRAGMENTS.match(text.strip())) for text in texts), len(texts)


def config_errors(tree: Tree) -> int:
    """Number of `raise ConfigError` in `ludic.run`."""
    inside = (node for name, m in tree.modules.items() if is_in(name, "ludic.run") for node in ast.walk(m.tree))
    return sum(isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise ConfigError") for node in inside)


def rows(tree: Tree) -> Iterator[tuple[str, object, str]]:
    """(what is counted, number, target) for each line of the table."""
    every, core = tree.modules.values(), tree.core()
    yield "lines", tree.lines(tree.modules), "84,000"
    yield "files", len(tree.modules), "460"
    yield f"lines of the core (in {len(core)} files)", sum(module.lines for module in core), "42,000"
    for package in sorted({name.partition(".")[0] for name in tree.modules}):
        inside = [name for name in tree.modules if is_in(name, package)]
        yield f"  {package}", f"{tree.lines(inside):,} in {len(inside)}", ""
    folder, number = tree.folders().most_common(1)[0]
    yield f"largest folder ({folder})", number, "14"
    for name, target in CLOSURES.items():
        yield f"lines that {name} loads", tree.lines(tree.closure(name)), target
    yield "lines that the program of docs/training.md loads", tree.lines(tree.program()), "28,000"
    for functions, where in ((False, "at module level"), (True, "with imports in functions")):
        found = circles(tree.arrows(functions))
        yield f"circles {where}", f"{len(found)} ({', '.join(str(len(group)) for group in found)})", "0"
    for (package, other), number in sorted(tree.package_arrows().items()):
        if other != "ludic":
            yield f"  imports {package} -> {other}", number, "0" if package == "ludic" else ""
    yield "`raise ConfigError` in ludic.run", config_errors(tree), "70"
    most, function = parameters(every)
    yield f"most parameters ({function})", most, "12"
    yield "public definitions of the core", public_definitions(core), "1,050"
    fragments, texts = docstrings(every)
    yield f"docstrings that are fragments (of {texts:,})", f"{fragments} = {fragments / texts:.1%}", "2 %"


def main() -> None:
    for name, number, target in rows(Tree(Path(sys.argv[1]) if sys.argv[1:] else ROOT)):
        print(f"{name:<72} {f'{number:,}' if isinstance(number, int) else number:>16} {target:>8}")


if __name__ == "__main__":
    main()
