"""Counts what REDESIGN bounds: lines, files, what an import loads, circles, arrows between packages, parameters, docstrings.

    python scripts/structure.py             a table of this clone, with the target of each number
    python scripts/structure.py PATH        the same of another tree, such as an older checkout

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
CLOSURES = {
    "ludic_view.server": "6,000",
    "ludic.training.trainer": "19,000",
    "ludic.inference.local": "",
    "ludic.run.run": "",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One file: its syntax tree and what it imports."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        text = file.read_text(encoding="utf-8")
        self.lines = text.count("\n")
        self.tree = ast.parse(text)

    @functools.cached_property
    def loaded(self) -> list[ast.AST]:
        """The import statements that run when the module is imported."""
        return [*_imports(self.tree, functions=False)]

    @functools.cached_property
    def all_imports(self) -> list[ast.AST]:
        """The same, and those inside functions."""
        return [*_imports(self.tree, functions=True)]

    @functools.cached_property
    def face(self) -> ast.FunctionDef | ast.Call | None:
        """The module's `__getattr__`: a function, or the call of `lazy` or `forward` that makes one."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
                return node
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if any(isinstance(each, ast.Name) and each.id == "__getattr__" for each in node.targets):
                    return node.value
        return None

    @functools.cached_property
    def bound(self) -> set[str]:
        """The names that the module's own statements bind."""
        found: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return found

    def homes(self, name: str) -> list[str]:
        """The modules in which a lazy face looks for a name; empty where the module itself has it."""
        if self.face is None or name in self.bound:
            return []
        tables = (node for node in ast.walk(self.tree) if isinstance(node, ast.Dict))
        for key, value in (pair for table in tables for pair in zip(table.keys, table.values, strict=True)):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and name in str(value.value).split():
                return [str(key.value), f"{self.name}.{key.value}"]
        texts = [node.value for node in ast.walk(self.face) if isinstance(node, ast.Constant)]
        inside = [target for node in _imports(self.face, functions=True) for target in _targets(node)]
        return [text for text in texts if isinstance(text, str) and text.startswith("ludic")] + inside


class Tree:
    """The modules of `src/ludic` and of the plug-ins."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        tops = [root / "src" / "ludic", *sorted((root / "plugins").glob("*/ludic_*"))]
        self.modules = {module.name: module for top in tops for module in _modules(top)}

    def core(self) -> list[Module]:
        """The modules of `ludic` without `ludic.minimal`."""
        return [
            module for name, module in self.modules.items() if is_in(name, "ludic") and not is_in(name, "ludic.minimal")
        ]

    def packages(self) -> list[str]:
        return sorted({name.partition(".")[0] for name in self.modules})

    def named(self, node: ast.AST) -> set[str]:
        """The modules that an import statement names; of a lazy face, those in which it finds the names."""
        found: set[str] = set()
        for target in _targets(node):
            found |= self._find(target)
        return found

    def _find(self, dotted: str, asked: frozenset[str] = frozenset()) -> set[str]:
        if dotted in self.modules or dotted in asked:
            return {dotted} & self.modules.keys()
        module, _, name = dotted.rpartition(".")
        if module not in self.modules:
            return self._find(module) if module else set()
        home = next((home for home in self.modules[module].homes(name) if self._inside(home)), None)
        if home is None:
            return {module}
        return {module} | self._find(f"{home}.{name}" if home in self.modules else home, asked | {dotted})

    def _inside(self, dotted: str) -> bool:
        return dotted in self.modules or dotted.rpartition(".")[0] in self.modules

    def closure(self, *starts: str) -> set[str]:
        """The modules that importing these loads: by statements outside of functions, with the packages around each."""
        reached: set[str] = set()
        waiting = [*starts]
        while waiting:
            parts = waiting.pop().split(".")
            for name in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & self.modules.keys() - reached:
                reached.add(name)
                waiting += [target for node in self.modules[name].loaded for target in self.named(node)]
        return reached

    def program(self, page: str = "docs/training.md") -> set[str]:
        """The closure of the first Python program of a page."""
        text = (self.root / page).read_text(encoding="utf-8")
        code = ast.parse(text.partition("```python\n")[2].partition("```")[0])
        return self.closure(*(name for node in _imports(code, functions=True) for name in self.named(node)))

    def lines(self, names: Iterable[str]) -> int:
        return sum(self.modules[name].lines for name in names)

    def arrows(self, functions: bool) -> dict[str, set[str]]:
        """What each module names in its imports, itself and the packages around a module not counted."""
        return {
            name: {t for node in (m.all_imports if functions else m.loaded) for t in self.named(node)} - {name}
            for name, m in self.modules.items()
        }

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


def _imports(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _imports(other, functions)
        elif functions or not isinstance(child, Function | ast.Lambda):
            yield from _imports(child, functions)


def _targets(node: ast.AST) -> list[str]:
    """The dotted names that an import statement asks for."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, largest first (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        path.append(name)
        for target in sorted(arrows[name]):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in path:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            start = path.index(name)
            found.append(sorted(path[start:]))
            del path[start:]

    for name in sorted(arrows):
        if name not in order:
            visit(name)
    return sorted((group for group in found if len(group) > 1), key=len, reverse=True)


def parameters(modules: Iterable[Module]) -> tuple[int, str]:
    """The most parameters of a function, without self, *args and **kwargs, and its name."""
    most = (0, "")
    for module in modules:
        for node in ast.walk(module.tree):
            inside = node.body if isinstance(node, ast.ClassDef | ast.Module) else []
            owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for function in (each for each in inside if isinstance(each, Function) and not _is_kernel(each)):
                names = [
                    each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
                ]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                most = max(most, (count, f"{module.name}.{owner}{function.name}"))
    return most


def _is_kernel(function: Function) -> bool:
    """Whether it is in Triton's language, whose functions take each pointer and stride by itself."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def public_definitions(modules: Iterable[Module]) -> int:
    """Classes and functions at the top of a module whose names have no underscore in front."""
    top = (node for module in modules for node in module.tree.body)
    return sum(isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") for node in top)


def docstrings(modules: Iterable[Module]) -> tuple[int, int]:
    """(fragments, all): texts that document a module, class, function or attribute, and those that begin in mid-sentence."""
    texts = [text for module in modules for text in _docstrings(module.tree)]
    return sum(bool(FRAGMENTS.match(text.strip())) for text in texts), len(texts)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(node, Function | ast.ClassDef | ast.Module) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def config_errors(tree: Tree) -> int:
    """Number of `raise ConfigError` in `ludic.run`."""
    inside = (node for name, m in tree.modules.items() if is_in(name, "ludic.run") for node in ast.walk(m.tree))
    return sum(isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise ConfigError") for node in inside)


def rows(tree: Tree) -> Iterator[tuple[str, object, str]]:
    """(what is counted, number, target) for each line of the table."""
    every, core = tree.modules.values(), tree.core()
    yield "lines", tree.lines(tree.modules), "84,000"
    yield "files", len(tree.modules), "460"
    yield "lines of the core", sum(module.lines for module in core), "42,000"
    yield "files of the core", len(core), ""
    for package in tree.packages():
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
