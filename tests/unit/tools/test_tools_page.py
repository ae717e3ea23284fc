"""docs/tools.md: its programs run and print what it says."""

import pytest

from tests.contract.pages import BLOCK, DOCS, run

pytestmark = pytest.mark.docs

PAGE = (DOCS / "tools.md").read_text()


def test_the_programs_of_the_page_print_what_it_says(tmp_path):
    blocks = BLOCK.findall(PAGE)
    program = "\n".join(text for kind, text in blocks if kind == "python")
    promised = "".join(text for kind, text in blocks if kind == "text")
    assert program.count("print(") == 2
    assert run("python", program, tmp_path).strip() == promised.strip()
