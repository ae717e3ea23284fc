"""What the tests of `ludic train` share: a small env, and the command in its own folder."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ludic.cli.main import main

ENV = '''
import time

from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class Letter(SingleAgentEnv):
    """A capital letter earns 1."""

    def __init__(self, bonus=0.0):
        super().__init__()
        self.bonus = bonus

    def env_reset(self, *, seed=None):
        return "?", {}

    def env_step(self, action):
        return StepOutcome("", reward=float(action.isupper()) + self.bonus, terminated=True)


class Question(Letter):
    """Asks about a sample."""

    def __init__(self, sample):
        super().__init__()
        self.sample = sample

    def env_reset(self, *, seed=None):
        return self.sample["question"], {}


class Flat(Letter):
    # Every episode earns the same.
    def env_step(self, action):
        return StepOutcome("", reward=1.0, terminated=True)


class Breaks(Letter):
    def env_step(self, action):
        return helper({}, action)


class Exits(Letter):
    def env_step(self, action):
        raise SystemExit(0)


class ExitsWhenMade(Letter):
    def __init__(self):
        raise SystemExit(0)


class Hangs(Letter):
    def env_step(self, action):
        time.sleep(20)


class Overflows(Letter):
    def env_step(self, action):
        return StepOutcome("", reward=1e300, terminated=True)


class Circular(Letter):
    def env_step(self, action):
        info = {}
        info["info"] = info
        return StepOutcome("", reward=1.0, terminated=True, info=info)


def helper(table, action):
    return table[action]


class NoEnv:
    pass


class WithoutSuper(Letter):
    def __init__(self):
        self.bonus = 0.0


class Misspelt(SingleAgentEnv):
    def env_reset(self, *, seed=None):
        return "?", {}

    def env_stop(self, action):
        return StepOutcome("", reward=1.0, terminated=True)


class WithoutSeed(Letter):
    def env_reset(self):
        return "?", {}


class CannotBeMade(Letter):
    def __init__(self):
        raise OSError("no such server")


NUMBER = 7
'''
AGENT = """
import httpx


async def solve(task, *, base_url, api_key, model):
    body = {"model": model, "messages": [{"role": "user", "content": task}]}
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(
            f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"}, timeout=60
        )
    return answer.json()["choices"][0]["message"]["content"]


async def loud(task, *, base_url, api_key, model, suffix):
    return await solve(task, base_url=base_url, api_key=api_key, model=model) + suffix


def takes_nothing():
    pass


async def long(task, *, base_url, api_key, model):
    body = {"model": model, "messages": [{"role": "user", "content": task * 100}]}
    async with httpx.AsyncClient(trust_env=False) as client:
        url, key = f"{base_url}/chat/completions", {"Authorization": f"Bearer {api_key}"}
        answer = await client.post(url, json=body, headers=key, timeout=60)
    raise RuntimeError(answer.text)


async def fails(task):
    raise RuntimeError("no internet")


LIMIT = 3
"""
"""Agents that make their model calls over HTTP, for my_agent.py."""
CASES = '''
from ludic.envs import LudicEnv
from ludic.types import StepOutcome


class Cases(LudicEnv):
    """Both say one character at once: the left one earns 1 for a capital, the right one for anything else."""

    blocking = False
    agent_ids = ["left", "right"]
    suggested_sysprompt = None
    over = True

    @property
    def active_agents(self):
        return [] if self.over else self.agent_ids

    def reset(self, *, seed=None):
        self.over = False
        return {"left": ("l", {}), "right": ("r", {})}

    def step(self, actions):
        self.over = True
        capital = {role: actions.get(role, "").isupper() for role in self.agent_ids}
        rewards = {"left": float(capital["left"]), "right": float(not capital["right"])}
        return {role: StepOutcome("", rewards[role], terminated=True) for role in self.agent_ids}

    def current_obs(self):
        return {"left": "l", "right": "r"}

    def snapshot(self):
        raise NotImplementedError

    def restore(self, snapshot):
        raise NotImplementedError
'''
"""An env with two roles, for cases.py."""
SMALL = ["--model", "tiny", "--max-tokens", "1", "--group-size", "4", "--rollouts-per-update", "8", "--logger", "none"]
RUN = ["letter.py:Letter", *SMALL, "--steps", "2", "--lr", "1e-2", "--name", "first"]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def command_in(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Ended]:
    """The command, run in a folder that holds letter.py."""
    monkeypatch.chdir(folder)
    (folder / "letter.py").write_text(ENV)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ludic", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run
