"""scripts/plot_seeds.py: run folders become records, a table with paired gains, and a picture."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from ludic.types import ConfigError


@pytest.fixture
def script(monkeypatch):
    path = Path(__file__).parents[3] / "scripts" / "plot_seeds.py"
    spec = importlib.util.spec_from_file_location("plot_seeds", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plot_seeds", module)
    spec.loader.exec_module(module)
    return module


def make_run(folder: Path, after: float, num_steps: int = 5) -> Path:
    folder.mkdir()
    rows = [{"step": 0, "eval/step": 0, "eval/mean_reward": 0.25, "eval/mean_turns": 9.0}]
    rows += [{"step": n, "train/avg_total_reward": 0.5, "train/avg_turns": 8.0} for n in range(1, num_steps + 1)]
    rows.append({"step": num_steps, "eval/step": num_steps, "eval/mean_reward": after, "eval/mean_turns": 7.0})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_gains_are_those_of_the_same_seeds(script, tmp_path, capsys):
    pairs = {"grpo": (0.4, 0.6), "gigpo": (0.5, 0.9)}
    runs = [make_run(tmp_path / f"door-{name}-{seed}", pairs[name][seed]) for name in pairs for seed in (0, 1)]
    records = tmp_path / "r.jsonl"
    script.main(script.Settings(sources=tuple(runs), records=records))
    told = capsys.readouterr().out
    # gains 0.1 and 0.3: mean 0.2, standard error 0.1, and 12.71 of them for two seeds
    assert "gain 0.200 ± 1.271" in told and "before 0.250  after 0.700" in told
    script.main(script.Settings(sources=(records,)))
    assert capsys.readouterr().out == told


def test_the_table_has_the_lowest_seed_the_updates_to_a_reward_and_further_metrics(script, tmp_path, capsys):
    runs = [make_run(tmp_path / f"door-grpo-{seed}", after, num_steps=20) for seed, after in ((0, 0.5), (1, 0.7))]
    for run, first in zip(runs, (3, 9), strict=True):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if "train/avg_total_reward" in row:
                row |= {"train/avg_total_reward": float(row["step"] > first), "train/score/branches": row["step"]}
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keep = ("branches=train/score/branches",)
    script.main(script.Settings(sources=tuple(runs), reach=0.8, keep=keep))
    told = capsys.readouterr().out
    # Of ten updates up to the 15th the first seed has 1 in all and the second in the last six: 16 of 20.
    assert "lowest 0.500" in told and "to 0.8 after 15" in told
    assert "branches 3.000 → 18.000" in told, "the means of 1 … 5 and of 16 … 20"
    script.main(script.Settings(sources=tuple(runs), reach=1.1))
    assert "to 1.1 after never" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="write NAME=METRIC"):
        script.main(script.Settings(sources=tuple(runs), keep=("branches",)))


def test_any_number_of_seeds_has_an_interval(script):
    # 12 values with a standard deviation of 1.0445 have 0.3015 as standard error; t at 11 degrees of freedom is 2.201
    assert script.shown([0.0, 2.0] * 6) == "1.000 ± 0.664"
    assert script.shown([0.5]) == "0.500", "one seed has none"


def test_curves_become_a_picture(script, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    runs = tuple(make_run(tmp_path / f"door-grpo-{seed}", 0.5, num_steps=10 + seed) for seed in (0, 1))
    script.main(script.Settings(sources=runs, out=tmp_path / "seeds.png"))
    assert (tmp_path / "seeds.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_folder_with_another_name_is_refused(script, tmp_path):
    with pytest.raises(ConfigError, match="GAME-SETTING-SEED"):
        script.main(script.Settings(sources=(make_run(tmp_path / "mine", 0.5),)))
