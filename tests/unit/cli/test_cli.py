import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ludic.cli.args import MODULES_OF
from ludic.cli.play import matching_action
from tests.extended import cases
from tests.unit.cli.runner import invoke

pytestmark = pytest.mark.slow


def ludic(*arguments: str, typed: str | None = None) -> subprocess.CompletedProcess:
    """The real command in a real process."""
    return subprocess.run(
        [sys.executable, "-m", "ludic.cli.main", *arguments], input=typed, capture_output=True, text=True, timeout=60
    )


def test_human_can_play_a_whole_episode():
    result = invoke(["play", "tic_tac_toe", "--seed", "3"], input="b2\na1\nc3\na3\nc1\nb1\nb3\n")
    assert result.exit_code == 0, result.output
    assert "You are X" in result.output and "total reward" in result.output and '"result"' in result.output


def test_illegal_move_is_asked_again():
    result = invoke(["play", "tic_tac_toe", "--seed", "3"], input="z9\nquit\n")
    assert "Not possible here" in result.output and "A1, A2" in result.output and "Bye" in result.output


def test_end_of_input_ends_the_game():
    result = invoke(["play", "tic_tac_toe"], input="b2\n")
    assert result.exit_code == 0 and "Bye" in result.output


def test_two_humans_can_play_a_two_player_env():
    result = invoke(["play", "tic_tac_toe_duel", "--seed", "1"], input="a1\nb1\na2\nb2\na3\n")
    assert result.exit_code == 0, result.output
    assert "X: total reward +1" in result.output and "O: total reward -1" in result.output


def test_simultaneous_players_are_both_asked():
    typed = "coop\ndefect\n" * 2
    result = invoke(["play", "prisoners_dilemma", "--set", "rounds=2"], input=typed)
    assert result.exit_code == 0, result.output
    assert "player_0: total reward +0" in result.output and "player_1: total reward +10" in result.output


@pytest.mark.parametrize("env", ["tic_tac_toe", "tic_tac_toe_duel", "key_door", "prisoners_dilemma", "gsm8k"])
def test_a_scripted_agent_can_be_watched(env):
    result = invoke(["play", env, "--watch", "--seed", "1"])
    assert result.exit_code == 0, result.output
    assert "terminated" in result.output and "total reward" in result.output


def test_a_longer_game_can_be_watched_up_to_a_limit():
    result = invoke(["play", "twenty_forty_eight", "--watch", "--seed", "1", "--max-steps", "5"])
    assert "max_steps" in result.output and "5 turn(s)" in result.output


def test_samples_come_from_a_file(tmp_path: Path):
    data = tmp_path / "questions.jsonl"
    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+3?", "answer": "#### 5"}]
    data.write_text("\n".join(map(json.dumps, rows)))
    result = invoke(["play", "gsm8k", "--data", str(data), "--index", "1"], input="5\n")
    assert "2+3?" in result.output and "total reward +1" in result.output


def test_the_same_seed_shows_the_same_game():
    shown = [invoke(["play", "tic_tac_toe", "--watch", "--seed", "7"]).output for _ in range(2)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    cases(
        [
            (["play", "tictactoe"], "Did you mean 'tic_tac_toe'"),
            (["play", "tic_tac_toe", "--set", "agent_start=true"], "agent_starts: bool = True"),
            (["play", "tic_tac_toe", "--set", "opponent=god"], "random and minimax"),
            (["play", "tic_tac_toe", "--set", "opponent"], "name=value"),
            (["play", "gsm8k", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
            (["parts", "envs"], "Did you mean 'env'"),
        ],
        default=[
            (["play", "tictactoe"], "Did you mean 'tic_tac_toe'"),
            (["play", "gsm8k", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        ],
    ),
)
def test_a_mistake_is_one_helpful_line_and_no_traceback(arguments, message):
    done = ludic(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_line_that_is_not_there_or_not_json_is_named(tmp_path: Path):
    data = tmp_path / "q.jsonl"
    data.write_text("not json\n")
    assert "0 to 0" in ludic("play", "gsm8k", "--data", str(data), "--index", "4").stderr
    assert "not JSON" in ludic("play", "gsm8k", "--data", str(data)).stderr


def test_listings_show_registered_parts():
    assert "tic_tac_toe" in invoke(["envs"]).output
    assert "react" in invoke(["parts", "agent"]).output
    assert "grpo" in invoke(["parts", "algorithm"]).output
    assert {"train/clip_frac", "perf/fetch_s", "eval/pass@k"} <= set(invoke(["parts", "metric"]).output.split())


def test_typed_action_matches_by_case_and_unique_prefix():
    assert matching_action("A1", ["A1", "A2"]) == "A1" and matching_action("a1", ["A1"]) == "A1"
    assert matching_action("u", ["up", "down"]) == "up" and matching_action("a", ["A1", "A2"]) is None
    assert matching_action("", ["up"]) is None and matching_action("anything", None) == "anything"


# --- with the base install, or one extra ---

WITHOUT = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder
absent, commands = map(json.loads, sys.argv[1:])
class Installed:  # all but what is absent
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in absent else PathFinder.find_spec(name, path, target)
    find_distributions = PathFinder.find_distributions
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
from ludic.cli.main import main
ended = []
for command in commands:
    sys.argv, out, err, code = ["ludic", *command], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code or 0
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""
HEAVY = ["torch", "transformers", "safetensors", "jinja2", "peft", "redis", "datasets"]


def without(absent: list[str], *commands: list[str], folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command in a process that cannot import `absent`."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(absent), json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


NEEDED = {
    "train": [
        ["train", "tic_tac_toe"],
        ["train", "tic_tac_toe", "--dry-run"],
        ["export", "run", "there"],
        ["train", "heavy.py:Env"],
    ],
    "train,pipeline": [["actor", "tic_tac_toe"], ["launch", "tic_tac_toe"]],
    "serve": [["serve", "--model", "tiny"]],
    "local": [["eval", "tic_tac_toe"]],
    "endpoint": [["eval", "tic_tac_toe", "--base-url", "http://127.0.0.1:9/v1"]],
}
WORKS = [
    ["play", "tic_tac_toe", "--watch", "--seed", "1"], ["envs"], ["parts", "algorithm"], ["parts", "agent"], ["parts", "metric"],
    ["plan", "7b"], ["train", "--help"], ["eval", "--help"], ["serve", "--help"], ["--version"],
]  # fmt: skip


def test_with_the_base_install_each_command_works_or_names_its_extra(tmp_path):
    (tmp_path / "heavy.py").write_text("import torch")
    expected = [(extra, command) for extra, commands in NEEDED.items() for command in commands]
    ended = without([*HEAVY, "aiohttp"], *(command for _, command in expected), *WORKS, folder=tmp_path)
    for (extra, command), (code, _, err) in zip(expected, ended[: len(expected)], strict=True):
        assert code == 2 and f"pip install -e '.[{extra}]'" in err and err.count("\n") == 1, f"{command}: {err}"
    for command, (code, out, err) in zip(WORKS, ended[len(expected) :], strict=True):
        assert code == 0 and out and not err, f"{command}: {err}"
        if command == ["parts", "algorithm"]:
            assert "needs the 'train' extra" in out and out.count("pip install -e '.[train]'") == 1
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def their_endpoint() -> Iterator[str]:
    """Answers every conversation with B2, as a server that is not Ludic's."""

    class Endpoint(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"data": [{"id": "theirs"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({"choices": [{"message": {"content": "B2"}, "finish_reason": "stop"}]})

        def _answer(self, body: object) -> None:
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_an_endpoint_is_evaluated_with_the_endpoint_extra_alone(tmp_path, their_endpoint):
    command = ["eval", "tic_tac_toe", "--base-url", their_endpoint, "--num-tasks", "4", "--name", "theirs"]
    tools = ["--agent", "react", "--tools", "calculator", "--name", "with_tools"]
    plain, resumed, with_tools = without(
        HEAVY, command, [*command, "--resume", "--num-tasks", "5"], [*command, *tools], folder=tmp_path
    )
    assert plain[0] == resumed[0] == with_tools[0] == 0, plain + resumed + with_tools
    metrics = json.loads((tmp_path / "runs" / "eval" / "theirs" / "metrics.json").read_text())
    assert (
        metrics["theirs"]["num_tasks"] == 5 and (tmp_path / "runs" / "eval" / "with_tools" / "metrics.json").is_file()
    )


def test_the_modules_that_a_command_checks_are_those_of_its_extra():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for extra, modules in MODULES_OF.items():
        required = {re.split(r"[\[<>=]", one)[0] for one in project["optional-dependencies"][extra]}
        assert set(modules) <= required


@pytest.mark.parametrize(("command", "code"), [("--version", 0), ("trian", 2), ("exit", 0)])
def test_a_thread_that_something_left_does_not_keep_a_command_from_ending(command, code):
    """It ends with its own code, and what is to be done at the end is done."""
    program = f"""
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from ludic.cli import main
atexit.register(print, "cleaned up")
threading.Thread(target=threading.Event().wait, name="left\\x1b").start()
ThreadPoolExecutor().submit(threading.Event().wait)
main._THREADS_S, sys.argv = 0.1, ["ludic", {command!r}]
if {command!r} == "exit":
    main._run = sys.exit
main.main()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == code and "cleaned up" in done.stdout and "left\ufffd" in done.stderr
