"""The command lines of the container engines, and what is said where an engine is missing."""

import itertools
import os
import stat
from pathlib import Path

import pytest

from ludic.types import ConfigError
from ludic_sandbox import (
    Bind,
    ContainerConfig,
    DockerSandboxConfig,
    DockerSandboxPool,
    PodmanConfig,
    SandboxError,
    SandboxLimits,
    containers,
)
from ludic_sandbox.containers import (
    apptainer_command,
    container_command,
    effective_limits,
    engine_problem,
    memory_bytes,
)


def options(command: list[str]) -> dict[str, list[str]]:
    """Option → its values, for options that take one."""
    found: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(command):
        if name.startswith("--"):
            found.setdefault(name, []).append(value)
    return found


def test_a_docker_container_is_closed_on_all_sides():
    config = DockerSandboxConfig(memory_limit="1g")
    binds = [Bind(source="/a", target="/b"), Bind(source="/c", target="/d", writable=True)]
    command = container_command("docker", config, "the-name", effective_limits(config), binds)
    given = options(command)
    assert given["--volume"] == ["/a:/b:ro", "/c:/d:rw"]
    assert command[:2] == ["docker", "run"] and given["--name"] == ["the-name"] and given["--pull"] == ["never"]
    assert given["--network"] == ["none"] and given["--cap-drop"] == ["ALL"] and "--read-only" in command
    assert given["--security-opt"] == ["no-new-privileges"] and given["--user"] == ["65534:65534"]
    assert given["--memory"] == given["--memory-swap"] == [str(1 << 30)] and given["--pids-limit"] == ["32"]
    assert given["--cpu-quota"] == ["50000"] and given["--workdir"] == ["/workspace"]
    assert given["--tmpfs"] == ["/workspace:rw,exec,nosuid,nodev,size=64m,mode=1777"]
    assert "--rm" not in command, "its state is asked for after its end"
    image = command.index("python:3.11-slim")
    assert command[image + 1] == "python3" and command[-2] == "-c"


def test_podman_has_its_own_settings():
    config = PodmanConfig(base_image="mine:1", gpu=True, network_disabled=False, extra_args=("--runtime", "runc"))
    command = container_command("podman-hpc", config, "n", SandboxLimits(max_processes=5, workspace_mb=9))
    given = options(command)
    assert command[0] == "podman-hpc" and "--gpu" in command and "--network" not in given and "--cpu-quota" not in given
    assert given["--pids-limit"] == ["5"] and "size=9m" in given["--tmpfs"][0] and "--read-only-tmpfs=false" in command
    assert command[command.index("mine:1") - 2 : command.index("mine:1")] == ["--runtime", "runc"]


def test_the_quota_is_half_a_core_on_docker_unless_said_otherwise():
    def quota(engine, **settings):
        command = container_command(engine, ContainerConfig(**settings), "n", SandboxLimits())
        return options(command).get("--cpu-quota")

    assert quota("docker") == ["50000"] and quota("podman") is None
    assert quota("docker", cpu_quota=0) is None and quota("podman", cpu_quota=200_000) == ["200000"]
    assert DockerSandboxConfig is PodmanConfig is ContainerConfig


def test_podmans_gpu_flag_is_refused_for_docker(monkeypatch, tmp_path):
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="extra_args=\\('--gpus', 'all'\\)"):
        DockerSandboxPool(ContainerConfig(gpu=True))


def test_the_apptainer_command():
    config = ContainerConfig(base_image="/images/python.sif", cpu_quota=150_000, gpu=True, extra_args=("--userns",))
    binds = [Bind(source="/a", target="/b"), Bind(source="/c", target="/d", writable=True)]
    command = apptainer_command(config, SandboxLimits(memory_mb=64, max_processes=5), binds, with_groups=True)
    image = command.index("/images/python.sif")
    expected = """
        apptainer exec --containall --no-init --cleanenv --no-home --no-privs --net --network none --nv
        --memory 67108864 --memory-swap 67108864 --pids-limit 5 --cpus 1.5 --pwd /tmp
        --env PATH=/usr/local/bin:/usr/bin:/bin --env LANG=C.UTF-8 --env PYTHONHASHSEED=0 --env OMP_NUM_THREADS=1
        --env OPENBLAS_NUM_THREADS=1 --bind /a:/b:ro --bind /c:/d:rw --userns
    """
    assert command[:image] == expected.split()
    assert command[image + 1] == "python3" and command[-2] == "-c"


def test_apptainer_without_cgroups_has_no_flags_that_need_them():
    config = ContainerConfig(base_image="folder/", network_disabled=False)
    command = apptainer_command(config, SandboxLimits(), with_groups=False)
    assert not {"--memory", "--memory-swap", "--pids-limit", "--cpus", "--net", "--nv"} & set(command)
    with pytest.raises(ConfigError, match="base_image=….*apptainer build"):
        apptainer_command(ContainerConfig(), SandboxLimits(), with_groups=False)


@pytest.mark.parametrize(("text", "number"), [("256m", 256 << 20), ("2G", 2 << 30), ("512k", 512 << 10), ("77", 77)])
def test_memory_is_written_as_the_engines_read_it(text, number):
    assert memory_bytes(text) == number


@pytest.mark.parametrize("text", ["", "m", "lots", "-1m", "0", "1.5g"])
def test_an_invalid_memory_limit_is_refused(text):
    with pytest.raises(ConfigError, match="no amount of memory"):
        memory_bytes(text)


def test_a_missing_engine_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="docker backend cannot be used: docker is not installed"):
        DockerSandboxPool()


def test_an_engine_without_its_daemon_is_reported(monkeypatch, tmp_path):
    fake: Path = tmp_path / "docker"
    fake.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "Cannot connect to the Docker daemon" in engine_problem("docker")


async def test_a_user_without_subordinate_ids_is_told_how_to_get_them(monkeypatch):
    class Refused:
        async def ready(self):
            raise SandboxError(
                "The sandbox did not start: Error: OCI runtime error: runc: unable to setup user: invalid argument"
            )

    async def start(*args, **settings):
        return Refused()

    monkeypatch.setattr(containers, "engine_problem", lambda engine: None)
    monkeypatch.setattr(containers, "start_runner", start)
    launcher = containers.ContainerLauncher("docker", ContainerConfig())
    with pytest.raises(SandboxError, match=r"unable to setup user.*usermod --add-subuids"):
        await launcher.start(SandboxLimits())


async def test_a_container_that_could_not_be_removed_is_removed_after_its_client_has_ended(tmp_path):
    engine = tmp_path / "engine"
    engine.write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\n'
        f"case $1 in inspect) echo abc exited false 0;; rm) test -e {tmp_path}/asked && echo abc; touch {tmp_path}/asked;; esac\n"
    )
    engine.chmod(0o755)
    isolation = containers.ContainerIsolation(str(engine), "name")  # type: ignore[arg-type]
    await isolation.end()
    assert (tmp_path / "calls").read_text().split() == ["inspect", "rm"]
    await isolation.finish()
    await isolation.finish()
    assert (tmp_path / "calls").read_text().split() == ["inspect", "rm", "rm"]
