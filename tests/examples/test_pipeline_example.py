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
    r"^produced (\d+) = (\d+) acknowledged \+ (\d+) stale \+ (\d+) filtered \+ (\d+) dead \+ (\d+) fetched \+ (\d+) waiting$",
    re.M,
)


def start(script: str, *arguments: object) -> forked.Forked:
    return forked.python(EXAMPLE / script, *arguments, environment={"COLUMNS": "200"})


def finish(process: forked.Forked) -> str:
    printed = "".join(process.communicate(timeout=PATIENCE_S))
    assert process.returncode == 0, printed
    return printed


@pytest.fixture
def meeting(shared_redis, tmp_path):
    return ["--redis", shared_redis.url, "--queue", "example", "--weights", tmp_path / "weights"]


def test_actor_and_trainer_meet_train_resume_and_account_for_every_item(meeting, tmp_path):
    out = tmp_path / "run"
    small = [*meeting, "--out", out, "--groups-per-update", 2, "--checkpoint-every", 2]
    actor = start("run_actor.py", *meeting, "--concurrency", 16)  # before there is anything to play with
    try:
        first = finish(start("run_trainer.py", *small, "--updates", 3))
        again = finish(start("run_trainer.py", *small, "--updates", 5, "--resume"))
        assert actor.poll() is None, "an actor outlives its learners"
        actor.send_signal(signal.SIGTERM)
        played = finish(actor)
    finally:
        actor.kill()
    for printed, num_updates in ((first, 3), (again, 5)):
        produced, acknowledged, *others = map(int, ACCOUNT.search(printed).groups())
        assert produced == acknowledged + sum(others)
        assert acknowledged == 16 * num_updates, "all that was trained on is saved, and acknowledged"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["train/num_samples"] == 16 and row["train/lag_max"] <= 2 for row in rows)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "weights_4.safetensors",
        "weights_5.safetensors",
    ]
    pushed = re.search(r"pushed (\d+) items in (\d+) groups; 0 groups failed", played)
    assert int(pushed[1]) == 8 * int(pushed[2]) >= produced
    assert "Begins with version 0." in played and "Traceback" not in played


def test_a_run_is_not_begun_over_another(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from run_trainer import Settings, main

    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="There is a run in .* already. Go on with --resume"):
        main(Settings(out=tmp_path))
