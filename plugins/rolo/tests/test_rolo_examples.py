"""The two programs of rolo on a tiny model and their own small budgets: what they print, log and keep."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.models.loading import load_model
from ludic.types import ConfigError, SamplingParams
from rolo import (
    Action,
    CompletionOutput,
    GRPOTrainer,
    Message,
    RenderedPrompt,
    RolloutGenerator,
    State,
    Step,
    Trajectory,
)
from rolo.examples import gsm8k, musique_search
from rolo.library import ChatRenderer, ClientPolicy, make_model
from rolo.local_backend import with_adapter
from tests import warm_python

pytestmark = pytest.mark.slow

WORDS = ["What", "is", "plus", "?", *(rf"\boxed{{{number}}}" for number in range(2, 7))]
PARAGRAPHS = [
    {"title": "Ada", "text": "Ada was born in Oslo.", "is_supporting": True},
    {"title": "Oslo", "text": "Oslo lies in Norway.", "is_supporting": True},
    {"title": "Tea", "text": "Tea is a drink.", "is_supporting": False},
]


def start(program, *arguments: object) -> None:
    program.main(tyro.cli(program.Settings, args=[str(argument) for argument in arguments]))


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# --- gsm8k ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solver(tmp_path_factory) -> Path:
    from ludic.models.loading import tiny_llama, word_tokenizer

    folder = tmp_path_factory.mktemp("models") / "solver"
    tokenizer = word_tokenizer(WORDS)
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=32, layers=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"What is {a} plus {b} ?", "answer": f"#### {a + b}"} for a in (1, 2, 3) for b in (1, 2, 3)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_gsm8k_trains_evaluates_keeps_the_best_and_prints_the_table_of_the_seed(solver, sums, tmp_path, capsys):
    run_dir = tmp_path / "run"
    start(
        gsm8k, "--model-name", solver, "--data", sums, "--eval-data", sums, "--run-dir", run_dir, "--batch-size", 4,
        "--samples-per-prompt", 8, "--max-steps", 3, "--eval-on-start", "--eval-every-steps", 1, "--eval-limit", 5,
        "--save-best-checkpoint", "--max-tokens", 4, "--learning-rate", 1e-2,
    )  # fmt: skip
    rows = rows_of(run_dir)
    updates = [row for row in rows if "train/reward" in row]
    assert [row["step"] for row in updates] == [1, 2, 3] and any(row.get("train/grad_norm", 0) > 0 for row in updates)
    assert any(0 < row["train/boxed"] < 1 for row in updates)
    evaluations = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 1, 2, 3]
    printed = capsys.readouterr().out
    assert "9 problems to train on, 5 held out" in printed and "| Step | Eval accuracy | Pass@8 |" in printed
    table = re.findall(r"^\| (\d) \| ([\d.]+)% \| (\d+)% \|$", printed, flags=re.MULTILINE)
    assert [(int(step), float(share)) for step, share, _ in table] == [
        (row["step"], pytest.approx(100 * row["eval/accuracy"], abs=0.06)) for row in evaluations
    ]
    best = json.loads((run_dir / "best.json").read_text())
    assert best["eval/accuracy"] == max(row["eval/accuracy"] for row in evaluations)
    assert (Path(best["path"]) / "model.safetensors").exists() and list(run_dir.glob("events.out.tfevents*"))


def answered(text: str, *, is_cut_off: bool = False) -> Trajectory:
    step = Step(
        State(()), Action(Message("assistant", text), is_cut_off), CompletionOutput(RenderedPrompt([1]), [2], [-1.0])
    )
    return Trajectory((step,), is_finished=True)


@pytest.mark.parametrize(
    ("text", "value", "is_boxed"),
    [
        (r"It is \boxed{1,000}.", 1.0, True),
        (r"\boxed{500 + 500}", 1.0, True),
        (r"\boxed{\$1000.00}", 1.0, True),
        (r"\boxed{999}", 0.1, True),
        ("1000", 0.0, False),
        ("", 0.0, False),
    ],
)
def test_a_boxed_answer_is_right_when_it_means_the_same_and_the_format_alone_earns_a_little(text, value, is_boxed):
    reward = gsm8k.GSM8KReward(for_format=0.1).score({"question": "?", "answer": "so #### 1,000"}, answered(text))
    assert (reward.value, reward.is_correct) == (value, value == 1.0)
    assert reward.metrics == {"boxed": float(is_boxed), "cut_off": 0.0}
    strict = gsm8k.GSM8KReward(for_format=0.0).score({"question": "?", "answer": "#### 1000"}, answered(text))
    assert strict.value == float(strict.is_correct)


def test_an_answer_that_was_cut_off_is_wrong_and_the_worked_problem_is_right():
    example = {"question": "?", "answer": "#### 22"}
    worked = gsm8k.WORKED_PROBLEM[1].content
    assert gsm8k.GSM8KReward().score(example, answered(worked)).is_correct
    assert gsm8k.GSM8KReward().score(example, answered(worked, is_cut_off=True)).value == 0.0
    roles = [m.role for m in gsm8k.GSM8KEnvBuilder().build(example).start().messages]
    assert roles == ["system", "user", "assistant", "user"]


def test_problems_of_another_form_are_named_before_a_model_is_loaded(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "?", "answer": "42"}\n')
    with pytest.raises(ConfigError, match="Problem 0 is not of GSM8K's form: .*####"):
        start(gsm8k, "--data", tmp_path / "bad.jsonl", "--eval-limit", 0, "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_mistyped_flag_or_file_ends_the_program_with_one_line(tmp_path):
    command = [
        warm_python.executable(),
        "-m",
        "rolo.examples.gsm8k",
        "--data",
        str(tmp_path / "none.jsonl"),
        "--eval-limit",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and re.fullmatch(r"gsm8k: Cannot read .*none\.jsonl.*\n", done.stderr)
    done = subprocess.run([*command, "--batchsize", "4"], capture_output=True, text=True)
    assert done.returncode == 2 and "--batch-size" in done.stderr


def test_an_interrupted_run_ends_with_one_line(solver, sums, tmp_path, monkeypatch):
    async def interrupted(trainer):
        raise KeyboardInterrupt

    monkeypatch.setattr(GRPOTrainer, "train", interrupted)
    arguments = ["--model-name", solver, "--data", sums, "--eval-data", sums, "--run-dir", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["gsm8k", *map(str, arguments)])
    with pytest.raises(SystemExit, match="^gsm8k: interrupted"):
        runpy.run_path(gsm8k.__file__, run_name="__main__")


# --- musique_search -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "musique.jsonl"
    rows = [
        {"id": str(n), "question": "In which country was Ada born?", "answer": "Norway", "paragraphs": PARAGRAPHS}
        for n in range(6)
    ]
    rows.insert(1, {**rows[0], "answerable": False})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_musique_search_runs_with_the_flags_of_the_seed(questions, tmp_path, capsys):
    run_dir = tmp_path / "run"
    start(
        musique_search, "--model-name", "tiny", "--data", questions, "--run-dir", run_dir, "--batch-size", 2,
        "--samples-per-prompt", 2, "--max-turns", 2, "--learning-rate", 8e-5, "--max-tokens", 8, "--train-limit", 4,
        "--eval-limit", 16, "--eval-every-steps", 1,
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "4 questions to train on, 2 held out" in printed, "one has no answer, and is left out"
    assert re.search(r"step +2: accuracy 0\.0%", printed)
    assert [row["step"] for row in rows_of(run_dir)] == [1, 1, 2, 2], "each question once"


def test_an_adapter_is_what_is_trained_when_a_rank_is_given(questions):
    pytest.importorskip("peft")
    settings = tyro.cli(
        musique_search.Settings, args=["--model-name", "tiny", "--lora-rank", "2", "--data", str(questions)]
    )
    model = make_model(settings.backend, vars(settings))
    try:
        trained = [name for name, parameter in model.trainer.model.named_parameters() if parameter.requires_grad]
        assert trained and all("lora_" in name for name in trained)
    finally:
        model.close()


def test_the_seed_decides_the_adapters_first_weights():
    pytest.importorskip("peft")
    first, second = (dict(with_adapter(load_model("tiny"), 2, seed=5).model.named_parameters()) for _ in range(2))
    assert first and all(bool((first[name] == second[name]).all()) for name in first)


def search_for(query: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'


async def play(*replies: str, max_turns: int = 4):
    template = ByteTemplate(tool_parser=HermesToolParser())
    generator = RolloutGenerator(
        env_builder=musique_search.SearchEnvBuilder(),
        renderer=ChatRenderer(template, template.decode_reply),
        max_turns=max_turns,
    )
    example = {"id": "1", "question": "In which country was Ada born?", "answer": "Norway", "paragraphs": PARAGRAPHS}
    policy = ClientPolicy(ScriptedClient(replies), SamplingParams(temperature=1.0, max_tokens=200))
    [[trajectory]] = await generator.generate([example], policy=policy, samples_per_prompt=1)
    return trajectory, musique_search.AnswerReward().score(example, trajectory)


async def test_two_searches_and_the_right_answer_earn_everything():
    trajectory, reward = await play(search_for("Ada born"), search_for("Oslo"), "<answer>Norway</answer>")
    found = [m.content for m in trajectory.steps[-1].state.messages if m.role == "tool"]
    assert "Ada was born in Oslo." in found[0] and "Oslo lies in Norway." in found[1]
    assert (reward.value, reward.is_correct) == (1.0, True) and reward.metrics["searches"] == 2


async def test_searching_in_circles_costs_and_an_answer_that_never_comes_is_worth_nothing():
    _, reward = await play(search_for("Ada"), search_for("the ada!"), "<answer>Norway</answer>")
    assert reward.value == pytest.approx(0.9) and reward.is_correct and reward.metrics["repeated"] == 1
    trajectory, reward = await play(*[search_for("Ada")] * 3, max_turns=3)
    assert not trajectory.is_finished and reward.value == pytest.approx(-0.2) and reward.metrics["answered"] == 0


async def test_a_half_right_answer_earns_its_shared_words_and_a_wrong_call_is_told_so():
    _, reward = await play("<answer>Norway, I think</answer>")
    assert reward.value == pytest.approx(0.25) and not reward.is_correct  # F1 of 1 of 3 words: 2 / 4
    trajectory, reward = await play('<tool_call>{"name": "search", "arguments": {"k": 3}}</tool_call>', "no idea")
    assert "the only tool is search" in trajectory.steps[-1].state.messages[-1].content
    assert reward.value == 0.0 and reward.metrics["answered"] == 0
