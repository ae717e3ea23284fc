"""benchmarks/judge_agreement.py: the numbers of judges whose answers are known, and the whole script on a tiny model."""

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from benchmarks import judge_agreement

from ludic.types import Rollout
from plugins.judges.tests.cases import judge_model, rollout, section_in
from plugins.judges.tests.test_group_judges import shown

SAMPLES = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(4)]


def replies() -> tuple[list[Rollout], list[bool]]:
    """Two replies to each question, the first right and the second wrong; both to the last question are wrong."""
    made, correct = [], []
    for number, sample in enumerate(SAMPLES):
        for is_right in (number < 3, False):
            answer = 2 * number if is_right else 99
            made.append(rollout(f"The answer is {answer}", task=sample["question"]))
            made[-1].meta["request_meta"] = {"sample_index": number, "group_id": str(number)}
            correct.append(is_right)
    return made, correct


def is_right(prompt: str, reply: str) -> bool:
    number = int(re.search(r"What is (\d+)", section_in(prompt, "task"))[1])
    return reply == f"The answer is {2 * number}"


def all_knowing(prompt: str) -> str:
    rest: dict[str, object] = {"reason": "Worked out."}
    if '"winner"' in prompt:
        (_, a), (_, b) = shown(prompt)
        rest["winner"] = "tie" if is_right(prompt, a) == is_right(prompt, b) else "A" if is_right(prompt, a) else "B"
    elif '"ranking"' in prompt:
        rest["ranking"] = [label for label, _ in sorted(shown(prompt), key=lambda pair: not is_right(prompt, pair[1]))]
    else:
        rest["score"] = int(is_right(prompt, section_in(prompt, "reply")))
    return json.dumps({"mark": "MARK", **rest})


@pytest.mark.parametrize("kind", judge_agreement.KINDS)
async def test_a_judge_that_knows_everything_agrees_with_the_gold_answers(kind):
    rollouts, correct = replies()
    row = await judge_agreement.measure(kind, judge_model(all_knowing), rollouts, correct, SAMPLES)
    assert row.pairs == 1.0 and len(row.cells()) == len(judge_agreement.HEAD)
    if kind in ("pairwise", "ranking"):
        assert row.num == 6 and row.found is None, "only questions with right and wrong replies"
        assert -1 <= row.metrics["judge/position_bias"] <= 1
    else:
        assert row.num == 8 and (row.found.accuracy, row.found.kappa) == (1.0, 1.0)


async def test_the_judge_with_the_reference_sees_the_gold_answer():
    seen = []

    def rule(prompt):
        seen.append(section_in(prompt, "right answer"))
        return all_knowing(prompt)

    await judge_agreement.measure("reference", judge_model(rule), *replies(), SAMPLES)
    assert sorted(set(seen)) == ["0", "2", "4", "6"]


async def test_a_judge_without_verdicts_is_counted_as_failed(capsys):
    rollouts, correct = replies()
    row = await judge_agreement.measure(
        "alone", judge_model(lambda _: "yes", max_retries=0), rollouts, correct, SAMPLES
    )
    assert row.found is None and row.pairs is None and row.metrics["judge/failed"] == 8
    assert "no verdict: The judge fake gave no readable verdict" in capsys.readouterr().err
    assert "100.0%" in row.cells()


@pytest.mark.integration
def test_the_script_runs_on_a_tiny_model(tmp_path: Path, capsys, monkeypatch):
    data, out = tmp_path / "questions.jsonl", tmp_path / "numbers.json"
    data.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES[:1]))
    command = ["judge_agreement.py", "--model", "tiny", "--data", str(data), "--episodes", "1", "--samples", "2",
               "--max-tokens", "4", "--judge-tokens", "4", "--retries", "0", "--judges", "alone", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    judge_agreement.main()
    assert "2 replies to 1 questions, 0.0% right" in capsys.readouterr().out
    (facts,) = json.loads(out.read_text())
    assert facts["judge"] == "alone" and facts["judge/calls"] + facts["judge/cache_hits"] >= 1
