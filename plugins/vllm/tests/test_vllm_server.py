"""The server itself, with plain HTTP: its guard, its end, its errors, its limit on thinking."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ludic.http.address import free_port
from ludic_vllm.inside.middlewares import OPEN
from ludic_vllm.process import ServerDied, is_healthy, wait_for_vllm_health
from ludic_vllm.watch import HealthCheck
from plugins.vllm.tests import warm_vllm
from plugins.vllm.tests.vllm_fixtures import ROOT, START_TIMEOUT_S, byte_tokenizer, skip_without_vllm, start_warm_server

pytestmark = [pytest.mark.integration, pytest.mark.slow]
CLOSING = [int(number) for number in byte_tokenizer().encode("</think>", add_special_tokens=False)]
PROMPT = byte_tokenizer().encode("<|user|>think<|end|><|assistant|>")


# --- the guard ---------------------------------------------------------------------------------------------------


def state(server):
    """What a control request could have changed."""
    models = [model["id"] for model in server.ask("GET", "/v1/models")[1]["data"]]
    return [models, *(server.ask("GET", path) for path in ("/is_paused", "/weight_info", "/is_sleeping"))]


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_wrong_control_token_is_answered_401_and_nothing_changes(vllm_server, token):
    before = state(vllm_server)
    asked = [
        ("/pause?mode=abort", None),
        ("/update_weight_version", {"new_version": "99"}),
        ("/start_weight_update", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}),
        ("/sleep?level=1", None),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
    ]
    for path, body in asked:
        status, answer = vllm_server.ask("POST", path, body, token=token)
        assert status == 401 and "X-Ludic-Control-Token" in answer["error"]["message"], path
    assert state(vllm_server) == before
    assert complete(vllm_server, max_tokens=4)[0] == 200


def test_every_other_endpoint_that_this_vllm_has_needs_the_token(vllm_server):
    status, description = vllm_server.ask("GET", "/openapi.json", token=vllm_server.control_token)
    assert status == 200
    routes = {
        (method.upper(), path)
        for path, methods in description["paths"].items()
        for method in methods
        if "{" not in path
    }
    assert ("POST", "/pause") in routes and ("POST", "/v1/completions") in routes, "the routes are not all here"
    guarded = routes - OPEN
    assert {(method, path): vllm_server.ask(method, path)[0] for method, path in guarded} == dict.fromkeys(guarded, 401)


def test_the_right_token_pauses_and_resumes(vllm_server):
    token = vllm_server.control_token
    assert vllm_server.ask("POST", "/pause?mode=keep", token=token)[0] == 200
    try:
        assert vllm_server.ask("GET", "/is_paused") == (200, {"is_paused": True})
        assert HealthCheck(vllm_server.url, hung_after_s=60).ask(), "a paused server does not count as hung"
    finally:
        assert vllm_server.ask("POST", "/resume", token=token)[0] == 200
    assert vllm_server.ask("GET", "/is_paused") == (200, {"is_paused": False})


# --- max_think ---------------------------------------------------------------------------------------------------


def complete(server, **fields):
    body = {
        "prompt": PROMPT,
        "temperature": 1.0,
        "seed": 3,
        "return_token_ids": True,
        "logprobs": 0,
        "ignore_eos": True,
    }
    return server.ask("POST", "/v1/completions", {"model": "tiny", **body, **fields})


def reply(server, **fields):
    status, answer = complete(server, **fields)
    assert status == 200, answer
    return answer["choices"][0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_thinking_is_closed_at_its_limit(vllm_server, temperature):
    free = reply(vllm_server, max_tokens=24, temperature=temperature)["token_ids"]
    assert free[5:13] != CLOSING, "the model closes by itself; this would show nothing"
    limited = reply(vllm_server, max_tokens=24, temperature=temperature, vllm_xargs={"max_think": 5})
    assert limited["token_ids"][:13] == free[:5] + CLOSING
    assert len(limited["token_ids"]) == 24, "the reply goes on behind the tag"
    assert "</think>" in limited["text"]
    # What was forced had no alternative under the distribution that it was taken from.
    assert limited["logprobs"]["token_logprobs"][5:13] == [0.0] * 8


def test_the_token_endpoint_has_the_limit_too(vllm_server):
    sampling = {"max_tokens": 16, "temperature": 1.0, "seed": 3, "ignore_eos": True, "extra_args": {"max_think": 2}}
    status, answer = vllm_server.ask(
        "POST", "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}
    )
    assert status == 200 and answer["choices"][0]["token_ids"][2:10] == CLOSING


def test_only_the_requests_that_ask_are_limited(vllm_server):
    alone = [reply(vllm_server, max_tokens=24, seed=seed)["token_ids"] for seed in range(4)]
    asked = [dict(seed=seed, **extra) for seed in range(4) for extra in ({}, {"vllm_xargs": {"max_think": seed + 1}})]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda fields: reply(vllm_server, max_tokens=24, **fields)["token_ids"], asked))
    assert together[::2] == alone
    for seed, limited in enumerate(together[1::2]):
        assert limited[: seed + 9] == [*alone[seed][: seed + 1], *CLOSING]


@pytest.mark.parametrize("limit", [0, "many", 2.5])
def test_a_limit_that_makes_no_sense_is_a_400(vllm_server, limit):
    status, answer = complete(vllm_server, max_tokens=4, vllm_xargs={"max_think": limit})
    assert status == 400 and "max_think is" in answer["error"]["message"]


def test_the_model_runner_of_gpus_forces_the_same(vllm_model_dir):
    skip_without_vllm()
    done = subprocess.run(
        [warm_vllm.python(), Path(__file__).with_name("max_think_in_vllm.py"), vllm_model_dir],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'plugins/vllm'}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    three, without, six = json.loads(done.stdout.splitlines()[-1])
    assert three == [7] * 3 + CLOSING + [7] * 9
    assert without == [7] * 20
    assert six == [7] * 6 + CLOSING + [7] * 6


# --- beginning and end -------------------------------------------------------------------------------------------


def test_a_server_that_dies_shows_its_own_error(tmp_path):
    skip_without_vllm()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    process = start_warm_server(tmp_path / "model", tmp_path / "run")
    try:
        with pytest.raises(ServerDied, match="first error: .*NoSuchModel(.|\n)*Its last lines"):
            wait_for_vllm_health("127.0.0.1", process.command.port, process, timeout_s=START_TIMEOUT_S)
    finally:
        process.stop()


@pytest.mark.extended(
    covered_by="plugins/vllm/tests/test_serve_vllm.py::test_our_options_become_flags_of_vllm_and_the_rest_is_passed_on"
)
def test_ludic_serve_becomes_a_guarded_server_that_sigterm_stops(vllm_model_dir, tmp_path):
    skip_without_vllm()
    port = free_port()
    options = ["--model", str(vllm_model_dir), "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    flags = ["--run-folder", str(tmp_path / "run"), "--kv-cache-memory-bytes", "64M"]
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "ludic.cli.main", "serve", "--engine", "vllm", *options, "--", *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_vllm_health("127.0.0.1", port, Watched(process, output), timeout_s=START_TIMEOUT_S)
        named = Path(re.search(r"control token is in (\S+)\.", output.read_text())[1])
        assert named == tmp_path / "run" / "control_token" and stat.S_IMODE(named.stat().st_mode) == 0o600
        assert named.read_text().strip() not in output.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) in (0, -signal.SIGTERM)
        assert not is_healthy("127.0.0.1", port)
        deadline = time.monotonic() + 20
        while left := members(process.pid):  # the server does not wait for its workers' last breath
            assert time.monotonic() < deadline, f"a worker outlived the server: {left}"
            time.sleep(0.1)
    finally:
        if members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Watched:
    """A process of the test's own, as `wait_for_vllm_health` wants it."""

    def __init__(self, process, file):
        self.poll = process.poll
        self.file = file

    def output(self):
        return self.file.read_text()


def members(group):
    """The processes of a group that have not ended."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,pid="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [pid for pgid, status, pid in rows if pgid == str(group) and not status.startswith("Z")]
