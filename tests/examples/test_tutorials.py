"""Every tutorial runs, in small; its page and its notebook are made of its cells."""

import json
from pathlib import Path

import pytest

from scripts import tutorials as script
from tests import forked, warm_python

pytestmark = pytest.mark.docs

pytest.importorskip("peft", reason="the lora extra is not installed")

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "tutorials").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_runs(name, tmp_path):
    if name.startswith("2_"):
        pytest.importorskip("openai", reason="the extra agents is not installed")
    python = warm_python.executable()
    environment = {"STEPS": "1", "MODEL": "tiny", warm_python.STAYS: python}
    process = forked.python(ROOT / "tutorials" / f"{name}.py", cwd=tmp_path, environment=environment, executable=python)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out, "it prints something"


@pytest.mark.parametrize("name", NAMES)
def test_page_and_notebook_have_the_cells_of_the_script(name):
    cells = script.cells((ROOT / "tutorials" / f"{name}.py").read_text())
    page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
    notebook = json.loads((ROOT / "tutorials" / f"{name}.ipynb").read_text())
    assert all(cell.text in page for cell in cells)
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code == [cell.text for cell in cells if cell.is_code]
    assert len(notebook["cells"]) == len(cells) and any(cell.get("outputs") for cell in notebook["cells"])


def test_cells_are_code_and_text():
    made = "# # Title\n#\n# Words.\n\n# %%\nx = 1\nprint(x)\n\n# %% [markdown]\n# More [words](../a.md).\n"
    cells = script.cells(made)
    assert [(cell.is_code, cell.text) for cell in cells] == [
        (False, "# Title\n\nWords."),
        (True, "x = 1\nprint(x)"),
        (False, "More [words](../a.md)."),
    ]
    printed = script.run(made)
    assert printed == ["", "1\n", ""]
    assert "```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```" in script.page(made, printed, "t")
    assert "](../docs/a.md)" in script.notebook(made, printed)
