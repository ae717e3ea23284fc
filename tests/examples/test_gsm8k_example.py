"""The GSM8K program on a tiny model: what it prints and what it leaves behind; the worked solutions as rollouts."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ludic.parsers import boxed_parser
from ludic.types import LudicError, load_rollouts
from tests import programs

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "gsm8k" / "gsm8k.py"
WORDS = ["What", "is", "plus", "?", *(rf"\boxed{{{number}}}" for number in range(2, 7))]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return programs.load(SCRIPT)


def start(program: ModuleType, *arguments: object) -> None:
    assert program.main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from ludic.models.loading import tiny_llama, word_tokenizer

    folder = tmp_path_factory.mktemp("models") / "solver"
    tokenizer = word_tokenizer(WORDS)
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=32, layers=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"What is {a} plus {b} ?", "answer": f"#### {a + b}"} for a in (1, 2, 3) for b in (1, 2, 3)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_it_trains_evaluates_and_keeps_the_best_checkpoint(program, model, questions, tmp_path, capsys):
    start(
        program, "--model", model, "--data", questions, "--eval-data", questions, "--runs", tmp_path, "--name", "run",
        "--rollouts-per-update", 32, "--steps", 3, "--eval-at-start", "--eval-every", 1, "--eval-episodes", 5,
        "--checkpoint-every", 1, "--max-tokens", 2, "--max-seq-len", 256, "--lr", 1e-2, "--logger", "none",
    )  # fmt: skip
    run_dir = tmp_path / "run"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "train/grad_norm" in row]
    assert [row["step"] for row in updates] == [1, 2, 3] and any(row["train/grad_norm"] > 0 for row in updates)
    assert all(row["train/num_rollouts"] == 32 for row in updates)
    evaluations = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 1, 2, 3]
    assert all(row["eval/accuracy"] <= row["eval/pass@8"] and row["eval/num_samples"] == 40 for row in evaluations)

    printed = capsys.readouterr().out
    table = re.findall(r"^ +(\d)  +([\d.]+)%  +([\d.]+)%$", printed, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in table] == [0, 1, 2, 3] and "step  accuracy  pass@8" in printed
    best = Path(re.search(r"The best checkpoint is (\S+)", printed)[1])
    saved = {row["step"]: row["eval/accuracy"] for row in evaluations[1:]}
    assert saved[int(best.name.removeprefix("step_"))] == max(saved.values())
    assert (best / "model.safetensors").exists()


def test_a_conversation_begins_with_one_worked_problem_whose_answer_is_right(program):
    context = program.OneShot()
    context.reset(system_prompt="Solve it.")
    context.on_env_reset("How many?", {})
    shown = context.on_before_act()
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert shown[-1]["content"] == "How many?"
    assert int(boxed_parser(shown[2]["content"]).action) == 6 * 12 - 50


def test_without_files_the_questions_come_from_the_hub_through_datasets(program, tmp_path, monkeypatch):
    """A stand-in for the package: there is no hub here."""
    asked = []

    def load_dataset(*arguments: str, split: str) -> list[dict]:
        asked.append((*arguments, split))
        return [{"question": "What is 1 plus 1 ?", "answer": "#### 2"}]

    stand_in = ModuleType("datasets")
    stand_in.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    start(program, "--dry-run", "--runs", tmp_path)
    assert ("openai/gsm8k", "main", "train") in asked
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LudicError, match=r"ludic-rl\[datasets\]"):
        start(program, "--dry-run", "--runs", tmp_path)


def test_worked_solutions_become_rollouts_that_are_graded_right(questions, tmp_path, capsys):
    solutions = programs.load(SCRIPT.with_name("solutions.py"))
    row = {"question": "one\u2028two\x85three", "answer": "<<1+2=3>>3\n#### 3"}  # any character but a line feed
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    solutions.main(data=questions, output=tmp_path / "out.jsonl")
    assert "1 of 1 solutions are graded right" in capsys.readouterr().out
    (rollout,) = load_rollouts(tmp_path / "out.jsonl")
    assert rollout.agent_steps[0].action == "3\n#### 3" and rollout.env_steps[0].prev_obs == row["question"]
    with pytest.raises(LudicError, match="exists already"):
        solutions.main(data=questions, output=tmp_path / "out.jsonl")
