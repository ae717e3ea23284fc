"""The search and the delegation example on a tiny model, in this process: torch is loaded once for all of them."""

import json
import re
from pathlib import Path

import pytest

from ludic.types import LudicError, Rollout, load_rollouts
from tests import programs
from tests.data import read_jsonl

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("bm25s", reason="the search extra is not installed")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SEARCH, DELEGATE = "musique_search/train_musique_search.py", "delegation/delegate_musique.py"


def called(name: str, **arguments: str) -> str:
    """A call without spaces: to a tokenizer of words it is one."""
    text = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{text}</tool_call>"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """It has never learned anything, but all that it can say are calls, answers and a few words."""
    from ludic.models.loading import tiny_llama, word_tokenizer

    words = [
        "<answer>Paris</answer>", "<answer>blue</answer>", called("search", query="Ada"), called("search", query="Paris"),
        called("delegate", to="searcher", task="Ada?"), "Ada",
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "talker"
    tokenizer = word_tokenizer(words)
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=32, layers=1, max_length=1024).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    paragraphs = [
        {"title": "Ada", "text": "Ada was born in Paris.", "is_supporting": True},
        {"title": "Sky", "text": "The sky is blue.", "is_supporting": False},
    ]
    rows = [
        {
            "id": str(n),
            "question": f"Where was Ada born, asked for the time {n} ?",
            "answer": "Paris",
            "paragraphs": paragraphs,
        }
        for n in range(6)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def run(capsys):
    def run_example(script: str, *arguments: object) -> str:
        assert programs.load(EXAMPLES / script).main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return run_example


def test_a_search_agent_is_trained_and_evaluated(run, model, questions, tmp_path):
    printed = run(
        SEARCH, "--model", model, "--data", questions, "--runs", tmp_path, "--name", "run", "--train-limit", 4,
        "--eval-limit", 2, "--rollouts-per-update", 16, "--group-size", 8, "--turns", 3, "--max-tokens", 32, "--lr", 1e-2,
        "--lora-rank", 0, "--max-seq-len", 1024, "--steps", 2, "--logger", "none",
    )  # fmt: skip
    out = tmp_path / "run"
    assert "4 questions to train on, 2 held out" in printed
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/grad_norm" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    assert any(row.get("train/grad_norm", 0) > 0 for row in rows)
    assert (out / "checkpoints" / "step_000002" / "model.safetensors").exists()
    rollouts = list(load_rollouts(out / "rollouts" / "from_step_000000.jsonl.gz"))
    assert len(rollouts) == 2 * 2 * 8
    searches = [step for rollout in rollouts for step in rollout.agent_steps if step.action_target == "internal"]
    assert any("Ada was born in Paris." in result["content"] for step in searches for result in step.tool_results)
    assert all(step.trace.completion_logprobs is not None for step in searches)
    assert max(len(rollout.agent_steps) for rollout in rollouts) == 3, "--turns is the number of model calls"


def families(path: Path) -> tuple[list[Rollout], list[Rollout]]:
    rollouts = list(load_rollouts(path))
    return (
        [rollout for rollout in rollouts if "parent_rollout_id" not in rollout.meta],
        [rollout for rollout in rollouts if "parent_rollout_id" in rollout.meta],
    )


def test_the_oracle_delegates_every_step_of_real_questions_and_is_right(run, tmp_path):
    rows = read_jsonl("musique")[:24]
    (tmp_path / "q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    printed = run(DELEGATE, "--data", tmp_path / "q.jsonl", "--limit", 24, "--out", tmp_path / "families.jsonl")
    assert re.search(r"reward +1\.000\nright +100\.0%", printed)
    parents, children = families(tmp_path / "families.jsonl")
    of_child = {child.id: child for child in children}
    for parent in parents:
        row = rows[parent.meta["request_meta"]["sample_index"]]
        own = [of_child[id] for id in parent.meta["child_rollout_ids"]]
        found = [child.env_steps[0].parsed_action for child in own]
        assert found == [hop["answer"] for hop in row["decomposition"]]
        assert all(child.agent_steps[0].tool_results[0]["content"].startswith("# ") for child in own)


def test_a_model_is_trained_as_parent_and_as_child(run, model, questions, tmp_path):
    arguments = [
        DELEGATE, "--data", questions, "--model", model, "--max-tokens", 32, "--runs", tmp_path, "--name", "run",
        "--lr", 1e-2, "--max-seq-len", 1024, "--rollouts-per-update", 8, "--logger", "none",
    ]  # fmt: skip
    run(*arguments, "--player", "train", "--steps", 2)
    out = tmp_path / "run"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and any(row["train/grad_norm"] > 0 for row in rows)
    parents, children = families(out / "rollouts" / "from_step_000000.jsonl.gz")
    assert len(parents) == 2 * 2 * 4 and children and {child.meta["delegate"] for child in children} == {"searcher"}
    assert "questions             6" in run(*arguments, "--player", "model", "--eval-episodes", 6)


def test_children_get_the_weight_of_their_parent():
    module = programs.load(EXAMPLES / DELEGATE)

    class Halves:
        def compute(self, rollouts):
            assert [rollout.id for rollout in rollouts] == ["p"], "children are not compared with parents"
            return {("p", 0): 0.5}

    child = Rollout(id="c", steps=[FakeStep(0), FakeStep(1)], meta={"parent_rollout_id": "p"})
    orphan = Rollout(id="o", steps=[FakeStep(0)], meta={"parent_rollout_id": "failed"})
    weights = module.FamilyCredit(Halves()).compute([Rollout(id="p", steps=[FakeStep(0)]), child, orphan])
    assert weights == {("p", 0): 0.5, ("c", 0): 0.5, ("c", 1): 0.5, ("o", 0): 0.0}


class FakeStep:
    def __init__(self, index: int) -> None:
        self.index = index


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (SEARCH, ["--data", "{empty}"], "--data {empty} is empty"),
        (SEARCH, ["--data", "{empty}", "--turns", "0"], "--turns 0; each must be at least 1"),
        (SEARCH, ["--data", "{one}"], "'paragraphs' is missing"),
        (DELEGATE, ["--data", "{broken}"], "of {broken} is not JSON"),
        (DELEGATE, [], "Give --data"),
    ],
    ids=str,
)
def test_a_mistake_is_named_before_anything_is_computed(script, arguments, message, tmp_path):
    places = {name: tmp_path / name for name in ("empty", "one", "broken")}
    places["empty"].write_text("\n")
    places["broken"].write_text('{"question": \n')
    places["one"].write_text('{"question": "?"}\n')
    module = programs.load(EXAMPLES / script)
    with pytest.raises(LudicError, match=re.escape(message.format(**places))):
        module.main([argument.format(**places) for argument in arguments])
