"""docs/evaluation.md: its program runs. Every number that an evaluation reports is explained."""

import re

import pytest

from ludic.eval import Grading, evaluate
from ludic.eval.report import METRICS
from tests.contract.pages import BLOCK, DOCS, run
from tests.unit.eval.quiz import questions, quiz_engine

pytestmark = pytest.mark.docs

PAGE = (DOCS / "evaluation.md").read_text()


def test_the_program_of_the_page_runs(tmp_path):
    blocks = [text for kind, text in BLOCK.findall(PAGE) if kind == "python"]
    printed = run("python", "\n".join(blocks), tmp_path)
    share, rest = printed.splitlines()
    assert re.fullmatch(r"0\.\d\d \[0\.\d\d, 0\.\d\d\]", share)
    assert rest.endswith("40 records")


async def test_every_metric_is_explained():
    engine = quiz_engine(lambda question: "<a>yes</a>" if question == "q0" else "<a>no</a>")
    asked = questions([("q0", "yes"), ("q1", "yes")], samples=2)
    report = await evaluate(engine, asked, grading=Grading(pass_k=(2,), majority_k=(2,)))
    names = {re.sub(r"@\d+", "@k", re.sub(r"_(low|high)$", "", name)) for name in report.metrics}
    assert names - METRICS.keys() == set()
