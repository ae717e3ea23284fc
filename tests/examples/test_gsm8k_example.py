"""The single-file GSM8K program on a tiny model: the flags of the seed, what it prints and what it leaves behind."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ludic.types import LudicError

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "gsm8k" / "gsm8k.py"
WORDS = ["What", "is", "plus", "?", *(rf"\boxed{{{number}}}" for number in range(2, 7))]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_program", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def start(program: ModuleType, *arguments: object) -> None:
    program.main(program.tyro.cli(program.Settings, args=[str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from ludic.models.tiny import tiny_llama, word_tokenizer

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
    run_dir = tmp_path / "run"
    start(
        program, "--model-name", model, "--data", questions, "--eval-data", questions, "--run-dir", run_dir,
        "--batch-size", 4, "--samples-per-prompt", 8, "--max-steps", 3, "--eval-on-start", "--eval-every-steps", 1,
        "--eval-limit", 5, "--save-best-checkpoint", "--max-tokens", 2, "--max-seq-len", 256, "--learning-rate", 1e-2,
    )  # fmt: skip
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "train/grad_norm" in row]
    assert [row["step"] for row in updates] == [1, 2, 3] and any(row["train/grad_norm"] > 0 for row in updates)
    assert all(row["train/num_rollouts"] == 32 for row in updates)
    evaluations = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 1, 2, 3]
    assert all(row["eval/accuracy"] <= row["eval/pass@8"] and row["eval/num_samples"] == 40 for row in evaluations)

    printed = capsys.readouterr().out
    assert "9 questions to train on, 5 held out" in printed
    table = re.findall(r"^ +(\d)  +([\d.]+)%  +([\d.]+)%$", printed, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in table] == [0, 1, 2, 3] and "step  accuracy  pass@8" in printed
    best = Path(re.search(r"The best checkpoint is (\S+)", printed)[1])
    saved = {row["step"]: row["eval/accuracy"] for row in evaluations[1:]}
    assert saved[int(best.name.removeprefix("step_"))] == max(saved.values())
    assert (best / "model.safetensors").exists() and (run_dir / "model" / "model.safetensors").exists()


def test_a_conversation_begins_with_one_worked_problem_whose_answer_is_right(program):
    context = program.OneShot()
    context.reset(system_prompt="Solve it.")
    context.on_env_reset("How many?", {})
    shown = context.on_before_act()
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert shown[-1]["content"] == "How many?"
    assert int(program.boxed_parser(shown[2]["content"]).action) == 6 * 12 - 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.jsonl", "--run-dir", "{new}"], "Cannot read --data nowhere.jsonl"),
        (["--data", "{wrong}", "--run-dir", "{new}"], "{wrong} is not lines of"),
        (["--samples-per-prompt", "1", "--run-dir", "{new}"], "two answers to compare"),
        (
            ["--data", "x.jsonl", "--save-best-checkpoint", "--run-dir", "{new}"],
            "--save-best-checkpoint needs evaluations",
        ),
        (["--run-dir", "{used}"], "There is a run in {used} already"),
    ],
)
def test_a_mistake_is_named_before_anything_is_computed(program, arguments, message, tmp_path):
    places = {"new": tmp_path / "new", "used": tmp_path / "used", "wrong": tmp_path / "wrong.jsonl"}
    places["used"].mkdir()
    (places["used"] / "metrics.jsonl").write_text("")
    places["wrong"].write_text('{"problem": "What is 1 plus 1 ?"}\n')
    with pytest.raises(LudicError, match=re.escape(message.format(**places))):
        start(program, *(argument.format(**places) for argument in arguments))


def test_without_files_the_questions_come_from_the_hub_through_datasets(program, tmp_path, monkeypatch):
    """A stand-in for the package: there is no hub here."""
    asked = []

    def load_dataset(*arguments: str, split: str) -> list[dict]:
        asked.append((*arguments, split))
        return [{"question": "What is 1 plus 1 ?", "answer": "#### 2"}]

    stand_in = ModuleType("datasets")
    stand_in.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert program.load_questions(None, "test") == [
        {"id": "test:0", "question": "What is 1 plus 1 ?", "answer": "#### 2"}
    ]
    assert asked == [("openai/gsm8k", "main", "test")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LudicError, match=r"ludic-rl\[datasets\]"):
        program.load_questions(None, "train")
