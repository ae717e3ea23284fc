"""Runs the tutorials and writes what they show: `python scripts/tutorials.py [NAME …]`.

A tutorial is a script in tutorials/ in cells: `# %%` begins code, `# %% [markdown]` (and the beginning of the file) text. Each is
run in an empty folder, cell by cell, and becomes a page in docs/tutorials and a notebook beside the script, with what each cell
printed. `STEPS` in the environment makes a run shorter.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER, PAGES = ROOT / "tutorials", ROOT / "docs" / "tutorials"


class Cell(NamedTuple):
    """A piece of a tutorial."""

    is_code: bool
    text: str


def cells(script: str) -> list[Cell]:
    """The cells of a script, text without its comment signs."""
    found: list[Cell] = []
    for part in ("# %% [markdown]\n" + script).split("# %%")[1:]:
        if part.startswith(" [markdown]\n"):
            lines = part.removeprefix(" [markdown]\n").strip().splitlines()
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
        else:
            text = part.strip()
        if text:
            found.append(Cell(not part.startswith(" [markdown]\n"), text))
    return found


def run(script: str) -> list[str]:
    """What each cell printed; text prints nothing. Runs in this process, in the current folder."""
    names = {"__name__": "__main__"}
    printed = []
    for cell in cells(script):
        out = io.StringIO()
        if cell.is_code:
            with contextlib.redirect_stdout(out):
                exec(compile(cell.text, "<tutorial>", "exec"), names)  # our own file
        printed.append(out.getvalue())
    return printed


def page(script: str, printed: list[str], name: str) -> str:
    """The tutorial as Markdown."""
    blocks = []
    for cell, out in zip(cells(script), printed, strict=True):
        blocks.append(f"```python\n{cell.text}\n```" if cell.is_code else cell.text)
        if out:
            blocks.append(f"```text\n{out.rstrip()}\n```")
    source = f"[Script](../../tutorials/{name}.py), [notebook](../../tutorials/{name}.ipynb)."
    return "\n\n".join([blocks[0], source, *blocks[1:]]) + "\n"


def notebook(script: str, printed: list[str]) -> str:
    """The tutorial as a Jupyter notebook. Links of the page lead out of docs/tutorials; the notebook is elsewhere."""
    made = []
    for number, (cell, out) in enumerate(zip(cells(script), printed, strict=True)):
        text = (
            cell.text
            if cell.is_code
            else re.sub(r"\]\(\.\./(\.\./)?", lambda up: "](../" if up[1] else "](../docs/", cell.text)
        )
        common = {"id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        if not cell.is_code:
            made.append({"cell_type": "markdown", **common})
            continue
        shown = [{"output_type": "stream", "name": "stdout", "text": out.splitlines(keepends=True)}] if out else []
        made.append({"cell_type": "code", "execution_count": None, "outputs": shown, **common})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def main(args: list[str]) -> int:
    if args[:1] == ["--run"]:  # in the folder and the process made for it
        sys.stderr.write(json.dumps(run((FOLDER / f"{args[1]}.py").read_text())))
        return 0
    PAGES.mkdir(exist_ok=True)
    for path in sorted(FOLDER.glob("*.py")):
        if args and path.stem not in args:
            continue
        with tempfile.TemporaryDirectory() as folder:
            own = [sys.executable, str(Path(__file__).resolve()), "--run", path.stem]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
            done = subprocess.run(own, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return 1
        script, printed = path.read_text(), json.loads(done.stderr.splitlines()[-1])
        (PAGES / f"{path.stem}.md").write_text(page(script, printed, path.stem))
        path.with_suffix(".ipynb").write_text(notebook(script, printed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
