"""Task folders: what is read from task.toml, task.yaml and a Dockerfile, and what is refused by name."""

from pathlib import Path

import pytest

from ludic.types import ConfigError
from ludic_sandbox import SandboxLimits
from ludic_sandbox.harbor import HarborEnv, HarborTask, find_tasks
from ludic_sandbox.harbor.containers import needs_network, workspace_command
from ludic_sandbox.harbor.dockerfile import read_dockerfile
from ludic_sandbox.harbor.env import command_in
from ludic_sandbox.harbor.grading import read_rewards
from ludic_sandbox.harbor.workspace import CommandOutput, Paths

TASKS = Path(__file__).parents[4] / "examples" / "harbor_tasks"
SMALL = {"task.toml": "", "instruction.md": "Do it.", "tests/test.sh": "#!/bin/bash\n"}


def names(needs) -> list[str]:
    return sorted(need.name for need in needs)


# --- Dockerfiles ---


def test_copy_workdir_and_env_of_a_dockerfile():
    text = """
    FROM ubuntu:24.04  # not followed
    ARG PLACE=data
    ENV ROOT=/srv MODE="two words" LEFT=a
    WORKDIR /app
    WORKDIR src
    COPY one.txt .
    COPY one.txt two.txt ${ROOT}/${PLACE}/
    COPY tree /opt/tree
    COPY --chown=1:1 ["tree/a b.txt", "renamed.txt"]
    COPY *.txt all/
    CMD ["bash"]
    """
    setup = read_dockerfile(text, {"one.txt": b"1", "two.txt": b"2", "tree/a b.txt": b"3", "tree/deep/c.txt": b"4"})
    assert setup.workdir == "/app/src" and setup.env == {"ROOT": "/srv", "MODE": "two words", "LEFT": "a"}
    assert {path: data.decode() for path, data in setup.files.items()} == {
        "/app/src/one.txt": "1",
        "/srv/data/one.txt": "1",
        "/srv/data/two.txt": "2",
        "/opt/tree/a b.txt": "3",
        "/opt/tree/deep/c.txt": "4",
        "/app/src/renamed.txt": "3",
        "/app/src/all/one.txt": "1",
        "/app/src/all/two.txt": "2",
    }
    assert setup.top_folders == ["/app", "/opt", "/srv"] and not setup.needs


def test_lines_that_need_a_container_are_named_with_their_numbers():
    text = "FROM a AS build\nRUN apt-get update \\\n  && apt-get install -y gcc\nRUN <<EOF\nUSER agent\nEOF\nFROM b\n"
    text += "COPY --from=build /x /y\nADD https://example.org/x.tar.gz /x\nUSER agent\nCOPY f /etc/f\nONBUILD RUN x\n"
    needs = read_dockerfile(text, {"f": b""}).needs
    assert names(needs) == ["/etc", "ADD", "COPY", "FROM", "ONBUILD", "RUN", "RUN", "USER"]
    assert "line 2: RUN apt-get update && apt-get install" in str(needs[0])


def test_a_file_that_the_context_does_not_have_is_a_mistake_of_the_task():
    with pytest.raises(ConfigError, match="no 'data.csv'; it has Dockerfile"):
        read_dockerfile("FROM a\nCOPY data.csv .", {"Dockerfile": b""})


# --- task.toml ---


def test_settings_of_a_harbor_task():
    toml = """
    [task]
    name = "me/sums"
    [agent]
    timeout_sec = 5
    [verifier]
    timeout_sec = 7.5
    env = { KEY = "${KEY}", MODE = "${MODE:-fast}" }
    [environment]
    memory = "2G"
    storage_mb = 100
    workdir = "/work"
    env = { A = "b" }
    [solution]
    env = { S = "t" }
    """
    files = {
        **SMALL,
        "task.toml": toml,
        "environment/Dockerfile": "FROM x\nWORKDIR /app\n",
        "solution/solve.sh": "true",
    }
    task = HarborTask.from_files(files, "folder", {"KEY": "k"})
    assert (task.name, task.agent_timeout_s, task.test_timeout_s) == ("me/sums", 5.0, 7.5)
    assert (task.memory_mb, task.storage_mb, task.setup.workdir) == (2048, 100, "/work")
    assert (dict(task.test_env), task.setup.env, dict(task.solution_env)) == (
        {"KEY": "k", "MODE": "fast"},
        {"A": "b"},
        {"S": "t"},
    )
    assert task.solution_script == "solve.sh" and not task.needs
    assert names(HarborTask.from_files(files, "folder").needs) == ["$KEY"], "the host's environment is not read"


@pytest.mark.parametrize(
    ("toml", "need"),
    [
        ("[environment]\nallow_internet = true", "network"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['x.org']", "network"),
        ("[environment]\ngpus = 1", "gpus"),
        ("[environment]\nos = 'Windows'", "windows"),
        ("[environment]\ndocker_image = 'x:1'", "FROM"),
        ("[[environment.mcp_servers]]\nname = 'x'\nurl = 'http://x'", "mcp"),
        ("[environment.healthcheck]\ncommand = 'true'", "healthcheck"),
        ("[verifier]\nenvironment_mode = 'separate'", "separate verifier"),
        ("[agent]\nuser = 'agent'", "USER"),
        ("[[steps]]\nname = 'one'", "steps"),
    ],
)
def test_what_a_workspace_does_not_have_is_refused_by_name(toml, need):
    sample = {"id": "t", "files": {**SMALL, "task.toml": toml}}
    with pytest.raises(ConfigError, match=f"The task t needs what the workspace 'bubblewrap' does not have: {need} "):
        HarborEnv(sample)
    assert HarborEnv(sample, ignore=[need]).task.name == "t"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither task.toml"),
        ({**SMALL, "task.toml": "x ="}, "task.toml of the task t cannot be read"),
        ({"task.toml": "", "instruction.md": "x"}, "no tests/test.sh"),
        ({"task.toml": "", "tests/test.sh": ""}, "no instruction.md"),
        ({**SMALL, "task.toml": "[agent]\ntimeout_sec = -1"}, "timeout_sec = -1"),
        ({"task.yaml": "instruction: 1", "run-tests.sh": ""}, "no text 'instruction'"),
        ({"task.yaml": "instruction: Do it."}, "no run-tests.sh"),
    ],
)
def test_a_broken_task_says_what_is_wrong(files, message):
    with pytest.raises(ConfigError, match=message):
        HarborTask.from_files(files, "t")


def test_settings_of_a_terminal_bench_task():
    yaml = "instruction: |-\n  Do it.\nmax_agent_timeout_sec: 90\nmax_test_timeout_sec: 8\ndifficulty: easy\n"
    files = {
        "task.yaml": yaml,
        "run-tests.sh": "",
        "tests/test_outputs.py": "",
        "solution.sh": "true",
        "Dockerfile": "FROM x",
    }
    task = HarborTask.from_files(files, "t")
    assert (task.format, task.instruction, task.agent_timeout_s, task.test_timeout_s) == (
        "terminal-bench",
        "Do it.",
        90.0,
        8.0,
    )
    assert sorted(task.tests) == ["run-tests.sh", "test_outputs.py"] and task.test_script == "run-tests.sh"
    assert task.setup.env["TEST_DIR"] == "/tests"
    two = {**files, "docker-compose.yaml": "services:\n  client: {}\n  db: {}\n"}
    assert names(HarborTask.from_files(two, "t").needs) == ["compose"]


def test_a_folder_of_tasks_is_found_and_the_seed_chooses():
    assert [path.name for path in find_tasks(TASKS)] == ["log-summary", "merge-settings", "tidy-inbox"]
    assert find_tasks(TASKS / "log-summary") == [TASKS / "log-summary"]
    with pytest.raises(ConfigError, match="is no task and has none directly below it"):
        find_tasks(TASKS.parent)
    env = HarborEnv(task=str(TASKS))
    assert [env._choose(seed).name for seed in (0, 1, 5)] == [
        "ludic/log-summary",
        "ludic/merge-settings",
        "ludic/tidy-inbox",
    ]


def test_a_container_gets_run_and_a_network_only_where_the_task_asks_for_one():
    files = {**SMALL, "environment/Dockerfile": "FROM x\nRUN true\nUSER me\n"}
    quiet = HarborEnv({"files": files}, workspace="podman").task
    loud = HarborEnv({"files": {**files, "task.toml": "[environment]\nallow_internet = true"}}, workspace="podman").task
    assert not needs_network(quiet) and needs_network(loud)
    command = workspace_command("podman", "n", "image:1", SandboxLimits(memory_mb=100), ["--x"])
    assert command[:5] == ["podman", "run", "--detach", "--name", "n"] and "--network" in command and "--x" in command
    assert command[command.index("--memory") + 1] == str(100 << 20)
    assert "--network" not in workspace_command("podman", "n", "image:1", SandboxLimits(), has_network=True)
    with pytest.raises(ConfigError, match="does not have: compose"):
        HarborEnv({"files": {**files, "environment/docker-compose.yaml": ""}}, workspace="podman")


# --- rewards ---


@pytest.mark.parametrize(
    ("outputs", "rewards", "problem"),
    [
        ({"reward.txt": b"0.5\n"}, {"reward": 0.5}, ""),
        ({"reward.json": b'{"reward": 1, "style": 0.25}', "reward.txt": b"0"}, {"reward": 1.0, "style": 0.25}, ""),
        ({"reward.json": b"0.75"}, {"reward": 0.75}, ""),
        ({}, {}, "wrote neither"),
        ({"reward.txt": b""}, {}, "cannot be read"),
        ({"reward.txt": b"nan"}, {}, "no finite number"),
        ({"reward.json": b'{"reward": 1e999}'}, {}, "no finite number"),
        ({"reward.json": b'{"reward": "1"}'}, {}, "no finite number"),
        ({"reward.json": b"{}"}, {}, "has no reward"),
        ({"reward.json": b"[" * 100_000}, {}, "cannot be read"),
    ],
)
def test_the_reward_files_of_harbor(outputs, rewards, problem):
    files = {f"/logs/verifier/{name}": data for name, data in outputs.items()}
    found, why = read_rewards(CommandOutput(text="", exit_code=0, outputs=files))
    assert found == rewards and (problem in why if problem else why == "")


# --- replies and paths ---


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("Look:\n```bash\nls -l\n```\nthen\n```sh\npwd\n```", "ls -l\n\npwd\n"),
        ("ls -l", "ls -l"),
        ("I think that\nwe are finished", None),
        ("DONE.", None),
        ("exit", None),
        ("", None),
        ("```bash\n\n```", None),
    ],
)
def test_the_command_of_a_reply(reply, command):
    assert command_in(reply) == command


def test_paths_of_a_local_workspace_are_rewritten_and_back():
    paths = Paths(root="/tmp/w1", folders=("/app", "/tests", "/tmp"))
    text = "cat /app/x '/tests' /application ./app/app /usr/app a/tmp >/tmp/o; cd /app"
    inside = paths.inside(text)
    assert inside == (
        "cat /tmp/w1/app/x '/tmp/w1/tests' /application ./app/app /usr/app a/tmp >/tmp/w1/tmp/o; cd /tmp/w1/app"
    )
    assert paths.outside(inside) == text and Paths().inside(text) == text
