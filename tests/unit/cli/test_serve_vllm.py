"""`ludic serve --engine vllm` up to the point where this process would become the server."""

import os

import pytest
from typer.testing import CliRunner

from ludic.cli.main import app
from ludic.types import ConfigError

runner = CliRunner()


class Became(Exception):
    """Where the process would have been replaced."""


@pytest.fixture
def became(monkeypatch):
    seen = []

    def instead(arguments):
        seen.extend(arguments)
        raise Became

    monkeypatch.setattr("ludic.inference.vllm_server.serve", instead)
    monkeypatch.delenv("LUDIC_API_KEY", raising=False)
    return seen


def test_our_options_become_flags_of_vllm_and_the_rest_is_passed_on(became):
    options = [
        "--model",
        "m",
        "--port",
        "8031",
        "--max-sequences",
        "64",
        "--max-model-len",
        "4096",
        "--dtype",
        "bfloat16",
    ]
    done = runner.invoke(app, ["serve", "--engine", "vllm", *options, "--", "-tp", "2", "--run-folder", "here"])
    assert isinstance(done.exception, Became)
    assert became == [
        *("--model", "m", "--host", "127.0.0.1", "--port", "8031", "--dtype", "bfloat16"),
        *("--max-model-len", "4096", "--max-num-seqs", "64", "-tp", "2", "--run-folder", "here"),
    ]


def test_a_key_is_handed_over_out_of_sight(became, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "to be replaced")
    runner.invoke(app, ["serve", "--engine", "vllm", "--model", "m", "--host", "0.0.0.0", "--api-key", "k"])
    assert os.environ["VLLM_API_KEY"] == "k" and "0.0.0.0" in became and "k" not in became


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm", "--model", "m", "--host", "0.0.0.0"], "Give an --api-key"),
        (["--engine", "vllm", "--model", "m", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["--engine", "vllm", "--model", "tiny"], "only --engine local knows the name 'tiny'"),
        (["--model", "m", "--", "--max-num-seqs", "8"], "give --engine vllm"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(became, arguments, message):
    done = runner.invoke(app, ["serve", *arguments])
    assert isinstance(done.exception, ConfigError) and message in str(done.exception) and became == []
