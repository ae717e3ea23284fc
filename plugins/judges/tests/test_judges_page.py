"""docs/judges.md: its program prints what it says, and no judge is left out."""

import ludic_judges as judges
from tests.contract.pages import BLOCK, DOCS, run

PAGE = (DOCS / "judges.md").read_text()


def test_the_program_prints_what_the_page_says(tmp_path):
    (language, code), (_, promised) = BLOCK.findall(PAGE.split("## With tools")[0])
    assert run(language, code, tmp_path) == promised


def test_every_judge_is_on_the_page():
    scorers = [name for name in judges.__all__ if hasattr(getattr(judges, name), "score")]
    assert {"LLMJudge", "RubricJudge", "GroupJudge", "PairwiseJudge"} == set(scorers) - {"LazyJudge"}
    assert [name for name in scorers if f"`{name}(" not in PAGE and name != "LazyJudge"] == []
