import importlib.util
import json
import sys
from pathlib import Path

import pytest

from ludic.types import ConfigError

pytest.importorskip("matplotlib", reason="the plot extra is not installed")


@pytest.fixture
def script(monkeypatch):
    path = Path(__file__).parents[3] / "scripts" / "plot_run.py"
    spec = importlib.util.spec_from_file_location("plot_run", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plot_run", module)
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path) -> Path:
    folder.mkdir()
    rows = [{"step": n, "train/avg_total_reward": n / 10} for n in range(1, 6)]
    rows.append(
        {"step": 5, "eval/step": 5.0, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    )
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_a_run_becomes_a_picture(script, tmp_path):
    out = tmp_path / "curve.png"
    script.main(script.Settings(runs=(write_run(tmp_path / "run"),), out=out))
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_run_without_what_was_asked_for_says_what_it_has(script, tmp_path):
    settings = script.Settings(
        runs=(write_run(tmp_path / "run"),), train_key="train/x", eval_key="eval/y", out=tmp_path / "o.png"
    )
    with pytest.raises(ConfigError, match=r"neither train/x nor eval/y. It has: .*train/avg_total_reward"):
        script.main(settings)


def test_a_folder_without_a_run_is_named(script, tmp_path):
    with pytest.raises(ConfigError, match="There is no .*metrics.jsonl"):
        script.main(script.Settings(runs=(tmp_path,), out=tmp_path / "o.png"))
