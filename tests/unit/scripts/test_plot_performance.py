import json
from pathlib import Path

import pytest

from ludic.types import ConfigError
from tests import programs

pytest.importorskip("matplotlib", reason="the plot extra is not installed")


@pytest.fixture
def script():
    return programs.load(Path(__file__).parents[3] / "scripts" / "plot_performance.py")


def record(engine: str, batch: int, speed: float, **changed) -> dict:
    row = {"benchmark": "engine", "shape": "135m", "workload": f"fixed{batch}", "batch": batch, "engine": engine}
    facts = {"hardware": "a GPU", "versions": {"torch": "2"}, "commit": "abc1234"}
    return {**row, "logprobs": True, "tokens_per_s": speed, **facts, **changed}


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_records_become_a_picture(script, tmp_path):
    rows = [record(engine, batch, 10.0 * batch) for engine in ("ludic", "vllm") for batch in (1, 128)]
    out = tmp_path / "engine.png"
    script.main(script.Settings(records=(write(tmp_path / "r.jsonl", rows),), out=out))
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_last_record_of_a_batch_size_counts_and_only_with_log_probs(script, tmp_path):
    rows = [
        record("ludic", 128, 1.0),
        record("ludic", 1, 2.0),
        record("vllm", 128, 3.0),
        record("vllm", 128, 9.0, logprobs=False),
        record("ludic", 1024, 9.0, workload="ragged"),
        record("ludic", 128, 4.0),
    ]
    read = script.read(script.Settings(records=(write(tmp_path / "r.jsonl", rows),)))
    assert script.curves(read, "135m") == {"ludic": {1: 2.0, 128: 4.0}, "vllm": {128: 3.0}}


def test_records_of_two_machines_are_not_mixed(script, tmp_path):
    path = write(tmp_path / "r.jsonl", [record("ludic", 1, 1.0), record("ludic", 1, 2.0, hardware="another GPU")])
    with pytest.raises(ConfigError, match="a GPU and another GPU"):
        script.read(script.Settings(records=(path,)))
    [row] = script.read(script.Settings(records=(path,), hardware="another"))
    assert row["tokens_per_s"] == 2.0
