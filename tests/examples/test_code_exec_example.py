"""The APPS example on a tiny model whose words are whole programs, in this process: torch is loaded once."""

import json
from pathlib import Path

import pytest

from ludic.types import LudicError, load_rollouts
from ludic_sandbox.bubblewrap import bubblewrap_problem
from tests import programs

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("peft", reason="the lora extra is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(bubblewrap_problem()), reason=bubblewrap_problem()),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "code_exec" / "train_apps.py"


def block(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from ludic.models.loading import tiny_llama, word_tokenizer

    words = [block("print(input())"), block("print(2 * int(input()))"), block("print("), "hello"]
    folder = tmp_path_factory.mktemp("models") / "programmer"
    tokenizer = word_tokenizer(words)
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=32, layers=1, max_length=512).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "apps.jsonl"
    tests = {
        "echo": {"inputs": ["7\n", "8\n"], "outputs": ["7\n", "8\n"]},
        "twice": {"inputs": ["7\n"], "outputs": ["14"]},
    }
    rows = [
        {
            "problem_id": name,
            "question": f"Write it {name} .",
            "input_output": json.dumps(pairs),
            "solutions": json.dumps(["print(input())" if name == "echo" else "print(2 * int(input()))"]),
        }
        for name, pairs in tests.items()
    ]
    rows.append(
        {"problem_id": 3, "question": "f", "input_output": json.dumps({"fn_name": "f", "inputs": [], "outputs": []})}
    )
    rows.append({"problem_id": 4, "question": "nothing to test", "input_output": ""})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def run(*arguments: object) -> None:
    assert programs.load(SCRIPT).main([str(argument) for argument in arguments]) == 0


def test_a_tiny_model_is_trained_on_programs_that_ran_in_the_sandbox(model, problems, tmp_path, capsys):
    arguments = [
        "--model", model, "--data", problems, "--eval-data", problems, "--runs", tmp_path, "--name", "run",
        "--rollouts-per-update", 16, "--max-tokens", 32, "--max-seq-len", 512, "--attempts", 2, "--lora-rank", 4,
        "--lr", 1e-2, "--algo-set", "kl_coeff=0.01", "--eval-at-start", "--eval-every", 2, "--timeout-per-test-s", 20,
        "--logger", "none",
    ]  # fmt: skip
    run(*arguments, "--steps", 2)
    printed, out = capsys.readouterr().out, tmp_path / "run"
    assert "2 of 4 problems are left out" in printed and "2 problems to train on, 2 held out" in printed
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/pass_rate" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    assert any(row.get("train/grad_norm", 0) > 0 for row in rows)
    assert (out / "checkpoints" / "step_000002" / "adapter_model.safetensors").exists()
    episodes = list(load_rollouts(out / "rollouts" / "from_step_000000.jsonl.gz"))
    assert len(episodes) == 32 and all(episode.failure is None for episode in episodes)
    graded = [step for episode in episodes for step in episode.env_steps]
    assert {step.info["correct"] for step in graded} == {True, False}
    assert any("Attempts left: 1" in (step.next_obs or "") for step in graded)


def test_problems_without_tests_are_refused(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "no tests"}\n')
    with pytest.raises(LudicError, match="None of the 1 problems"):
        run("--runs", tmp_path, "--data", tmp_path / "bad.jsonl")
