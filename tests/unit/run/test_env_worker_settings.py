"""env_workers and env_server as settings of a run: the same episodes as in process, and mistakes are named before training."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from ludic.run import build
from ludic.run.config.env_and_agent import EnvSettings
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError, load_rollouts
from ludic_envs.workers import EnvServer
from plugins.envs.tests.test_env_workers import nothing_left, start_server
from plugins.envs.tests.workers import parts
from plugins.envs.tests.workers.test_env_pool import without_ids

pytestmark = pytest.mark.slow

__all__ = ["nothing_left"]

SMALL = {
    "model": "tiny", "eval_episodes": 3, "eval_concurrency": 1, "max_tokens": 2, "cut_off": "read", "max_steps": 3, "threads": 1,
}  # fmt: skip


@pytest.fixture
def address(monkeypatch):
    """host:port of an env server in another thread."""
    monkeypatch.setenv("LUDIC_ENV_TOKEN", "secret")
    said, told = threading.Event(), list[str]()
    loop = asyncio.new_event_loop()

    async def serve():
        server = EnvServer(["tic_tac_toe"], workers=1, token="secret")
        await server.serve("127.0.0.1", 0, on_ready=lambda place: (told.append(place), said.set()))

    serving = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.gather(serving, return_exceptions=True)))
    thread.start()
    assert said.wait(60)
    yield told[0]
    loop.call_soon_threadsafe(serving.cancel)
    thread.join()
    loop.close()


def played(tmp_path, **settings):
    with build(env="tic_tac_toe", runs=tmp_path, **SMALL, **settings) as run:
        rollouts = run.play()
        pool = run.session._episodes.pool
    assert pool is None or not pool.processes  # closing the run ends its workers
    return [without_ids(json.loads(rollout.to_json())) for rollout in rollouts]


def test_runs_play_the_same_episodes_in_process_in_workers_and_on_a_server(tmp_path, address):
    here = played(tmp_path)
    assert here == played(tmp_path, env_workers=1) == played(tmp_path, env_server=address)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        played(tmp_path, env_server=address, set={"size": 4})


def test_workers_and_a_server_do_not_go_together():
    with pytest.raises(ConfigError, match="has its own workers"):
        EnvSettings(env_workers=2, env_server="there:7700")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env_workers": -1}, "at least 0"),
        ({"env_memory_mb": 100}, "--env-workers N"),
        ({"env_server": "there"}, "write host:port"),
        ({"env_server": "127.0.0.1:1"}, "There is no env server at 127.0.0.1:1"),
    ],
)
def test_mistakes_are_named(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        build(env="tic_tac_toe", runs=tmp_path, **SMALL, **settings)


# --- faults ---

FATED = f"{parts.__file__}:Fated"
TRAIN = SMALL | {"max_steps": 1, "group_size": 2, "rollouts_per_update": 8, "concurrency": 2, "logger": "none"}


def fated(folder, *fates):
    """Samples, one per group of an update, and how often an episode of each was started."""
    samples = [{"fate": fate, "file": str(folder / f"{number}")} for number, fate in enumerate(fates)]
    return samples, lambda: [Path(sample["file"]).stat().st_size for sample in samples]


def counts(folder, name):
    return [row[f"train/{name}"] for row in read_metrics(folder / "metrics.jsonl") if f"train/{name}" in row]


@pytest.mark.integration
@pytest.mark.slow
def test_a_run_whose_workers_are_killed_does_all_updates_and_counts_what_failed(tmp_path, nothing_left):
    """Two episodes at a time in two workers, so that a process dies with one episode."""
    samples, starts = fated(tmp_path, "dies", "every third dies", "lives", "lives")
    with build(env=FATED, data=samples, runs=tmp_path, env_workers=2, **TRAIN) as run:
        assert run.train(steps=2).step == 2
    assert starts() == [2 * 4, 2 * 3, 2 * 2, 2 * 2]  # two episodes each; one that failed was played once more
    assert counts(run.folder, "num_failed") == [2, 2]
    assert counts(run.folder, "num_retried") == [3, 3]
    assert counts(run.folder, "num_groups_dropped") == [1, 1]
    (file,) = (run.folder / "rollouts").iterdir()
    failures = [rollout.failure for rollout in load_rollouts(file)]
    assert len(failures) == 16 and failures.count(None) == 12
    assert all(failure.error == "EnvCrashed" and "SIGKILL" in failure.message for failure in failures if failure)


@pytest.mark.integration
@pytest.mark.slow
def test_a_run_whose_env_server_is_killed_goes_on_with_the_next(tmp_path, monkeypatch, nothing_left):
    monkeypatch.setenv("LUDIC_ENV_TOKEN", "x")
    samples, starts = fated(tmp_path, "the first hangs", "lives", "lives", "lives")
    servers, address = [], ""
    is_over = threading.Event()

    def kill_and_restart():
        while not Path(samples[0]["file"]).exists():
            if is_over.wait(0.01):
                return
        servers[0].kill()
        servers[0].wait()
        servers.append(start_server(int(address.rpartition(":")[2]), env=FATED)[0])

    program, address = start_server(env=FATED)
    servers.append(program)
    fault = threading.Thread(target=kill_and_restart)
    fault.start()
    try:
        with build(env=FATED, data=samples, runs=tmp_path, env_server=address, **TRAIN) as run:
            assert run.train(steps=3).step == 3
    finally:
        is_over.set()
        fault.join()
        for server in servers:
            server.terminate()
            server.wait()
            server.stdout.close()
    assert len(servers) == 2 and counts(run.folder, "num_failed") == [0, 0, 0]
    assert 24 < sum(starts()) <= 24 + sum(counts(run.folder, "num_retried"))  # one may have waited for its start
