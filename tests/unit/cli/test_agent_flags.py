"""`ludic train`, `ludic eval` and `ludic gateway` with agents that make their model calls over HTTP. The model is tiny."""

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from ludic.run.config.run_config import RunConfig
from ludic.run.settings import read_toml
from ludic.training.loggers import read_metrics
from ludic.types import load_rollouts
from ludic_sandbox import is_bubblewrap_available
from tests import warm_python
from tests.unit.cli.train_parts import AGENT, RUN, SMALL, command_in

pytestmark = pytest.mark.slow

COMMAND = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(json.load(opener.open(request))["choices"][0]["message"]["content"], end="")
"""


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "command.py").write_text(COMMAND)
    tmp_path.chmod(0o755)
    return command_in(tmp_path, monkeypatch, capsys)


def numbers(folder: Path, *names: str) -> list[tuple[float, ...]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [tuple(row[name] for name in names) for row in rows if names[0] in row]


def test_a_function_trains_with_the_numbers_of_the_native_agent(ludic, tmp_path):
    assert ludic("train", *RUN[:-1], "native").code == 0
    ended = ludic("train", *RUN, "--agent", "my_agent.py:solve")
    assert ended.code == 0, ended.err
    outside, native = tmp_path / "runs" / "first", tmp_path / "runs" / "native"
    names = ("train/avg_total_reward", "train/loss", "train/grad_norm", "train/entropy")
    assert numbers(outside, *names) == numbers(native, *names)
    assert read_toml(RunConfig, outside / "config.toml").agent.agent == "my_agent.py:solve"
    rollouts = list(load_rollouts(outside / "rollouts" / "from_step_000000.jsonl.gz"))
    assert len(rollouts) == 16 and all(rollout.meta["gateway"]["calls"] == 1 for rollout in rollouts)


@pytest.mark.parametrize(
    "sandbox",
    [
        "none",
        pytest.param(
            "bubblewrap",
            marks=pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here"),
        ),
    ],
)
def test_a_command_trains(ludic, tmp_path, sandbox):
    command = ["--agent-command", "python command.py {task}", "--agent-sandbox", sandbox]
    ended = ludic("train", *RUN, *command, "--steps", "1", "--concurrency", "4")
    assert ended.code == 0, ended.err
    rollouts = list(load_rollouts(tmp_path / "runs" / "first" / "rollouts" / "from_step_000000.jsonl.gz"))
    assert len(rollouts) == 8 and not any(rollout.failure for rollout in rollouts)
    assert read_toml(RunConfig, tmp_path / "runs" / "first" / "config.toml").agent.agent is None


def test_a_function_is_evaluated(ludic, tmp_path):
    ended = ludic(
        "eval", "letter.py:Letter", "--model", "tiny", "--max-tokens", "1", "--num-tasks", "4", "--name", "e", "--agent",
        "my_agent.py:loud", "--agent-set", "suffix=X", "--success-reward", "1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    (file,) = (tmp_path / "runs" / "eval" / "e" / "rollouts").iterdir()
    rollouts = list(load_rollouts(file))
    assert len(rollouts) == 4 and all(rollout.meta["agent_name"] == "loud" for rollout in rollouts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--agent", "my_agent.py:sovle"], "Did you mean 'solve'?"),
        (["--agent", "my_agnet.py:solve"], "There is no file my_agnet.py"),
        (["--agent", "my_agent.py:takes_nothing"], "cannot be called: too many positional arguments"),
        (["--agent", "my_agent.py:loud"], "missing a required argument: 'suffix'"),
        (["--agent", "my_agent.py:solve", "--agent-set", "sufix=1"], "got an unexpected keyword argument 'sufix'"),
        (["--agent", "my_agent.py:LIMIT"], "name a class or a function"),
        (["--agent", "my_agent.py:solve", "--tools", "calculator"], "--tools are for agents of ludic.agents"),
        (["--agent", "my_agent.py:solve", "--agent-max-calls", "0"], "agent_max_calls = 0; it must be at least 1"),
        (["--agent-command", "no-such-agent {task}"], "There is no program 'no-such-agent'"),
        (["--agent-command", "python {taks}"], "Did you mean {task}?"),
        (["--agent-command", "true", "--agent", "agent"], "is the whole agent"),
    ],
)
@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"]])
def test_a_mistake_is_one_line_before_anything_is_loaded(ludic, tmp_path, command, flags, message):
    ended = ludic(*command, "letter.py:Letter", *SMALL, *flags)
    assert ended.code == 2 and message in ended.err, ended.err
    assert "Traceback" not in ended.err and not (tmp_path / "runs").exists()


def test_an_agent_that_always_fails_stops_the_run_with_its_reason(ludic):
    ended = ludic("train", *RUN, "--agent", "my_agent.py:fails")
    assert ended.code == 2 and "no internet" in ended.err and "max_failed_share" in ended.err


def test_a_prompt_that_is_too_long_names_the_flag(ludic):
    ended = ludic("train", *RUN, "--agent", "my_agent.py:long", "--max-seq-len", "64")
    assert ended.code == 2 and "limit is 64" in ended.err and "--max-seq-len" in ended.err


def test_an_env_for_two_is_refused(ludic):
    ended = ludic("train", "tic_tac_toe_duel", *SMALL, "--agent", "my_agent.py:solve")
    assert ended.code == 2 and "plays envs with one agent" in ended.err


@pytest.mark.slow
def test_the_gateway_command_records_sessions(tmp_path):
    """The real command in a real process; its sessions by the requests that it prints."""
    command = [
        warm_python.executable(),
        "-m",
        "ludic.cli.main",
        "gateway",
        "--model",
        "tiny",
        "--port",
        "0",
        "--save",
        "out.jsonl",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ}) as process:
        try:
            url = process.stdout.readline().split(" at ")[1].split()[0]
            token = (tmp_path / "runs" / "gateway" / "control_token").read_text().strip()

            def post(path: str, body: object, **headers: str) -> dict:
                data = json.dumps(body).encode()
                request = urllib.request.Request(
                    url + path, data, {"Content-Type": "application/json", **headers}, method="POST"
                )
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
                    return json.load(answer)

            control = {"X-Ludic-Control-Token": token}
            session = post("/sessions", {"seed": 1}, **control)
            body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            post("/v1/chat/completions", body, Authorization=f"Bearer {session['api_key']}")
            post(f"/sessions/{session['id']}/reward", {"value": 0.5}, **control)
            assert post(f"/sessions/{session['id']}/close", {}, **control)["rollouts"] == 1
            post("/sessions", {}, **control)
        finally:
            process.send_signal(signal.SIGINT)
        said = process.stdout.read()
    assert process.returncode == 0 and "1 session was open" in said
    (rollout,) = load_rollouts(tmp_path / "out.jsonl")
    assert rollout.total_reward == 0.5 and rollout.agent_steps[0].trace.completion_logprobs is not None


def test_mistakes_of_the_gateway_command(ludic):
    assert "a port is a number" in ludic("gateway", "--model", "tiny", "--port", "70000").err
    assert "No control token at" in ludic("gateway", "--model", "tiny", "--control-token-file", "none").err


def test_the_plan_says_what_the_agent_may_do(ludic):
    ended = ludic(
        "train", "letter.py:Letter", *SMALL, "--dry-run", "--agent", "my_agent.py:solve", "--agent-max-calls", "3"
    )
    assert ended.code == 0 and "The agent solve makes 3 model calls an episode" in ended.out, ended.err
