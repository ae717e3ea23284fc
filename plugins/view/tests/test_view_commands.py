"""`ludic view --json/--export`, `ludic show` and `ludic plot` on a recorded run and on hostile text."""

import json
from pathlib import Path

import pytest

from ludic.cli.main import find_command
from ludic.types import ConfigError
from ludic.util.line_writer import LineWriter
from ludic_view.plot import chart, points_of
from plugins.view.tests.conftest import private_cache, recorded  # noqa: F401 - fixtures
from plugins.view.tests.test_index import empty_run, line_of

pytestmark = pytest.mark.slow


@pytest.fixture
def said(capsys):
    def call(*args: object) -> str:
        assert find_command([str(args[0])])([str(arg) for arg in args[1:]]) == 0
        return capsys.readouterr().out

    return call


def test_json_prints_the_answer_of_a_path(said, recorded):  # noqa: F811
    found = json.loads(said("view", recorded, "--json", "/api/runs/letters/steps"))
    assert [row["step"] for row in found["steps"]] == [1, 2, 3]
    assert json.loads(said("view", recorded / "letters", "--json", "/api/runs"))["runs"][0]["id"] == "letters"


def test_export_writes_one_file_with_whole_groups(said, recorded, tmp_path):  # noqa: F811
    file = tmp_path / "page.html"
    assert "Written" in said("view", recorded / "letters", "--export", file)
    assert "Spell abc." in file.read_text()


def test_export_takes_one_run(recorded, tmp_path):  # noqa: F811
    LineWriter(tmp_path / "a" / "rollouts" / "x.jsonl").append(line_of(0))
    LineWriter(tmp_path / "b" / "rollouts" / "x.jsonl").append(line_of(0))
    with pytest.raises(ConfigError, match="has: a, b"):
        find_command(["view"])([str(tmp_path), "--export", str(tmp_path / "page.html")])


def test_show_lists_updates_and_what_looks_wrong(said, recorded):  # noqa: F811
    text = said("show", recorded / "letters")
    assert "finished, 3 of 3 updates" in text and "--worst" in text and "\x1b" not in text


def test_show_counts_as_unreadable_what_was_read_to_its_end(said, tmp_path):
    lines = [json.loads(line_of(number)) for number in range(4)]
    for line, reason in zip(lines[:3], ("length", "length", "stop"), strict=True):
        line["steps"][0]["info"] = {"parse_error": True}
        line["steps"][0]["trace"]["finish_reason"] = reason
    text = "".join(json.dumps(line) + "\n" for line in lines)
    LineWriter(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl").append(text.encode())
    row = next(line.split() for line in said("show", tmp_path / "x").splitlines() if line.startswith("1 "))
    assert row[-3:] == ["2", "1", "0"], "cut off, unreadable, failed"


def test_show_lists_the_rollouts_of_an_update(said, recorded):  # noqa: F811
    text = said("show", recorded / "letters", "--step", 2)
    assert text.count("Spell abc.") == 2 and text.count("tokens") == 8


@pytest.mark.parametrize("flag", ["--worst", "--best"])
def test_show_prints_a_rollout_turn_by_turn(said, recorded, flag):  # noqa: F811
    text = said("show", recorded / "letters", flag)
    assert "[user] Spell abc." in text and "turn 2" in text and "credit" in text and "[reply]" in text
    id = text.split()[1].rstrip(":")
    assert said("show", recorded / "letters", "--rollout", id[-6:]) == text


def test_show_reads_one_file_of_rollouts(said, recorded, tmp_path):  # noqa: F811
    (file, *_) = sorted((recorded / "letters" / "rollouts").glob("*.jsonl*"))
    text = said("show", file)
    assert f"{file}: " in text and " rollouts" in text and "ludic view" not in text
    assert "rollout " in said("show", file, "--worst") and "[reply]" in said("show", file, "--best")
    (tmp_path / "other.jsonl").write_text('{"no": "rollout"}\n')
    with pytest.raises(ConfigError, match="holds no rollouts"):
        find_command(["show"])([str(tmp_path / "other.jsonl")])


def test_show_follows_a_task(said, recorded):  # noqa: F811
    task = json.loads(said("view", recorded, "--json", "/api/runs/letters/tasks"))["tasks"][0]["task"]
    text = said("show", recorded / "letters", "--task", task)
    assert [f"update     {n}: rewards" in text for n in (1, 2, 3)] == [True] * 3


def test_text_of_a_model_cannot_control_the_terminal(said, tmp_path):
    empty_run(tmp_path / "x")
    hostile = "\x1b[2J\x1b]0;gone\x07[red]bold[/red]\x9b31m\u202eabc"
    LineWriter(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl").append(line_of(0, text=hostile))
    for args in ([], ["--step", 1], ["--best"]):
        text = said("show", tmp_path / "x", *args)
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert "[red]bold[/red]" in text


def test_roles_tasks_and_ids_cannot_control_the_terminal(said, tmp_path):
    empty_run(tmp_path / "x")
    row = json.loads(line_of(0))
    row["id"] = "[/red]\x1b[2J"
    row["meta"]["task_id"] = "task\x1b]0;gone\x07"
    row["steps"][0]["prompt_messages"] = [{"role": "user\x1b[31m", "content": "hello"}]
    LineWriter(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl").append(json.dumps(row).encode() + b"\n")
    for args in (["--step", 1], ["--best"], ["--task", row["meta"]["task_id"]]):
        text = said("show", tmp_path / "x", *args)
        assert "\x1b" not in text and "\x07" not in text and "�" in text, args


def test_show_of_a_failed_episode_has_its_traceback(said, tmp_path):
    empty_run(tmp_path / "x")
    row = json.loads(line_of(0))
    row["failure"] = {
        "error": "KeyError",
        "message": "'x'",
        "traceback": "File env.py, line 3",
        "user_traceback": "",
        "place": "",
    }
    LineWriter(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl").append(json.dumps(row).encode() + b"\n")
    assert "File env.py, line 3" in said("show", tmp_path / "x", "--failed")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["leters"], "Did you mean .*letters"),
        (["letters", "--step", "99"], "it has 1 to 3"),
        (["letters", "--rollout", "zzz"], "no rollout has it"),
        (["letters", "--failed"], "No rollout"),
        (["letters", "--task", "nope"], "There are 1, such as"),
    ],
)
def test_mistakes_are_answered_with_what_there_is(recorded, args, message):  # noqa: F811
    with pytest.raises(ConfigError, match=message):
        find_command(["show"])([str(recorded / args[0]), *args[1:]])


def test_name_is_looked_for_in_runs(said, recorded, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(recorded)
    assert "3 updates" in said("show", "letters")
    with pytest.raises(ConfigError, match="Runs in runs: .*letters"):
        find_command(["show"])(["other"])


# --- plot ---------------------------------------------------------------------------------------------------------


def test_plot_draws_a_curve_per_run_in_the_terminal(said, recorded, tmp_path):  # noqa: F811
    text = said("plot", recorded / "letters", "--metric", "train/entropy")
    assert text.count("•") == 4 and "train/entropy" in text and "letters:" in text  # three steps and the legend


def test_plot_writes_a_picture(said, recorded, tmp_path):  # noqa: F811
    pytest.importorskip("matplotlib")
    out = tmp_path / "curve.png"
    assert f"Written: {out}" in said("plot", recorded / "letters", "--out", out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_picture_of_evaluations_has_their_intervals(said, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"step": n, "eval/step": n, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
        for n in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said("plot", tmp_path / "metrics.jsonl", "--out", tmp_path / "curve.svg")
    assert "95 %" in (tmp_path / "curve.svg").read_text() or (tmp_path / "curve.svg").stat().st_size > 1000


def test_runs_that_differ_in_their_seed_are_one_curve(said, tmp_path):
    pytest.importorskip("matplotlib")
    for run, values in {"a_0": [1, 2, 3], "a_1": [3, 4], "b": [5, 6]}.items():
        rows = [{"step": step, "train/loss": value} for step, value in enumerate(values, start=1)]
        (tmp_path / f"{run}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [tmp_path / f"{run}.jsonl" for run in ("a_0", "a_1", "b")]
    text = said("plot", *files, "--metric", "train/loss", "--seeds")
    assert "a: 2 → 3" in text and "b: 5 → 6" in text  # the third step is a_0's alone
    assert "Written" in said("plot", *files, "--metric", "train/loss", "--seeds", "--out", tmp_path / "curve.png")


@pytest.mark.slow
def test_plot_against_the_seconds_that_updates_took(said, tmp_path):
    pytest.importorskip("matplotlib")
    start = {"step": 0, "eval/step": 0.0, "eval/accuracy": 0.1}
    for run, seconds in {"quick": 2.0, "slow": 30.0}.items():
        updates = [{"step": step, "perf/step_s": seconds} for step in (1, 2, 3)]
        rows = [start, *updates, {"step": 3, "eval/step": 3.0, "eval/accuracy": 0.5}]
        (tmp_path / f"{run}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [tmp_path / "quick.jsonl", tmp_path / "slow.jsonl"]
    axis = said("plot", *files, "--x", "seconds").splitlines()[-4]
    assert axis.split() == ["0", "90"]
    assert "Written" in said("plot", *files, "--x", "seconds", "--out", tmp_path / "curve.png")
    (tmp_path / "quick.jsonl").write_text(json.dumps({"step": 1, "eval/accuracy": 0.1}) + "\n")
    with pytest.raises(ConfigError, match="--x seconds needs perf/step_s"):
        find_command(["plot"])([str(files[0]), "--x", "seconds"])


def test_seeds_without_a_common_step_are_refused(tmp_path):
    for run, step in {"a_0": 1, "a_1": 2, "b": 1}.items():
        (tmp_path / f"{run}.jsonl").write_text(json.dumps({"step": step, "train/loss": 1.0}) + "\n")
    files = [str(tmp_path / f"{run}.jsonl") for run in ("a_0", "a_1", "b")]
    for more in ([], ["--out", str(tmp_path / "curve.png")]):
        with pytest.raises(ConfigError, match="The runs of a have no step of train/loss in common"):
            find_command(["plot"])([*files, "--metric", "train/loss", "--seeds", *more])


def test_plot_of_an_unknown_metric_says_what_there_is(recorded):  # noqa: F811
    with pytest.raises(ConfigError, match=r"No run has train/los\. There are: .*train/loss"):
        find_command(["plot"])([str(recorded / "letters"), "--metric", "train/los"])


def test_evaluations_are_drawn_at_the_step_that_they_evaluated():
    rows = [{"step": 7, "eval/step": 5.0, "eval/accuracy": 0.5}, {"step": 8, "train/loss": 1.0}]
    assert points_of(rows, "eval/accuracy") == [(5, 0.5)] and points_of(rows, "train/loss") == [(8, 1.0)]


@pytest.mark.parametrize(
    "points", [[(1, 0.0)], [(0, 1.0), (1, 1.0)], [(n, float(n)) for n in range(1000)], [(5, -1e9), (6, 1e9)]]
)
def test_chart_fits_its_width_and_marks_lowest_and_highest(points):
    lines = chart("x", {"a": points}, 60)
    assert max(map(len, lines)) <= 60
    if len(points) > 2:
        assert lines[1].rstrip().endswith("•") and "│•" in lines[12]
