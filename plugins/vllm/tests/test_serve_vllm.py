"""`ludic serve --engine vllm` up to the point where this process would become the server."""

import os
import sys
from pathlib import Path

import pytest

from ludic.types import ConfigError
from ludic_vllm.command import VLLMInstall
from tests.unit.cli.runner import invoke


class Became(Exception):
    """Where the process would have been replaced."""


@pytest.fixture
def became(monkeypatch):
    seen = []

    def instead(arguments, *, insecure):
        seen.extend(arguments)
        raise Became

    monkeypatch.setattr("ludic_vllm.vllm_server.serve", instead)
    monkeypatch.delenv("LUDIC_API_KEY", raising=False)
    return seen


@pytest.fixture
def executed(monkeypatch, tmp_path):
    """The command line of vLLM, where there would be one."""
    seen = []

    def instead(program, arguments, environment):
        seen.extend(arguments)
        raise Became

    install = VLLMInstall(python=Path(sys.executable), version="0.32.0", is_cpu=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ludic_vllm.vllm_server.find_vllm", lambda: install)
    monkeypatch.setattr("ludic_vllm.vllm_server.check_port", lambda host, port: None)
    monkeypatch.setattr("os.execve", instead)
    for name in ("LUDIC_API_KEY", "VLLM_API_KEY", "LUDIC_CONTROL_TOKEN"):
        monkeypatch.setenv(name, "")  # so that what the command sets is taken back
    return seen


def serve(*arguments):
    return invoke(["serve", "--engine", "vllm", "--model", "org/m", *arguments]).exception


def test_our_options_become_flags_of_vllm_and_the_rest_is_passed_on(became):
    options = [
        "--model",
        "org/m",
        "--port",
        "8031",
        "--max-sequences",
        "64",
        "--max-model-len",
        "4096",
        "--dtype",
        "bfloat16",
    ]
    done = invoke(["serve", "--engine", "vllm", *options, "--", "-tp", "2", "--run-folder", "here"])
    assert isinstance(done.exception, Became)
    assert became == [
        *("--model", "org/m", "--host", "127.0.0.1", "--port", "8031", "--dtype", "bfloat16"),
        *("--max-model-len", "4096", "--max-num-seqs", "64", "-tp", "2", "--run-folder", "here"),
    ]


def test_api_key_is_passed_by_environment_only(became, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "to be replaced")
    invoke(["serve", "--engine", "vllm", "--model", "org/m", "--host", "0.0.0.0", "--api-key", "k"])
    assert os.environ["VLLM_API_KEY"] == "k" and "0.0.0.0" in became and "k" not in became


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm", "--model", "org/m", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["--engine", "vllm", "--model", "tiny"], "only --engine local knows the name 'tiny'"),
        (["--model", "org/m", "--", "--max-num-seqs", "8"], "give --engine vllm"),
    ],
)
def test_invalid_combinations_are_refused_before_starting(became, arguments, message):
    done = invoke(["serve", *arguments])
    assert isinstance(done.exception, ConfigError) and message in str(done.exception) and became == []


CONFIGS = {"host": "host: 0.0.0.0", "port": "port: 80", "uds": "{uds: /tmp/x}", "hos": "hos: '::'"}
KEYLESS_CONFIGS = ["api-key: ''", "api_key:", "api-key: []", "api-key: [k, '']", "{'api-ke': k}"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "None", "10.0.0.1", "example.org", "127.0.0.1.example.org"])
@pytest.mark.parametrize("form", ["ours", "behind", "one word", "twice"])
def test_public_host_requires_a_key_in_any_spelling(executed, host, form):
    arguments = {
        "ours": ["--host", host],
        "behind": ["--", "--host", host],
        "one word": ["--", f"--host={host}"],
        "twice": ["--host", "127.0.0.1", "--", "--host", "127.0.0.1", "--max-num-seqs", "8", f"--host={host}"],
    }[form]
    error = serve(*arguments)
    assert isinstance(error, ConfigError) and "Give an --api-key" in str(error) and executed == []
    assert not Path("runs").exists(), "nothing is left of what did not start"
    for given in (["--api-key", "k"], ["--insecure"]):
        assert isinstance(serve(*given, *arguments), Became)
        last = len(executed) - 1 - executed[::-1].index("--host")
        assert executed[last + 1] == host and executed.count("--host") == 1, "vLLM is told once, and that"
        executed.clear()


@pytest.mark.parametrize("key", [["--api-key", "k"], ["--api-key=k"], ["--api_key", "k", "l"]], ids=str)
def test_a_key_among_the_flags_of_vllm_is_a_key(executed, key):
    assert isinstance(serve("--host", "0.0.0.0", "--", *key), Became)
    assert executed[executed.index(key[0]) :][: len(key)] == key


@pytest.mark.parametrize("form", ["variable", "option"])
@pytest.mark.parametrize(
    "flags",
    [["--api-key", ""], ["--api-key="], ["--api-key", "None"], ["--api_key", "--max-num-seqs", "8"], ["--api-key"]],
)
def test_empty_key_does_not_replace_the_environment_key(executed, monkeypatch, flags, form):
    monkeypatch.setenv("LUDIC_API_KEY", "k" if form == "variable" else "")
    own = ["--api-key", "k"] if form == "option" else []
    for arguments in (["--host", "0.0.0.0", *own, "--", *flags], [*own, "--", *flags, "--host", "0.0.0.0"]):
        error = serve(*arguments)
        assert isinstance(error, ConfigError) and "empty --api-key" in str(error) and executed == []


@pytest.mark.parametrize(
    "flags",
    [["--hos", "0.0.0.0"], ["--ho=::"], ["--por", "80"], ["--ud", "/x"], ["--api-k", ""], ["--api", ""]],
    ids=str,
)
def test_an_abbreviation_that_vllm_would_understand_is_refused(executed, flags):
    error = serve("--", *flags)
    assert isinstance(error, ConfigError) and "in full" in str(error) and executed == []


@pytest.mark.parametrize("flags", [["--uds", "/tmp/x"], ["--uds=/tmp/x"]], ids=str)
def test_unix_socket_of_vllm_is_refused(executed, flags):
    assert "leave --uds out" in str(serve("--api-key", "k", "--", *flags)) and executed == []


@pytest.mark.parametrize("text", [*CONFIGS.values(), *KEYLESS_CONFIGS])
def test_a_config_file_of_vllm_cannot_move_the_server_or_open_it(executed, text):
    Path("c.yaml").write_text(f"{text}\n")
    error = serve("--api-key", "k", "--", "--config", "c.yaml")
    assert isinstance(error, ConfigError) and executed == []


@pytest.mark.parametrize("text", [None, "- a list", "{", ""])
def test_a_config_file_that_cannot_be_read_is_named(executed, text):
    if text is not None:
        Path("c.yaml").write_text(text)
    error = serve("--", "--config", "c.yaml")
    assert isinstance(error, ConfigError) and "--config c.yaml" in str(error) and executed == []


def test_a_config_file_with_a_key_and_other_flags_is_taken(executed):
    Path("c.yaml").write_text("max-num-seqs: 8\nenforce-eager: true\napi-key: k\n")
    assert isinstance(serve("--host", "0.0.0.0", "--", "--config", "c.yaml"), Became)
    assert executed[executed.index("--config") + 1] == "c.yaml"


def test_the_last_port_is_the_one_that_is_checked_and_announced(executed, monkeypatch, capsys):
    checked = []
    monkeypatch.setattr("ludic_vllm.vllm_server.check_port", lambda host, port: checked.append((host, port)))
    done = invoke(["serve", "--engine", "vllm", "--model", "org/m", "--", "--port", "8041", "--port=8042"])
    assert isinstance(done.exception, Became) and checked == [("127.0.0.1", 8042)]
    assert "127.0.0.1:8042" in done.output and executed.count("--port") == 1
