"""Draws the packages of ludic and what each imports as a Mermaid diagram, into docs/overview.md between two markers.

    python scripts/draw_structure.py            rewrites the picture
    python scripts/draw_structure.py --check    fails if the picture is not what the imports say (a contract test calls it)

An arrow means "imports"; arrows that follow from others are left out, and so are those to `types`, `tasks`, `registry` and
`catalog`, which every package may import. What a package is for is the first sentence of its docstring.
"""
# ruff: noqa: T201 - a script prints

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "ludic", ROOT / "docs" / "overview.md"
BEGIN, END = "<!-- structure: made by scripts/draw_structure.py -->", "<!-- end of structure -->"
FLOOR = {"types", "tasks", "registry", "catalog"}
ABOVE = SOURCE / "gateway" / "training.py"
"""Uses `run`, which imports its package; the package loads it when one of its names is used."""


def packages() -> dict[str, Path]:
    inside = [path for path in SOURCE.iterdir() if (path / "__init__.py").is_file() or path.suffix == ".py"]
    return {path.stem: path for path in inside if not path.stem.startswith("_")}


def imports_of(path: Path, names: set[str]) -> set[str]:
    """The packages that the files of a package import, at their top or inside functions."""
    found = set()
    for file in [path] if path.is_file() else {*path.rglob("*.py")} - {ABOVE}:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {alias.name for alias in node.names} if node.module == "ludic" else set()
                found |= {node.module.split(".")[1]} if node.module.startswith("ludic.") else set()
            elif isinstance(node, ast.Import):
                found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ludic.")}
    return found & names - {path.stem} - FLOOR


def without_implied(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leaves out an arrow where a longer way leads to the same package."""

    def reached(name: str) -> set[str]:
        return set().union(*({target} | reached(target) for target in arrows[name])) if arrows[name] else set()

    return {
        name: {t for t in targets if not any(t in reached(other) for other in targets - {t})}
        for name, targets in arrows.items()
    }


def picture() -> str:
    known = packages()
    # cli is the top; lazy names of inference, distributed and training that lead up are exempt.
    arrows = {name: imports_of(path, set(known)) for name, path in known.items() if name not in FLOOR}
    for name, targets in arrows.items():
        targets -= {other for other in targets if name in arrows.get(other, ())}
    arrows = without_implied(arrows)
    lines = ["```mermaid", "graph TD"]
    lines += [f"  {name} --> {' & '.join(sorted(arrows[name]))}" for name in sorted(arrows) if arrows[name]]
    lowest = " & ".join(name for name in sorted(arrows) if not arrows[name])
    lines += [f'  {lowest} --> floor["{", ".join(sorted(FLOOR))}"]']
    return "\n".join([*lines, "```"])


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{picture()}\n{END}{after}"
    if "--check" in sys.argv:
        if new != page:
            sys.exit(f"{PAGE} does not show the imports as they are; run python scripts/draw_structure.py.")
    else:
        PAGE.write_text(new, encoding="utf-8")
        print(f"{PAGE}: {picture().count('-->')} lines of arrows")


if __name__ == "__main__":
    main()
