"""Loggers, with the real packages behind them."""

import contextlib
import io
import json
import logging
import math
import multiprocessing
import os
import resource
import signal
import sqlite3
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
    TrackioLogger,
    WandbLogger,
    read_metrics,
)
from ludic.types import ConfigError, MissingExtra
from tests.fuzz import Fuzz

pytestmark = pytest.mark.slow

STATS = {"train/loss": 0.123456, "train/num_samples": 8.0, "eval/accuracy": 0.5, "perf/step_s": 1e-7}


def live_logger(**settings) -> tuple[RichLiveLogger, io.StringIO]:
    screen = io.StringIO()
    return RichLiveLogger(console=Console(file=screen, force_terminal=True, width=120), **settings), screen


def without_time(path: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "time"} for row in read_metrics(path)]


# --- print ------------------------------------------------------------------------------------------------------


def test_print_logger_wraps_lines(capsys):
    PrintLogger(max_items_per_line=2).log(7, STATS)
    assert capsys.readouterr().out.splitlines() == [
        "[trainer] step 7 | train/loss 0.1235 | train/num_samples 8",
        "[trainer] step 7 | eval/accuracy 0.5000 | perf/step_s 1e-07",
    ]


def test_print_logger_keys_match_with_or_without_prefix():
    stream = io.StringIO()
    logger = PrintLogger("run", ["accuracy", "train/loss", "absent"], precision=3, percent=["accuracy"], stream=stream)
    logger.log(1, STATS)
    assert stream.getvalue() == "run step 1 | eval/accuracy 50.0% | train/loss 0.123\n"


def test_print_logger_formats_numbers_that_are_not_finite():
    stream = io.StringIO()
    PrintLogger(stream=stream).log(1, {"a": math.nan, "b": math.inf, "c": -2e20})
    assert stream.getvalue() == "[trainer] step 1 | a nan | b inf | c -2e+20\n"


# --- jsonl ------------------------------------------------------------------------------------------------------


def test_jsonl_line_is_on_disk_when_log_returns(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    logger = JSONLLogger(path)
    before = time.time()
    logger.log(1, {"train/loss": 0.1, "train/norm": math.inf})
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert before <= row.pop("time") <= time.time()
    assert row == {"step": 1, "train/loss": 0.1, "train/norm": None}
    logger.log(2, {"train/loss": 0.2})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_jsonl_resume_removes_later_steps(tmp_path: Path):
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


def test_jsonl_unfinished_line_is_ignored_and_removed(tmp_path: Path):
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


def test_killed_writer_leaves_at_most_the_last_jsonl_line_incomplete(tmp_path: Path):
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


def test_jsonl_refuses_a_stat_called_step(tmp_path: Path):
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
    "unclosed brackets": b"[" * 100_000 + b"\n",
    "5000 digits": b'{"step": 2, "train/x": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("name", DAMAGED_LINES)
def test_damaged_jsonl_line_is_skipped_with_a_warning_and_removed_by_resume(tmp_path: Path, caplog, name: str):
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


def test_fuzz_damage_of_a_jsonl_file_loses_only_the_damaged_lines(tmp_path: Path, fuzz: Fuzz):
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


def test_jsonl_error_names_the_file_that_cannot_be_written(tmp_path: Path):
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
def test_tensorboard_resume_replaces_repeated_steps(tmp_path: Path):
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


# --- trackio ----------------------------------------------------------------------------------------------------


class FakeTrackio:
    """Keeps what `init` of Trackio or W&B and its run are told."""

    def __init__(self) -> None:
        self.settings, self.rows, self.is_finished = {}, [], False

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, metrics, step=None):
        self.rows.append((step, metrics))

    def finish(self):
        self.is_finished = True


def test_trackio_gets_the_same_names_and_steps(monkeypatch):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    logger = TrackioLogger(name="a-run", config={"lr": 0.1})
    logger.log(3, {"train/loss": 0.5})
    logger.log(4, {"eval/accuracy": 1.0})
    logger.close()
    assert fake.rows == [(3, {"train/loss": 0.5}), (4, {"eval/accuracy": 1.0})] and fake.is_finished
    assert (fake.settings["project"], fake.settings["name"], fake.settings["resume"]) == ("Ludic", "a-run", "allow")


def test_trackio_keeps_the_logged_steps(tmp_path, monkeypatch):
    """Runs where the extra is installed."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio", reason="the trackio extra is not installed")
    for steps in ((3, 4), (5,)):  # a run, and its resumed second part
        logger = TrackioLogger(project="ludic-test", name="a-run", config={"lr": 0.1})
        for step in steps:
            logger.log(step, {"train/loss": 0.5 * step})
        logger.close()
    (database,) = tmp_path.glob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = list(connection.execute("select run_name, run_id, step, metrics from metrics order by step"))
    assert [(name, step, json.loads(metrics)) for name, _, step, metrics in rows] == [
        ("a-run", step, {"train/loss": 0.5 * step}) for step in (3, 4, 5)
    ]
    assert len({run_id for _, run_id, _, _ in rows}) == 1, "one run"


# --- wandb ------------------------------------------------------------------------------------------------------


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


def test_wandb_offline_run_has_the_logged_steps(tmp_path: Path, monkeypatch):
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    from wandb.proto import wandb_internal_pb2

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_PROJECT", "from-the-environment")
    logger = WandbLogger(name="a-run", config={"lr": 0.1}, dir=tmp_path, mode="offline")
    run = logger._run
    assert (run.project, run.name, dict(run.config)) == ("from-the-environment", "a-run", {"lr": 0.1})
    for step, stats in ((3, {"train/loss": 0.5}), (2, {"eval/accuracy": 0.25}), (5, {"train/loss": 0.125})):
        logger.log(step, stats)
    logger.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records: list = []
    deadline = time.monotonic() + 20
    while not records or records[-1].WhichOneof("record_type") != "exit":  # another process writes the file
        assert time.monotonic() < deadline, "wandb never finished its file"
        records = [wandb_internal_pb2.Record.FromString(data) for data in leveldb_records(file.read_bytes())]
    first, second = (
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    )
    assert (first["_step"], first["train/loss"], first["eval/accuracy"]) == (3, 0.5, 0.25)
    assert (second["_step"], second["train/loss"]) == (5, 0.125)


@pytest.mark.parametrize(
    ("variable", "given", "project"), [("", None, "Ludic"), ("theirs", None, "theirs"), ("theirs", "mine", "mine")]
)
def test_wandb_gets_settings_names_and_rising_steps(monkeypatch, tmp_path, variable, given, project):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", variable)
    logger = WandbLogger(project=given, name="a-run", config={"lr": 0.1}, dir=tmp_path, mode="offline")
    logger.log(3, {"train/loss": 0.5})
    logger.log(2, {"eval/accuracy": 0.25})  # of a background evaluation: W&B would drop an earlier step
    logger.close()
    assert fake.rows == [(3, {"train/loss": 0.5}), (3, {"eval/accuracy": 0.25})] and fake.is_finished
    assert fake.settings == {
        "project": project, "name": "a-run", "config": {"lr": 0.1}, "dir": str(tmp_path), "mode": "offline",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (WandbLogger, "wandb", "wandb"),
        (TrackioLogger, "trackio", "trackio"),
        (lambda: TensorBoardLogger("x"), "torch.utils.tensorboard", "tensorboard"),
    ],
)
def test_missing_package_error_names_the_extra(monkeypatch, make, package, extra):
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


def test_tee_reports_a_failing_child_once_and_logs_to_the_others(tmp_path: Path, caplog):
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


def test_a_full_disk_is_named_with_the_file_and_the_room_and_training_continues(tmp_path: Path, caplog):
    jsonl = JSONLLogger(tmp_path / "metrics.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # the kernel refuses, as a full disk would
    try:
        TeeLogger(jsonl).log(1, {"train/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    (record,) = caplog.records
    assert f"Could not write {jsonl.path}: OSError: [Errno 27] File too large. " in record.getMessage()
    assert "MiB are free there" in record.getMessage() and record.exc_info is False


def test_tee_resumes_its_resumable_children(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tee = TeeLogger(PrintLogger(stream=io.StringIO()), JSONLLogger(path))
    tee.log(1, {})
    tee.log(2, {})
    tee.resume(1)
    assert without_time(path) == [{"step": 1}]


# --- rich -------------------------------------------------------------------------------------------------------


def test_live_table_groups_by_prefix_keeps_old_values_and_draws_the_reward():
    logger, screen = live_logger(percent=["accuracy"])
    for step, reward in enumerate([0.0, 1.0, 0.5], start=1):
        evals = {"eval/accuracy": 0.25} if step == 1 else {}
        logger.log(step, {"train/avg_total_reward": reward, "train/loss": 0.5 / step, "perf/step_s": 2.0} | evals)
    screen.truncate(0)
    logger.log(4, {"train/avg_total_reward": 0.0})
    drawn = screen.getvalue()
    logger.close()
    for text in ("step 4", " train ", " eval ", " perf ", "25.00%", "0.1667", "▁█▅▁ 0 … 1"):
        assert text in drawn, text


def test_live_table_shows_the_time_left(monkeypatch):
    clock = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr("ludic.training.loggers.rich_live.time.monotonic", lambda: next(clock))
    logger, screen = live_logger(total_steps=11)
    logger.log(1, {"train/x": 1.0})
    logger.log(2, {"train/x": 1.0})  # ten seconds later, and nine more to go
    logger.close()
    assert "step 1 of 11" in screen.getvalue() and "step 2 of 11, 0:01:30 left" in screen.getvalue()


def test_live_logger_writes_plain_lines_without_a_terminal():
    file = io.StringIO()
    logger = RichLiveLogger(console=Console(file=file, width=20))
    logger.log(1, STATS)
    logger.close()
    assert file.getvalue() == (
        "[trainer] step 1 | train/loss 0.1235 | train/num_samples 8 | eval/accuracy 0.5000 | perf/step_s 1e-07\n"
    )


def test_live_logger_close_restores_the_cursor_once():
    logger, screen = live_logger()
    logger.log(1, {"train/avg_total_reward": math.nan})
    logger.close()
    logger.close()
    assert screen.getvalue().count("\x1b[?25h") == 1


# --- between two steps ------------------------------------------------------------------------------------------


def test_print_logger_keys_may_be_patterns_and_exclusions(capsys):
    stats = {"train/win_rate": 0.5, "train/parse_error_rate": 0.1, "eval/accuracy": 0.25, "eval/accuracy_low": 0.2}
    PrintLogger(keys=["accuracy", "*_rate", "!parse_error_rate"]).log(1, stats)
    assert capsys.readouterr().out == "[trainer] step 1 | eval/accuracy 0.2500 | train/win_rate 0.5000\n"


def test_activity_is_written_at_most_every_15_seconds(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr("ludic.training.loggers.print.time.monotonic", lambda: now[0])
    file = io.StringIO()
    logger = TeeLogger(JSONLLogger(tmp_path / "metrics.jsonl"), RichLiveLogger(console=Console(file=file, width=99)))
    for second in range(40):
        now[0] = 100.0 + second
        logger.show_activity(f"playing for {second} s")
    assert file.getvalue() == "[trainer] playing for 15 s\n[trainer] playing for 30 s\n"


def test_live_logger_shows_activity_before_the_first_step_and_under_the_table():
    logger, screen = live_logger()
    logger.show_activity("playing 3 of 8 episodes")
    assert "playing 3 of 8 episodes" in screen.getvalue()
    logger.log(1, {"train/x": 1.0})
    screen.truncate(0)
    logger.show_activity("playing 5 of 8 episodes")
    assert "step 1" in screen.getvalue() and "playing 5 of 8 episodes" in screen.getvalue()
    logger.close()


# --- the status line --------------------------------------------------------------------------------------------


def test_print_logger_writes_the_status_every_few_steps():
    stream, asked = io.StringIO(), iter(range(100))
    logger = PrintLogger(stream=stream, status=lambda: f"status {next(asked)}", status_every=2)
    for step in (1, 2, 3, 4):
        logger.log(step, {"train/loss": 1.0})
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "status" in line] == ["[trainer] status 0", "[trainer] status 1"]
    assert [index for index, line in enumerate(lines) if "status" in line] == [1, 4], "after steps 1 and 3"


def test_live_table_shows_the_newest_status_under_the_table():
    asked = iter(range(100))
    logger, screen = live_logger(status=lambda: f"status {next(asked)}")
    logger.log(1, {"train/loss": 1.0})
    logger.log(2, {"train/loss": 1.0})
    logger.close()
    last = screen.getvalue().rpartition("step 2")[2]
    assert "status 1" in last and last.index("loss") < last.index("status 1")
