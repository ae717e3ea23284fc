import sys

import pytest

from ludic.types import ConfigError, UnknownName
from ludic_sandbox import (
    BubblewrapConfig,
    SandboxError,
    SubprocessSandboxPool,
    create_sandbox_pool,
    detect_available_backend,
    get_backend_info,
)
from ludic_sandbox.backends import backend_problem
from ludic_sandbox.bubblewrap import bubblewrap_problem, find_interpreter
from ludic_sandbox.plugin import check_bubblewrap


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """A machine with an empty PATH. What was found out before is forgotten, and again afterwards."""
    bubblewrap_problem.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    bubblewrap_problem.cache_clear()


def test_without_any_backend_the_error_says_what_to_install(nothing_installed):
    with pytest.raises(RuntimeError) as caught:
        detect_available_backend()
    text = str(caught.value)
    for part in ("bwrap is not installed", "docker is not installed", "apt install bubblewrap", "backend='subprocess'"):
        assert part in text


async def test_a_missing_sandbox_is_never_replaced_by_a_plain_subprocess(nothing_installed):
    with pytest.raises(RuntimeError, match="No sandbox backend works here"):
        await create_sandbox_pool()
    with pytest.raises(SandboxError, match="bwrap is not installed"):
        await create_sandbox_pool(backend="bubblewrap")


def test_the_order_of_backends_depends_on_slurm(nothing_installed, monkeypatch):
    def order() -> list[str]:
        with pytest.raises(RuntimeError) as caught:
            detect_available_backend()
        return [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]]

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert order() == ["bubblewrap", "docker", "podman", "podman-hpc"]
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert order() == ["bubblewrap", "podman-hpc", "podman", "docker"]


def test_backend_info_says_why_each_is_unavailable(nothing_installed):
    info = get_backend_info()
    assert info["docker"] == "docker is not installed." and info["podman-hpc"] == "podman-hpc is not installed."
    assert info["subprocess"] == "available" and "auto" not in info


async def test_a_typo_gets_a_hint():
    with pytest.raises(UnknownName, match="Did you mean 'bubblewrap'"):
        await create_sandbox_pool(backend="bublewrap")
    with pytest.raises(UnknownName, match="docker"):
        backend_problem("dokcer")


async def test_a_config_must_be_the_backends_own():
    with pytest.raises(ConfigError, match="takes a SubprocessConfig, but config is a BubblewrapConfig"):
        await create_sandbox_pool(backend="subprocess", config=BubblewrapConfig())


async def test_the_subprocess_backend_must_be_named_and_logs_a_warning(caplog):
    async with await create_sandbox_pool(backend="subprocess", n_workers=1) as pool:
        assert isinstance(pool, SubprocessSandboxPool)
        assert (await (await pool.checkout()).execute("print(1)")).stdout == "1\n"
    assert "not a sandbox" in caplog.text


def test_an_interpreter_is_found_by_version_and_by_path():
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert find_interpreter(this).version == find_interpreter(sys.executable).version == this
    assert find_interpreter().version


@pytest.mark.parametrize("wanted", ["2.0", "/no/such/python", "/bin/ls"])
def test_a_missing_python_is_refused(wanted):
    with pytest.raises(ConfigError, match="2.0|/no/such/python|/bin/ls"):
        find_interpreter(wanted)


def test_a_bubblewrap_without_namespaces_is_broken_and_the_kernel_settings_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("ludic_sandbox.bubblewrap.bubblewrap_problem", lambda: "bwrap cannot make a sandbox here: no.")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "linux")
    status, says, repair = check_bubblewrap()
    assert status == "broken" and "cannot make a sandbox" in says and "unprivileged_userns_clone" in repair
