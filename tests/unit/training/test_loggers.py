"""Loggers, with the real packages behind them."""

import io
import json
import logging
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ludic.training.loggers import (
    JSONLLogger,
    PrintLogger,
    RichLiveLogger,
    TeeLogger,
    TensorBoardLogger,
    WandbLogger,
    read_metrics,
)
from ludic.training.loggers.rich_live import sparkline
from ludic.training.loggers.wandb import project_name
from ludic.types import ConfigError, MissingExtra
from tests.conftest import Fuzz

STATS = {"train/loss": 0.123456, "train/num_samples": 8.0, "eval/accuracy": 0.5, "perf/step_s": 1e-7}


def without_time(path: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "time"} for row in read_metrics(path)]


# --- print ------------------------------------------------------------------------------------------------------


def test_printed_lines_hold_a_few_numbers_each(capsys):
    PrintLogger(max_items_per_line=2).log(7, STATS)
    assert capsys.readouterr().out.splitlines() == [
        "[trainer] step 7 | train/loss 0.1235 | train/num_samples 8",
        "[trainer] step 7 | eval/accuracy 0.5000 | perf/step_s 1e-07",
    ]


def test_printed_keys_can_be_chosen_with_or_without_prefix():
    stream = io.StringIO()
    logger = PrintLogger("run", ["accuracy", "train/loss", "absent"], precision=3, percent=["accuracy"], stream=stream)
    logger.log(1, STATS)
    assert stream.getvalue() == "run step 1 | eval/accuracy 50.0% | train/loss 0.123\n"


def test_numbers_that_are_not_finite_can_be_printed():
    stream = io.StringIO()
    PrintLogger(stream=stream).log(1, {"a": math.nan, "b": math.inf, "c": -2e20})
    assert stream.getvalue() == "[trainer] step 1 | a nan | b inf | c -2e+20\n"


# --- jsonl ------------------------------------------------------------------------------------------------------


def test_every_line_is_there_as_soon_as_it_is_logged(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    logger = JSONLLogger(path)
    before = time.time()
    logger.log(1, {"train/loss": 0.1, "train/norm": math.inf})
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert before <= row.pop("time") <= time.time()
    assert row == {"step": 1, "train/loss": 0.1, "train/norm": None}
    logger.log(2, {"train/loss": 0.2})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_a_resumed_run_writes_each_step_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    interrupted = JSONLLogger(path)
    for step in range(1, 8):
        interrupted.log(step, {"train/x": step * 10.0})
        interrupted.log(step, {"eval/x": float(step)})
    interrupted.close()
    resumed = JSONLLogger(path, resume_step=5)
    for step in (6, 7, 8):
        resumed.log(step, {"train/x": step * 10.0})
    rows = without_time(path)
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8]
    assert rows[9] == {"step": 5, "eval/x": 5.0} and rows[10] == {"step": 6, "train/x": 60.0}
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_half_a_line_is_never_read_and_never_continued(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0}\n{"step": 2, "ti')
    assert without_time(path) == [{"step": 1}]
    JSONLLogger(path).log(2, {"train/x": 1.0})
    assert without_time(path) == [{"step": 1}, {"step": 2, "train/x": 1.0}]


def _log_without_end(path: Path) -> None:
    logger = JSONLLogger(path)
    step = 0
    while True:
        step += 1
        logger.log(step, {f"train/stat_{i}": step / (i + 1) for i in range(200)})


def test_a_killed_run_leaves_whole_lines_but_perhaps_the_last_which_is_not_read(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        writer = context.Process(target=_log_without_end, args=(path,))
        writer.start()
        size = path.stat().st_size if path.exists() else 0
        while not path.exists() or path.stat().st_size < size + 20_000:
            time.sleep(0.001)
        writer.kill()
        writer.join()
        *before, last = path.read_bytes().splitlines(keepends=True)
        assert all(line.endswith(b"\n") and len(json.loads(line)) == 202 for line in before)
        whole = len(before) + last.endswith(b"\n")  # a kill is heard between two pages of a line
        assert [len(row) for row in read_metrics(path)] == [202] * whole
        JSONLLogger(path).close()
        assert path.read_bytes().count(b"\n") == whole and path.read_bytes().endswith(b"\n")


def test_a_stat_that_would_hide_the_step_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="train/step"):
        JSONLLogger(tmp_path / "metrics.jsonl").log(1, {"step": 2.0})


DAMAGED_LINES = {
    "blank": b"\n",
    "zeros": bytes(40) + b"\n",
    "a zero in a line": b'{"step": 2, "ti\x00e": 0}\n',
    "half a line": b'{"step": 2, "ti\n',
    "no object": b"[2]\n",
    "no step": b'{"stap": 2, "time": 0}\n',
    "a step that is no number": b'{"step": "2", "time": 0}\n',
    "a stat that is no number": b'{"step": 2, "train/x": "1"}\n',
    "no text": b'{"step": 2, "tr\xff": 0}\n',
    "carriage returns": b'{"step": 2,\r"time"\r0}\n',
    "brackets without end": b"[" * 100_000 + b"\n",
    "endless digits": b'{"step": 2, "train/x": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("name", DAMAGED_LINES)
def test_a_damaged_line_is_left_out_with_a_warning_and_removed_by_resuming(tmp_path: Path, caplog, name: str):
    path = tmp_path / "metrics.jsonl"
    logger = JSONLLogger(path)
    logger.log(1, {"train/x": 1.0})
    with path.open("ab") as file:
        file.write(DAMAGED_LINES[name])
    logger.log(3, {"train/x": 3.0})
    logger.log(4, {"train/x": 4.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 3, 4]
    (warning,) = caplog.messages
    assert str(path) in warning and "1 damaged lines are left out, the first is line 2" in warning
    resumed = JSONLLogger(path)
    resumed.resume(3)
    resumed.log(4, {"train/x": 5.0})
    caplog.clear()
    assert [row["train/x"] for row in read_metrics(path)] == [1.0, 3.0, 5.0] and not caplog.messages


def test_fuzz_any_damage_costs_its_own_lines_only(tmp_path: Path, fuzz: Fuzz):
    whole = b"".join(b'{"step":%d,"time":17.5,"train/x":%d.25}\n' % (step, step) for step in range(1, 30))
    for case in range(fuzz.cases(200)):
        rng = fuzz.rng(case)
        content = bytearray(whole)
        place, length = rng.randrange(len(content)), rng.choice([1, 1, 1, 8, 80])
        touched = content[:place].count(b"\n"), content[: place + length].count(b"\n") + 1
        for position in range(place, min(place + length, len(content))):
            content[position] = rng.choice([0, content[position] ^ 1 << rng.randrange(8)])
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(content)
        logger = JSONLLogger(path, resume_step=99)
        found = [row.get("train/x") for row in read_metrics(path)]
        untouched = [step + 0.25 for step in range(1, 30) if not touched[0] <= step - 1 <= touched[1]]
        assert set(untouched) <= set(found), fuzz.at(case)
        logger.log(100, {"train/x": -1.0})
        assert [row.get("train/x") for row in read_metrics(path)] == [*found, -1.0], fuzz.at(case)
        logger.close()


def test_metrics_that_cannot_be_written_are_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"Cannot write metrics to .*metrics.jsonl: Is a directory"):
        JSONLLogger(tmp_path / "metrics.jsonl")


# --- tensorboard ------------------------------------------------------------------------------------------------


def read_scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.slow
def test_tensorboard_reads_what_was_logged_and_a_resumed_run_replaces_what_it_repeats(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    first = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": float(step)})
    first.close()
    assert read_scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    time.sleep(1.1)  # event files are ordered by the second in their names
    second = TensorBoardLogger(tmp_path)
    second.resume(1)
    second.log(2, {"train/loss": 20.0})
    second.close()
    assert read_scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 20.0)]


# --- wandb ------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format, after wandb's own 7 bytes: blocks of 32 KiB, and records that may continue in the next."""
    block, header, first_or_middle = 32 * 1024, 7, (2, 3)
    position, record = 7, b""
    while position + header <= len(content):
        if block - position % block < header:
            position += block - position % block
            continue
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        if position + header + size > len(content):
            return  # not written yet
        record += content[position + header : position + header + size]
        position += header + size
        if kind not in first_or_middle:
            yield record
            record = b""


def read_wandb_history(folder: Path) -> list[dict[str, float]]:
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = []
    deadline = time.monotonic() + 20
    while not records or records[-1].WhichOneof("record_type") != "exit":  # another process writes the file
        assert time.monotonic() < deadline, "wandb never finished its file"
        records = [wandb_internal_pb2.Record.FromString(data) for data in leveldb_records(file.read_bytes())]
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows


@pytest.mark.slow
def test_wandb_offline_writes_a_run_with_the_steps(tmp_path: Path, offline_wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "from-the-environment")
    logger = WandbLogger(name="a-run", config={"lr": 0.1}, dir=tmp_path, mode="offline")
    assert (logger._run.project, logger._run.name, dict(logger._run.config)) == (
        "from-the-environment",
        "a-run",
        {"lr": 0.1},
    )
    logger.log(3, {"train/loss": 0.5})
    logger.log(3, {"eval/accuracy": 0.25})
    logger.log(5, {"train/loss": 0.125})
    logger.close()
    rows = read_wandb_history(tmp_path)
    assert [row["_step"] for row in rows] == [3, 5]
    assert (rows[0]["train/loss"], rows[0]["eval/accuracy"], rows[1]["train/loss"]) == (0.5, 0.25, 0.125)


def test_the_wandb_project_is_ludic_unless_another_is_given(monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert project_name() == "Ludic"
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert (project_name(), project_name("mine")) == ("theirs", "mine")


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [(WandbLogger, "wandb", "wandb"), (lambda: TensorBoardLogger("x"), "torch.utils.tensorboard", "tensorboard")],
)
def test_a_missing_package_names_the_extra_to_install(monkeypatch, make, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"ludic-rl\[{extra}\]"):
        make()


# --- tee --------------------------------------------------------------------------------------------------------


class BrokenLogger:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step, stats) -> None:
        self.calls += 1
        stats.clear()
        raise RuntimeError("no network")


def test_a_failing_child_is_reported_once_and_harms_no_other(tmp_path: Path, caplog):
    broken, path = BrokenLogger(), tmp_path / "metrics.jsonl"
    jsonl = JSONLLogger(path)
    tee = TeeLogger(broken, jsonl)
    with caplog.at_level(logging.ERROR):
        for step in (1, 2, 3):
            tee.log(step, {"train/x": 1.0})
        tee.close()
    assert without_time(path) == [{"step": step, "train/x": 1.0} for step in (1, 2, 3)]
    assert broken.calls == 3
    (record,) = caplog.records
    assert "BrokenLogger" in record.getMessage() and "no network" in caplog.text
    assert jsonl._file.closed


def test_each_failing_child_is_reported(caplog):
    tee = TeeLogger(BrokenLogger(), BrokenLogger())
    tee.log(1, {})
    assert len(caplog.records) == 2


def test_a_tee_resumes_the_children_that_keep_records(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tee = TeeLogger(PrintLogger(stream=io.StringIO()), JSONLLogger(path))
    tee.log(1, {})
    tee.log(2, {})
    tee.resume(1)
    assert without_time(path) == [{"step": 1}]


# --- rich -------------------------------------------------------------------------------------------------------


def test_a_sparkline_spans_its_values():
    assert sparkline([0.0, 1.0, 7.0, 3.5]) == "▁▂█▅"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([0.0, math.nan, math.inf, 1.0]) == "▁  █"


def test_the_live_table_groups_by_prefix_keeps_rare_numbers_and_draws_the_reward():
    screen = io.StringIO()
    logger = RichLiveLogger(console=Console(file=screen, force_terminal=True, width=120), percent=["accuracy"])
    for step, reward in enumerate([0.0, 1.0, 0.5], start=1):
        evals = {"eval/accuracy": 0.25} if step == 1 else {}
        logger.log(step, {"train/avg_total_reward": reward, "train/loss": 0.5 / step, "perf/step_s": 2.0} | evals)
    screen.truncate(0)
    logger.log(4, {"train/avg_total_reward": 0.0})
    drawn = screen.getvalue()
    logger.close()
    for text in ("step 4", " train ", " eval ", " perf ", "25.00%", "0.1667", "▁█▅▁ 0 … 1"):
        assert text in drawn, text


def test_the_live_table_says_how_much_is_left(monkeypatch):
    screen = io.StringIO()
    clock = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr("ludic.training.loggers.rich_live.time.monotonic", lambda: next(clock))
    logger = RichLiveLogger(console=Console(file=screen, force_terminal=True, width=120), total_steps=11)
    logger.log(1, {"train/x": 1.0})
    logger.log(2, {"train/x": 1.0})  # ten seconds later, and nine more to go
    logger.close()
    assert "step 1 of 11" in screen.getvalue() and "step 2 of 11, 0:01:30 left" in screen.getvalue()


def test_without_a_terminal_there_are_plain_lines():
    file = io.StringIO()
    logger = RichLiveLogger(console=Console(file=file, width=20))
    logger.log(1, STATS)
    logger.close()
    assert file.getvalue() == (
        "[trainer] step 1 | train/loss 0.1235 | train/num_samples 8 | eval/accuracy 0.5000 | perf/step_s 1e-07\n"
    )


def test_closing_gives_the_cursor_back_and_may_be_repeated():
    screen = io.StringIO()
    logger = RichLiveLogger(console=Console(file=screen, force_terminal=True))
    logger.log(1, {"train/avg_total_reward": math.nan})
    logger.close()
    logger.close()
    assert screen.getvalue().count("\x1b[?25h") == 1


# --- between two steps ------------------------------------------------------------------------------------------


def test_keys_may_be_patterns_and_leave_out(capsys):
    stats = {"train/win_rate": 0.5, "train/parse_error_rate": 0.1, "eval/accuracy": 0.25, "eval/accuracy_low": 0.2}
    PrintLogger(keys=["accuracy", "*_rate", "!parse_error_rate"]).log(1, stats)
    assert capsys.readouterr().out == "[trainer] step 1 | eval/accuracy 0.2500 | train/win_rate 0.5000\n"


def test_what_is_going_on_is_written_now_and_then(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr("ludic.training.loggers.print.time.monotonic", lambda: now[0])
    file = io.StringIO()
    logger = TeeLogger(JSONLLogger(tmp_path / "metrics.jsonl"), RichLiveLogger(console=Console(file=file, width=99)))
    for second in range(40):
        now[0] = 100.0 + second
        logger.show_activity(f"playing for {second} s")
    assert file.getvalue() == "[trainer] playing for 15 s\n[trainer] playing for 30 s\n"


def test_the_live_table_shows_what_is_going_on_before_the_first_step_and_below_the_table():
    screen = io.StringIO()
    logger = RichLiveLogger(console=Console(file=screen, force_terminal=True, width=120))
    logger.show_activity("playing 3 of 8 episodes")
    assert "playing 3 of 8 episodes" in screen.getvalue()
    logger.log(1, {"train/x": 1.0})
    screen.truncate(0)
    logger.show_activity("playing 5 of 8 episodes")
    assert "step 1" in screen.getvalue() and "playing 5 of 8 episodes" in screen.getvalue()
    logger.close()


def test_a_result_that_no_longer_occurs_leaves_the_live_table():
    screen = io.StringIO()
    logger = RichLiveLogger(console=Console(file=screen, force_terminal=True, width=120))
    logger.log(1, {"train/solved_rate": 0.5, "train/loss": 1.0, "eval/win_rate": 0.75})
    screen.truncate(0)
    logger.log(2, {"train/timeout_rate": 1.0})
    logger.close()
    assert "solved" not in screen.getvalue() and "win_rate" in screen.getvalue() and "loss" in screen.getvalue()
