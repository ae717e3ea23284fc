"""The pipeline example as a person runs it: an actor and a trainer, each a separate process, and a real Redis between."""

import json
import re
import signal
from pathlib import Path

import pytest

from ludic.types import ConfigError
from tests import forked
from tests.redis_fixtures import shared_redis

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("redis", reason="the pipeline extra is not installed")
pytestmark = pytest.mark.slow

__all__ = ["shared_redis"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_rl"
PATIENCE_S = 120  # a shared machine can be several times slower than its clock
ACCOUNT = re.compile(
    r"produced (\d+) = (\d+) acknowledged \+ (\d+) stale \+ (\d+) filtered \+ (\d+) dead \+ (\d+) fetched \+ (\d+) waiting",
    re.M,
)


def start(script: str, *arguments: object) -> forked.Forked:
    return forked.python(EXAMPLE / script, *arguments, environment={"COLUMNS": "200"})


def finish(process: forked.Forked) -> str:
    printed = "".join(process.communicate(timeout=PATIENCE_S))
    assert process.returncode == 0, printed
    return printed


def test_actor_and_trainer_train_resume_and_account_for_every_item(shared_redis, tmp_path):
    out = tmp_path / "run"
    small = ["--redis", shared_redis.url, "--runs", tmp_path, "--name", "run", "--rollouts-per-update", 16,
             "--checkpoint-every", 2, "--concurrency", 16]  # fmt: skip
    actor = start("run_actor.py", *small)  # before there is anything to play with
    try:
        first = finish(start("run_trainer.py", *small, "--steps", 3))
        again = finish(start("run_trainer.py", *small, "--steps", 5, "--resume"))
        assert actor.poll() is None, "an actor outlives its learners"
        actor.send_signal(signal.SIGTERM)
        played = finish(actor)
    finally:
        actor.kill()
    for printed, num_updates in ((first, 3), (again, 5)):
        produced, acknowledged, *others = map(int, ACCOUNT.findall(printed)[-1])
        assert produced == acknowledged + sum(others)
        assert acknowledged == 16 * num_updates, "all that was trained on is saved, and acknowledged"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["train/num_samples"] == 16 and row["train/lag_max"] <= 2 for row in rows)
    assert {"weights_4.safetensors", "weights_5.safetensors"} <= {path.name for path in (out / "weights").iterdir()}
    pushed = re.findall(r"Pushed (\d+) groups, (\d+) samples", played)[-1]
    assert int(pushed[1]) == 8 * int(pushed[0]) >= produced
    assert "failed" not in played and "Traceback" not in played


def test_a_run_is_not_begun_over_another(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from run_trainer import main

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="exists and is not the folder of a run"):
        main(["--runs", str(tmp_path), "--name", "run"])
