"""`ludic launch` as it is typed: what it refuses, which roles it starts and with what. Nothing is started here."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ludic.run.config.run_config import RunConfig
from ludic.run.folder import ResumePoint, prepare_folder
from ludic.run.given import env_factory
from ludic.run.policies import resolve_run
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import with_values
from ludic.types import ConfigError
from ludic_pipeline.feature import (
    pipeline_of,
    queue_key_of,
    required_servers,
)
from ludic_pipeline.launch.launch import ludic_command, make_roles, prepare, ray_resources, reachable_socket
from ludic_pipeline.launch.supervisor import WhenDone
from tests.unit.cli.train_parts import ENV, SMALL, command_in


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LUDIC_REDIS_URL", raising=False)
    monkeypatch.delenv("LUDIC_SERVER", raising=False)
    return command_in(tmp_path, monkeypatch, capsys)


def run_with(tmp_path, **values: object) -> ResolvedRun:
    given = {"id": "tic_tac_toe", "model": "tiny", "engine": "pipeline", "runs": tmp_path, "name": "run", **values}
    return resolve_run(with_values(RunConfig(), given), env_factory("tic_tac_toe"))


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--redis", "http://here"], "begins with redis://, rediss:// (TLS) or unix://"),
        (["--redis", "redis://:secret@here:1"], "Put the URL into the environment variable LUDIC_REDIS_URL"),
        (["--actors", "0"], "actors = 0; it must be at least 1"),
        (["--ray"], "--ray needs a Redis that every machine of the cluster reaches"),
        (["--ray", "--redis", "redis://h", "--actor-engine", "vllm"], "needs --server URL"),
        (["--ray", "--learner-resources", "host_a"], "learner_resources = 'host_a'; it is a JSON object of names"),
        (["--ray", "--actor-resources", '{"host_b": 0}'], "names and positive amounts"),
        (["--ray", "--actor-resources", '{"GPU": 1}'], "names GPU, which is not a custom resource of Ray"),
        (["--learner-resources", '{"host_a": 1}'], "learner_resources is for --ray"),
        (["--server", "http://127.0.0.1:1"], "is for engine = 'vllm' (in a pipeline actor_engine = 'vllm')"),
        (["--actor-engine", "vllm", "--eval-in-background"], "needs an engine that can keep a copy"),
        (["--algo", "scalerl"], "actors assign credit group by group. Take cispo"),
        (["--algo", "spo"], "tracks how each prompt went"),
        (["--resume"], "There is nothing to resume"),
        (["--algo", "grop"], "Did you mean 'grpo'"),
    ],
)
def test_a_mistake_is_a_helpful_message_and_nothing_is_written(arguments, message, ludic, tmp_path):
    ended = ludic("launch", "tic_tac_toe", "--model", "tiny", *arguments)
    shown = " ".join(ended.err.replace("│", " ").split())
    assert ended.code == 2 and message in shown, shown
    assert "secret" not in shown and not (tmp_path / "runs").exists()


def test_missing_redis_server_error_says_what_to_install(ludic, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = ludic("launch", "letter.py:Letter", *SMALL, "--dry-run")
    assert ended.code == 2 and "apt-get install redis-server" in ended.err


# --- what is planned ---


def test_a_dry_run_shows_the_commands_and_writes_nothing(ludic, tmp_path):
    ended = ludic("launch", "letter.py:Letter", *SMALL, "--dry-run", "--actors", "3")
    assert ended.code == 0, ended.err
    assert 'engine = "pipeline"' in ended.out and 'queue_key = "ludic:Letter-tiny-grpo"' in ended.out
    assert "max_lag = 4" in ended.out and "actor-2: " in ended.out and "--actor-index 2" in ended.out
    assert "ludic.cli.main train runs/Letter-tiny-grpo --resume" in ended.out
    assert not (tmp_path / "runs").exists()


def test_redis_starts_first_and_all_roles_need_it(tmp_path, monkeypatch):
    monkeypatch.delenv("LUDIC_REDIS_URL", raising=False)
    config = run_with(tmp_path)
    roles = {role.name: role for role in make_roles(config)}
    assert list(roles) == ["redis", "learner", "actor-0", "actor-1"]
    assert all(roles[name].needs == ("redis",) for name in ("learner", "actor-0", "actor-1"))
    socket = roles["redis"].command[roles["redis"].command.index("--unixsocket") + 1]
    assert roles["learner"].environment["LUDIC_REDIS_URL"] == f"unix://{socket}"
    assert roles["redis"].command[roles["redis"].command.index("--appendonly") + 1] == "yes"
    assert roles["learner"].when_done is WhenDone.ENDS_ALL and roles["redis"].when_done is WhenDone.IS_DEATH


def test_long_socket_path_moves_to_a_temporary_folder(tmp_path):
    with reachable_socket(Path("runs/x")) as near:
        assert near == Path("runs/x/redis/redis.sock").absolute()
    with reachable_socket(tmp_path / ("deep" * 30)) as far:
        assert len(str(far)) < 100 and far.parent.stat().st_mode & 0o077 == 0, "only this user may look"
    assert not far.parent.exists()


def test_a_redis_that_is_given_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setenv("LUDIC_REDIS_URL", "redis://:secret@elsewhere:6379/0")
    roles = make_roles(run_with(tmp_path, actors=1), learner_gpus=1, actor_gpus=0.5)
    assert [role.name for role in roles] == ["learner", "actor-0"] and [role.num_gpus for role in roles] == [1, 0.5]
    assert "LUDIC_REDIS_URL" not in roles[0].environment, "it is in the environment that they inherit"
    assert "secret" not in " ".join(part for role in roles for part in role.command)


def test_roles_ask_for_their_own_resources(tmp_path, monkeypatch):
    monkeypatch.setenv("LUDIC_REDIS_URL", "redis://here")
    asked = {"learner": ray_resources("learner_resources", '{"big": 1, "fast": 0.5}', is_for_ray=True)}
    roles = make_roles(run_with(tmp_path, actors=1), resources=asked)
    assert [role.resources for role in roles] == [{"big": 1, "fast": 0.5}, {}]


def test_vllm_actors_get_a_server_unless_one_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("LUDIC_REDIS_URL", "redis://here")
    own = make_roles(run_with(tmp_path, actor_engine="vllm", actors=1))
    assert [role.name for role in own] == ["server", "learner", "actor-0"] and own[1].needs == ("server",)
    assert own[0].command[:3] == (sys.executable, "-m", "ludic_vllm.run_server")
    assert find_spec("ludic_vllm.run_server") is not None
    assert own[2].environment["LUDIC_SERVER"] == f"http://127.0.0.1:{own[0].command[-1]}"
    given = make_roles(run_with(tmp_path, actor_engine="vllm", actors=1, server=("http://there:8000",)))
    assert [role.name for role in given] == ["learner", "actor-0"]


def test_cores_are_divided_unless_the_user_sets_them(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    config = run_with(tmp_path, actors=3)
    assert make_roles(config)[-1].environment["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in make_roles(run_with(tmp_path, actors=3, threads=2))[-1].environment


# --- settings ---


def test_defaults_for_a_pipeline(tmp_path):
    config = run_with(tmp_path, group_size=8, rollouts_per_update=256)
    assert config.max_lag == 4 and queue_key_of(config) == "ludic:run"
    assert pipeline_of(config.config).max_waiting == 128
    assert run_with(tmp_path, max_lag=0).max_lag == 0
    local = run_with(tmp_path, engine="local")
    assert local.max_lag == 0 and pipeline_of(local.config).queue_key is None


def test_missing_servers_error_names_the_flag(monkeypatch):
    monkeypatch.setenv("LUDIC_SERVER", "http://a:1 http://b:2")
    assert required_servers(()) == ("http://a:1", "http://b:2") and required_servers(("http://c",)) == ("http://c",)
    monkeypatch.delenv("LUDIC_SERVER")
    with pytest.raises(ConfigError, match="needs servers: give --server URL"):
        required_servers(())


# --- the run folder ---


def test_new_run_removes_leftovers_and_resumed_run_keeps_them(tmp_path, monkeypatch):
    monkeypatch.delenv("LUDIC_REDIS_URL", raising=False)
    config = run_with(tmp_path)
    for name in ("redis", "weights", "logs"):
        (config.folder / name).mkdir(parents=True)
        (config.folder / name / "old").write_text("old")
    prepare(config, ResumePoint(), resume=True)
    assert (config.folder / "redis" / "old").is_file() and (config.folder / "weights" / "old").is_file()
    prepare(config, ResumePoint(), resume=False)
    assert (config.folder / "redis").is_dir() and not (config.folder / "redis" / "old").exists()
    assert not (config.folder / "weights").exists() and (config.folder / "config.toml").is_file()


def test_restarting_learner_keeps_rollouts_of_actors(tmp_path):
    config = run_with(tmp_path)
    rollouts = config.folder / "rollouts"
    rollouts.mkdir(parents=True)
    for name in ("actor-0-00000001.jsonl.gz", "from_step_000000.jsonl.gz"):
        (rollouts / name).write_text("{}\n")
    prepare_folder(config, ResumePoint(restarts=True))
    assert [path.name for path in rollouts.iterdir()] == ["actor-0-00000001.jsonl.gz"]


def test_a_pipeline_may_be_resumed_with_another_redis_and_more_actors(ludic, tmp_path):
    (tmp_path / "runs").mkdir()
    config = run_with(tmp_path / "runs", redis="redis://one")
    prepare_folder(config, ResumePoint())
    ended = ludic("launch", "runs/run", "--resume", "--dry-run", "--redis", "redis://two", "--actors", "4")
    assert ended.code == 0 and "actor-3" in ended.out, ended.err
    ended = ludic("launch", "runs/run", "--resume", "--dry-run", "--lr", "1")
    assert ended.code == 2 and "`ludic launch" in ended.err


def test_a_role_finds_the_module_beside_the_env_not_one_of_the_current_folder(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "env.py").write_text(
        f"from wages import BONUS\n{ENV}\nclass Paid(Letter):\n    bonus = BONUS\n"
    )
    (tmp_path / "own" / "wages.py").write_text("BONUS = 0.5")
    (tmp_path / "wages.py").write_text("")
    done = subprocess.run(
        ludic_command("play", "own/env.py:Paid"), cwd=tmp_path, input="A\n", capture_output=True, text=True
    )
    assert done.returncode == 0 and "reward" in done.stdout, done.stderr
