"""A learner and an actor as processes, with a Redis: the actor outlives a restart of the learner, and ends with its run."""

import time
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="the pipeline extra is not installed")

import redis

from ludic.training.loggers import read_metrics
from tests import forked
from tests.redis_fixtures import RedisServer, redis_server
from tests.unit.cli.train_parts import ENV, SMALL

__all__ = ["redis_server"]  # a fixture

pytestmark = pytest.mark.slow
RUN = ["letter.py:Letter", *SMALL, "--engine", "pipeline", "--name", "run", "--checkpoint-every", "2"]


def start(folder: Path, redis: RedisServer, *arguments: str) -> forked.Forked:
    return forked.python("-m", "ludic.cli.main", *arguments, cwd=folder, environment={"LUDIC_REDIS_URL": redis.url})


def updates(folder: Path) -> int:
    path = folder / "runs" / "run" / "metrics.jsonl"
    return len(list(read_metrics(path))) if path.exists() else 0


def test_an_actor_goes_on_while_the_learner_restarts_and_ends_when_the_run_is_finished(tmp_path, redis_server):
    (tmp_path / "letter.py").write_text(ENV)
    actor = start(tmp_path, redis_server, "actor", *RUN, "--steps", "1000")
    learner = start(tmp_path, redis_server, "train", *RUN, "--steps", "1000")
    while updates(tmp_path) < 2:
        assert learner.poll() is None and actor.poll() is None, learner.said() + actor.said()
        time.sleep(0.02)
    learner.terminate()
    said = learner.communicate(timeout=300)
    assert learner.returncode == 143, said
    done = updates(tmp_path)
    assert actor.poll() is None, actor.communicate()
    few = ["--steps", str(done + 2)]
    shorter = start(tmp_path, redis_server, "actor", *RUN, *few)  # the same run, to its new end
    learner = start(tmp_path, redis_server, "train", "runs/run", "--resume", *few)
    said = learner.communicate(timeout=300)
    assert learner.returncode == 0 and f"Done after update {done + 2}" in said[0], said
    said = shorter.communicate(timeout=300)
    assert shorter.returncode == 0 and "finished the run" in said[0] and "Pushed" in said[0], said
    assert actor.poll() is None, "its run has 1000 updates"
    actor.terminate()
    assert actor.wait(timeout=300) == 143

    with redis.from_url(redis_server.url) as client:  # as if the learner had died before it told the actors
        (state,) = client.scan_iter("*:learner")
        assert client.hdel(state, "finished") == 1
    again = start(tmp_path, redis_server, "train", "runs/run", "--resume")
    said = again.communicate(timeout=300)
    assert again.returncode == 0 and "is complete" in said[0], said
    late = start(tmp_path, redis_server, "actor", "runs/run")
    said = late.communicate(timeout=300)
    assert late.returncode == 0 and "finished the run" in said[0], said
