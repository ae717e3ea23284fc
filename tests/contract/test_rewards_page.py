"""docs/rewards.md: its program prints what it says, its table leaves no scorer out."""

import pytest

from ludic import rewards
from ludic.rewards import shaping
from tests.contract.pages import BLOCK, DOCS, run

pytestmark = pytest.mark.docs

PAGE = (DOCS / "rewards.md").read_text()


@pytest.mark.extended(
    covered_by="tests/unit/run/test_reward_settings.py::test_a_run_scores_its_episodes_logs_each_component_and_keeps_its_settings"
)
def test_the_program_prints_what_the_page_says(tmp_path):
    (code,) = (text for kind, text in BLOCK.findall(PAGE) if kind == "python")
    (promised,) = (text for kind, text in BLOCK.findall(PAGE) if kind == "text")
    assert run("python", code, tmp_path) == promised


def test_every_scorer_is_on_the_page():
    scorers = [name for part in (rewards, shaping) for name, made in vars(part).items() if hasattr(made, "score")]
    assert {"LengthPenalty", "FunctionScorer"} <= set(scorers)
    assert [name for name in scorers if f"`{name}(" not in PAGE and name != "Scorer"] == []
