"""docs/judges.md: its programs print what it says, and its tables leave no judge out."""

from ludic import judges
from tests.contract.pages import BLOCK, DOCS, run

PAGE = (DOCS / "judges.md").read_text()


def test_the_programs_print_what_the_page_says(tmp_path):
    blocks = [block for block in BLOCK.findall(PAGE) if block[0] != "bash"]
    assert len(blocks) >= 6 and [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2)
    for (language, code), (_, promised) in zip(blocks[::2], blocks[1::2], strict=True):
        assert run(language, code, tmp_path) == promised


def test_every_judge_is_on_the_page():
    scorers = [name for name in judges.__all__ if hasattr(getattr(judges, name), "score")]
    assert {"LLMJudge", "RubricJudge", "GroupJudge", "PairwiseJudge"} == set(scorers) - {"LazyJudge"}
    assert [name for name in scorers if f"`{name}(" not in PAGE and name != "LazyJudge"] == []
