"""env_workers and env_server as settings of a run: the same episodes as in process, and mistakes are named before training."""

import asyncio
import json
import threading

import pytest

from ludic.envs.workers import EnvServer
from ludic.run import build
from ludic.run.config import EnvSettings
from ludic.types import ConfigError
from tests.unit.envs.workers.test_env_pool import without_ids

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
        pool = run.generation._episodes.pool
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
