"""`ludic optimize-prompt` against a real endpoint whose model follows instructions: found, resumed after kill -9, mistakes."""

import json
import os
import re
import shlex
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ludic.cli.eval.run import read_command as read_eval_command
from ludic.run.given import env_factory
from ludic.run.resolve import resolve_play
from ludic.run.settings import read_toml
from ludic.types import load_rollouts
from ludic_judges.prompt_search.command import eval_command, read_command
from ludic_judges.prompt_search.config import PromptConfig
from tests import forked
from tests.unit.cli.runner import Result, invoke
from tests.unit.cli.train_parts import ENV

pytestmark = pytest.mark.slow

RULES = {"shout": "Write capitals.", "count": "Write digits."}
WANTS = '''
from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class Wants(SingleAgentEnv):
    """Wants the reply that the rule of its kind leads to, and says so."""

    suggested_sysprompt = "Answer."

    def __init__(self, sample):
        super().__init__()
        self.sample = sample

    def env_reset(self, *, seed=None):
        return self.sample["kind"], {}

    def env_step(self, action):
        told = {"feedback": f"A rule for {self.sample['kind']} is missing."}
        return StepOutcome("", float(action == "right"), terminated=True, info=told)
'''


class Model:
    """An OpenAI-compatible endpoint. It plays by the rules in its system prompt; asked to improve one, it adds what is missing."""

    def __init__(self) -> None:
        self.num_reflections = 0
        self.kills_at: int | None = None
        self.victim = 0
        self.has_victim = threading.Event()

    def reply(self, messages: list[dict]) -> str:
        text = messages[-1]["content"]
        if "You improve the instruction" not in text:
            prompt = messages[0]["content"] if messages[0]["role"] == "system" else ""
            return "right" if RULES[text] in prompt else "wrong"
        self.num_reflections += 1
        if self.num_reflections == self.kills_at:
            self.has_victim.wait()
            os.kill(self.victim, signal.SIGKILL)
        before = re.search(r"\[instruction \w+\]\n(.*?)\n\[end", text, re.DOTALL)[1]
        missing = [
            rule for kind, rule in RULES.items() if f"reward 0. A rule for {kind}" in text and rule not in before
        ]
        written = " ".join([before, *missing[:1]])
        mark = re.findall(r'"mark": "(\w+)"', text)[-1]
        return json.dumps({"mark": mark, "diagnosis": "A rule is missing.", "instruction": written})


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "follows"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = {"role": "assistant", "content": made.reply(asked["messages"])}
            self._answer({"choices": [{"message": said, "finish_reason": "stop"}]})

        def _answer(self, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "wants.py").write_text(WANTS)
    (tmp_path / "letter.py").write_text(ENV)
    kinds = ["shout", "count", "shout", "count"]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in kinds))
    (tmp_path / "start.txt").write_text("Answer briefly.\n")
    return tmp_path


def searching(model: Model, *flags: str) -> list[str]:
    given = ["wants.py:Wants", "--data", "tasks.jsonl", "--base-url", model.url, "--max-tokens", "8", "--shown", "2"]
    return ["optimize-prompt", *given, "--max-episodes", "24", *flags]


def done(result: Result) -> str:
    assert result.exit_code == 0 and result.exception is None, result
    return result.output


def state(name: str) -> dict:
    return json.loads(Path("runs/prompts", name, "rollouts/search.json").read_text())


def test_search_finds_both_rules_and_writes_prompt_scores_and_episodes(folder, model):
    reflector = ["--reflector", model.url, "--reflector-model", "follows"]
    said = done(invoke(searching(model, "--prompt-file", "start.txt", "--name", "x", *reflector)))
    best = Path("runs/prompts/x/best.txt").read_text()
    assert best.startswith("Answer briefly.") and all(rule in best for rule in RULES.values())
    assert "0.000 with the first prompt, 1.000 with the best of 3" in said and best.strip() in said
    asked = f"--base-url {model.url} --model follows --max-tokens 8 --data OTHER.jsonl --system-prompt"
    assert f"ludic eval wants.py:Wants {asked}" in said
    found = state("x")
    assert [sum(one["scores"]) for one in found["candidates"]] == [0.0, 2.0, 4.0]
    assert found["counts"]["num_episodes"] <= 24 < found["counts"]["num_episodes"] + 4
    played = list(load_rollouts(Path("runs/prompts/x/rollouts/candidate_0002.jsonl")))
    assert len(played) == 4 and {rollout.total_reward for rollout in played} == {1.0}
    config = read_toml(PromptConfig, Path("runs/prompts/x/config.toml"))
    assert (config.agent.system_prompt, config.player.model) == ("Answer briefly.", "follows")


@pytest.mark.slow
def test_killed_search_goes_on_as_if_uninterrupted(folder, model):
    model.kills_at = 2
    process = forked.python("-m", "ludic.cli.main", *searching(model, "--name", "broken"), cwd=folder)
    model.victim = process.pid
    model.has_victim.set()
    assert process.wait(timeout=120) == -signal.SIGKILL
    assert state("broken")["counts"]["num_reflections"] == 1
    said = done(invoke(["optimize-prompt", "runs/prompts/broken", "--resume"]))
    assert "going on after" in said
    model.kills_at = None
    done(invoke(searching(model, "--name", "whole")))
    assert state("broken") == state("whole")
    assert Path("runs/prompts/broken/best.txt").read_text() == Path("runs/prompts/whole/best.txt").read_text()
    before = state("whole")["counts"]["num_episodes"]
    done(invoke(["optimize-prompt", "runs/prompts/whole", "--resume", "--max-episodes", "32"]))
    assert before < state("whole")["counts"]["num_episodes"] <= 32, "a search may go on with more episodes"


def test_dry_run_shows_settings_and_plan_and_writes_nothing(folder, model):
    said = done(invoke(searching(model, "--dry-run")))
    assert "[search]" in said and 'model = "follows"' in said and "The first prompt: 'Answer.'" in said
    assert "Each prompt that is kept is played on 4 tasks; a reflection sees 2 of them." in said
    assert "At most 24 episodes, 9 reflections." in said and "runs/prompts/Wants-follows" in said
    assert not Path("runs").exists() and model.num_reflections == 0


def test_model_of_this_process_plays_and_reflects(folder):
    """Random weights write nothing that can be read: every reflection fails, is counted, and the search ends."""
    flags = ["--model", "tiny", "--max-tokens", "1", "--threads", "1", "--num-tasks", "4", "--max-episodes", "10"]
    flags += ["--shown", "2", "--reflector", "tiny", "--reflector-tokens", "4"]
    said = done(invoke(["optimize-prompt", "letter.py:Letter", *flags]))
    assert "runs/prompts/Letter-tiny/best.txt" in said
    assert "2 reflections wrote nothing that can be read. Take a larger --reflector" in said
    found = state("Letter-tiny")
    assert found["counts"]["num_rejected"] == found["counts"]["num_reflections"] == 2 and len(found["candidates"]) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--shown", "5"], "shown = 5, but there are 4 tasks"),
        (["--max-episodes", "7"], "Give at least 8, or fewer tasks"),
        (["--prompt-file", "none.txt"], "--prompt-file none.txt cannot be read"),
        (["--prompt-file", "start.txt", "--system-prompt", "x"], "both give the first prompt"),
        (["--model", "gpt-9"], "does not serve 'gpt-9'; it serves follows"),
        (["--parser", "boxd"], "Did you mean 'boxed'"),
        (["--reflector-model", "x"], "give its URL as --reflector"),
        (["--reflector", "http://127.0.0.1:9/v1"], "Is the server running"),
        (["--resume"], "There is nothing to resume"),
        (["--judge", "tiny", "--judge-by", "pairs"], "compares the episodes of one task"),
    ],
)
def test_mistakes_are_named_before_anything_is_played(folder, model, flags, says):
    result = invoke(searching(model, *flags))
    assert says in str(result.exception), result
    assert not Path("runs").exists() and model.num_reflections == 0


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--set", "rounds=2", "--max-tokens", "9", "--max-steps", "3", "--temperature", "0.3", "--device", "cpu"],
        ["--parser", "xml_tag", "--parser-set", "tag=my move", "--agent", "react", "--agent-set", "max_calls=3"],
        ["--parser-set", 'tag="5"', "--tools", "calculator", "python", "--cut-off", "read", "--env-workers", "2"],
        ["--reward", "length", "--reward", "b=length", "--reward-set", "b.per_tokens=5", "--reward-weight", "b=0.1"],
        ["--base-url", "http://127.0.0.1:1/v1", "--api-key-env", "KEY", "--top-p", "0.9"],
    ],
)
def test_printed_evaluation_has_the_settings_of_the_search(flags):
    _, given = read_command(["tic_tac_toe", "--model", "tiny", *flags])
    found = env_factory(given.env.id)
    searched = resolve_play(given, found.suggested)
    ludic, command, *printed = shlex.split(eval_command(searched, found))
    assert (ludic, command) == ("ludic", "eval")
    evaluated = resolve_play(read_eval_command(printed)[1], found.suggested)
    assert (evaluated.env, evaluated.agent, evaluated.reward) == (searched.env, searched.agent, searched.reward)
    assert evaluated.policy == searched.player.policy
    sampled = evaluated.measure.temperature, evaluated.measure.top_p
    assert sampled == (searched.search.temperature, searched.search.top_p)


def test_env_with_several_roles_is_refused(folder):
    result = invoke(["optimize-prompt", "prisoners_dilemma", "--model", "tiny"])
    assert "searches for the prompt of one" in str(result.exception)


def test_folder_of_another_search_is_refused(folder, model):
    done(invoke(searching(model, "--max-episodes", "8", "--name", "x")))
    assert "x is there already. --resume goes on with it" in str(invoke(searching(model, "--name", "x")).exception)
    changed = invoke(searching(model, "--name", "x", "--resume", "--temperature", "0.9"))
    assert "is a search with other settings: temperature: 0.6 there, 0.9 now" in str(changed.exception)
