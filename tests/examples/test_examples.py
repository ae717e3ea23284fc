"""Every example as a separate process, on a tiny model, within 30 seconds: what it prints and what it writes.

The steps depend on each other as they do for a person: games are generated, learned from, improved on, evaluated.
"""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from types import ModuleType

import pytest

from ludic.types import LudicError, load_rollouts
from ludic_view.api import answer
from ludic_view.index import Runs
from tests import forked, programs

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("peft", reason="the lora extra is not installed")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
BUDGET_S = 30
# One core is what is sure; a shared machine can be several times slower than its clock.
PATIENCE_S = 4 * BUDGET_S
GAME = ["--view", "compact"]
RL = "tic_tac_toe/train_tic_tac_toe.py"


def begin(script: str, *arguments: object) -> forked.Forked:
    return forked.python(EXAMPLES / script, *arguments, environment={"COLUMNS": "200"})


def start(script: str, *arguments: object) -> subprocess.CompletedProcess:
    process = begin(script, *arguments)
    out, err = process.communicate(PATIENCE_S)
    return subprocess.CompletedProcess(script, process.wait(), out, err)


def run(script: str, *arguments: object) -> str:
    done = start(script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(script: str, *arguments: object) -> str:
    """The one line in which a script says what is wrong."""
    done = start(script, *arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def save_tiny(words: list[str], folder: Path) -> Path:
    from ludic.models.loading import tiny_llama, word_tokenizer

    tokenizer = word_tokenizer(words)
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=32, layers=2).save_pretrained(folder)
    return folder


# --- tic-tac-toe, from nothing to an evaluation ---


@pytest.fixture(scope="module")
def player(tmp_path_factory) -> Path:
    """A model that has never seen the game."""
    from ludic.envs.tic_tac_toe.board import COMPACT_WORDS

    return save_tiny(list(COMPACT_WORDS), tmp_path_factory.mktemp("models") / "player")


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> tuple[Path, str]:
    """(wins of perfect play, what was printed)."""
    path = tmp_path_factory.mktemp("data") / "games.jsonl"
    printed = run("tic_tac_toe/generate_synth_data.py", *GAME, "--episodes", 120, "--output", path)
    return path, printed


@pytest.fixture(scope="module")
def taught(player, games, tmp_path_factory) -> tuple[Path, str]:
    """(run folder after SFT, what was printed)."""
    out = tmp_path_factory.mktemp("sft") / "run"
    settings = ["--batch-size", 32, "--epochs", 4, "--lr", 5e-3, "--max-seq-len", 256]
    printed = run("sft.py", "--data", games[0], "--model", player, "--out", out, *settings)
    return out, printed


@pytest.fixture(scope="module")
def trained(taught, tmp_path_factory) -> tuple[Path, str]:
    """(run folder after two steps of RL, what was printed)."""
    out = tmp_path_factory.mktemp("rl") / "run"
    return out, run(RL, *rl_settings(taught[0], out), "--steps", 2)


def rl_settings(sft: Path, out: Path) -> list[object]:
    return [
        "--model", sft, "--runs", out.parent, "--name", out.name, "--set", "view=compact", "--rollouts-per-update", 16,
        "--group-size", 4, "--max-tokens", 4, "--max-seq-len", 256, "--eval-every", 2, "--eval-episodes", 20,
        "--checkpoint-every", 1, "--logger", "print",
    ]  # fmt: skip


def test_generate_synth_data_keeps_exactly_the_wins(games):
    path, printed = games
    kept = list(load_rollouts(path))
    counted = re.search(r"120 games: \{'win': (\d+), 'draw': (\d+)\}", printed)
    assert len(kept) == int(counted[1]) and int(counted[1]) + int(counted[2]) == 120  # perfect play never loses
    assert {rollout.env_steps[-1].info["result"] for rollout in kept} == {"win"}
    assert f"are in {path}" in printed
    assert {rollout.env_steps[0].prev_obs.split()[0] for rollout in kept} == {"X", "O"}


def test_sft_learns_to_name_cells(taught):
    out, printed = taught
    losses = [row["train/nll_mean"] for row in metrics(out)]
    assert losses[-1] < losses[0] / 2
    assert re.search(r"\d+ rollouts, \d+ replies: \d+ steps of 32", printed)
    assert f"The model is in {out}/checkpoints/step_{len(losses):06d}" in printed


def test_train_writes_metrics_checkpoints_and_games(trained):
    out, printed = trained
    rows = metrics(out)
    assert [row["step"] for row in rows if "train/avg_total_reward" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval/win_rate" in row] == [0, 2]
    assert (out / "checkpoints" / "step_000002" / "adapter_model.safetensors").exists()
    played = list(load_rollouts(out / "rollouts" / "from_step_000000.jsonl.gz"))
    assert len(played) == 32 and all(step.trace.completion_logprobs is not None for step in played[0].agent_steps)
    assert {rollout.env_steps[0].prev_obs.split()[0] for rollout in played if rollout.env_steps} == {"X", "O"}
    assert "eval/illegal_move_rate" in printed and f"Run folder: {out}" in printed


def test_train_resumes_where_it_stopped(taught, trained):
    out, _ = trained
    again = rl_settings(taught[0], out)
    refused = refusal(RL, *again, "--steps", 2)
    assert "2 updates of it saved" in refused and "train_tic_tac_toe.py" in refused and "--resume` goes on" in refused
    run(RL, *again, "--steps", 3, "--resume")
    steps = [row["step"] for row in metrics(out) if "train/avg_total_reward" in row]
    assert steps == [1, 2, 3]


def test_eval_compares_models_on_the_same_games(player, trained, tmp_path):
    printed = run(
        "tic_tac_toe/eval_tic_tac_toe.py", "--model", player, trained[0], *GAME, "--max-tokens", 4,
        "--episodes", 40, "--out", tmp_path / "games.jsonl",
    )  # fmt: skip
    rates = {
        name: [tuple(map(float, cell)) for cell in re.findall(r"(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]", line)]
        for line in printed.splitlines()
        for name in re.findall(r"│ (\w+) +│", line)
    }
    assert rates.keys() >= {
        "win_rate", "draw_rate", "loss_rate", "illegal_move_rate", "parse_error_rate", "truncation_rate",
        "optimal_move_rate", "mean_reward",
    }  # fmt: skip
    for cells in rates.values():
        assert all(low <= share <= high for share, low, high in cells)
    assert rates["parse_error_rate"][0] > rates["parse_error_rate"][1]  # it has learned to name cells
    assert 0 < rates["optimal_move_rate"][-1][0] < 1 - rates["illegal_move_rate"][1][0] / 5  # five moves at most
    first, second = seeds_of(tmp_path / "games.jsonl", 40)
    assert first == second


def test_perfect_play_is_optimal_throughout_and_random_play_is_not(games, tmp_path, monkeypatch):
    script = load("tic_tac_toe/eval_tic_tac_toe.py", monkeypatch)
    assert {script.optimal_share(rollout, "compact") for rollout in load_rollouts(games[0])} == {1.0}
    flags = ["--player", "random", "--keep", "all", "--episodes", 60, "--output", tmp_path / "r"]
    run("tic_tac_toe/generate_synth_data.py", *GAME, *flags)
    shares = [script.optimal_share(rollout, "compact") for rollout in load_rollouts(tmp_path / "r")]
    assert 0.3 < sum(shares) / 60 < 0.9 and min(shares) < 0.5


def seeds_of(path: Path, per_model: int) -> tuple[list[int], list[int]]:
    seeds = [rollout.meta["env_seed"] for rollout in load_rollouts(path)]
    return seeds[:per_model], seeds[per_model:]


async def test_rejection_sampling_keeps_what_earned_enough_in_tokens_that_train(trained, tmp_path):
    path = tmp_path / "kept.jsonl"
    printed = run(
        "rejection_sampling.py", "--model", trained[0], "--set", "view=compact", "--max-tokens", 4,
        "--eval-episodes", 40, "--min-reward", 0.0, "--output", path,
    )  # fmt: skip
    kept = list(load_rollouts(path))
    assert f"kept {len(kept)} of 40" in printed and 0 < len(kept) < 40
    assert all(rollout.total_reward >= 0 for rollout in kept)

    from ludic.batch_gen import OfflineBatchSource
    from ludic.training import make_sft

    sampled = sum(len(step.trace.completion_token_ids) for rollout in kept for step in rollout.agent_steps)
    batches = [batch async for batch in OfflineBatchSource(path, algorithm=make_sft()).iter_epoch()]
    assert sum(item.num_action_tokens for batch in batches for item in batch.items) == sampled


# --- the first run ---


NUM_UPDATES = 12
"""Of the first run; enough that it can be interrupted."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[Path, int, str, int]:
    """(run folder, exit code, what was printed, updates done) of a first run after Ctrl-C."""
    out = tmp_path_factory.mktemp("first") / "run"
    small = ["--synth-games", 40, "--warm-up-steps", 5, "--updates", NUM_UPDATES, "--groups", 2, "--group-size", 4,
             "--eval-games", 20]  # fmt: skip
    process = begin("tic_tac_toe/first_run.py", "--out", out, *small)
    lines = out / "metrics.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed = "".join(process.communicate(timeout=PATIENCE_S))
    return out, process.wait(), printed, len(metrics(out))


@pytest.fixture(scope="module")
def finished(interrupted) -> tuple[Path, subprocess.CompletedProcess]:
    """(run folder, what was printed) of the same run, gone on with to its end."""
    out, *_ = interrupted
    return out, start("tic_tac_toe/first_run.py", "--resume", out)


def test_a_first_run_that_is_interrupted_says_how_to_go_on_and_does(interrupted, finished):
    out, code, printed, num_done = interrupted
    assert code == 130 and f"--resume {out}" in printed
    assert "Traceback" not in printed and "it/s]" not in printed  # nor progress bars of other libraries
    assert 2 <= num_done < NUM_UPDATES
    assert "updates cannot be changed" in refusal("tic_tac_toe/first_run.py", "--resume", out, "--updates", 7)
    _, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in metrics(out)] == list(range(1, NUM_UPDATES + 1))


def test_the_first_run_ends_with_a_plain_statement_and_never_writes_over_another(finished):
    out, done = finished
    assert done.returncode == 0, done.stderr
    assert re.search(
        rf"20 games as X against a random opponent, before and after {NUM_UPDATES} updates of GRPO", done.stdout
    )
    share, interval = r"+[\d.]+%", r" \[[\d.]+%, [\d.]+%\]"
    for name in ("win", "draw", "loss", "illegal move", "unreadable"):
        assert re.search(rf"  {name} {share}{interval} {share}{interval}", done.stdout), done.stdout
    assert re.search(r"Win rate [\d.]+% → [\d.]+%, illegal moves [\d.]+% → [\d.]+%, in [\d.]+ minutes", done.stdout)
    steps = [row["step"] for row in metrics(out)]
    assert steps == list(range(1, NUM_UPDATES + 1))
    checkpoint = re.search(r"ludic eval tic_tac_toe .*--model \S+/warm_up --model (\S+)", done.stdout)[1]
    assert (Path(checkpoint) / "model.safetensors").exists()
    assert "Traceback" not in done.stderr and "it/s]" not in done.stderr  # nor progress bars of other libraries
    assert f"  ludic view {out.parent}\n" in done.stdout
    seen = answer(Runs(out.parent), "/api/runs/run")
    facts = {
        "state": "finished",
        "env": "tic_tac_toe",
        "algo": "grpo",
        "steps_planned": NUM_UPDATES,
        "has_tokens": True,
    }
    assert {name: seen[name] for name in facts} == facts and seen["num_rollouts"] == 8 * NUM_UPDATES
    again = start("tic_tac_toe/first_run.py", "--resume", out)  # everything is there already
    assert again.returncode == 0 and [row["step"] for row in metrics(out)] == steps, again.stderr
    assert re.findall("^  win.*", again.stdout, re.MULTILINE) == re.findall("^  win.*", done.stdout, re.MULTILINE)


# --- what can go wrong ---


def load(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example as a module of this process: torch is loaded once for all the mistakes."""
    path = EXAMPLES / script
    monkeypatch.syspath_prepend(path.parent)
    return programs.load(path)


def test_a_missing_file_is_named_before_anything_is_computed(monkeypatch, tmp_path):
    with pytest.raises(LudicError, match=re.escape("no rollouts at nowhere.jsonl")):
        load("sft.py", monkeypatch).main(data=Path("nowhere.jsonl"), out=tmp_path / "new")
    with pytest.raises(LudicError, match=re.escape("no GGUF file at nowhere.gguf")):
        load("tic_tac_toe/eval_tic_tac_toe.py", monkeypatch).main(model=("nowhere.gguf",))


def test_a_mistake_is_one_line_on_the_terminal(games):
    line = refusal("tic_tac_toe/generate_synth_data.py", "--output", games[0])
    assert line == f"generate_synth_data: {games[0]} exists already. Move it away, or choose another --output."


def test_questions_without_a_file_need_datasets_and_say_so(tmp_path):
    """A stand-in on the path is what a machine without the package looks like."""
    (tmp_path / "datasets.py").write_text("raise ImportError('no datasets here')\n")
    process = forked.python(EXAMPLES / "gsm8k" / "solutions.py", environment={"PYTHONPATH": str(tmp_path)})
    _, errors = process.communicate(PATIENCE_S)
    assert process.returncode == 1 and "pip install 'ludic-rl[datasets] @ git" in errors and "--data" in errors


def test_every_example_is_in_the_table_and_says_what_it_shows_needs_and_takes():
    table = (EXAMPLES / "README.md").read_text()
    scripts = [path for path in EXAMPLES.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) >= 7
    for path in scripts:
        assert f"({path.relative_to(EXAMPLES).as_posix()})" in table, f"{path.name} is not in examples/README.md"
        header = path.read_text().split('"""')[1]
        assert all(f"\n{word}: " in header for word in ("Shows", "Needs", "Takes")), path.name
