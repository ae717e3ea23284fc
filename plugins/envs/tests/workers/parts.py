"""Envs that a worker process imports from here: all built-in ones by name, and one that fails in every way on request."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ludic import registry
from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.types import StepOutcome


def any_env(env_id: str, **kwargs: Any) -> LudicEnv[Any, Any, Any]:
    """One pool for several envs."""
    return registry.envs.make(env_id, **kwargs)


class Faulty(SingleAgentEnv):
    """Counts; some actions are faults. An action `FAULT FILE` makes the file first, so that a test knows when it happens."""

    def env_reset(self, *, seed=None):
        self.num = 0
        return f"seed {seed}", {}

    def env_step(self, action):
        fault, _, file = action.partition(" ")
        if file:
            Path(file).write_text(str(os.getpid()))
        self.num += 1
        self.kept = getattr(self, fault, lambda: None)()
        return StepOutcome(f"{self.num}: {action}", 1.0, terminated=fault == "end", info={"pid": os.getpid()})

    def hang(self):
        threading.Event().wait()  # in C: no interruption ends it

    def spin(self):
        while True:
            pass

    def die(self):
        os.kill(os.getpid(), 9)

    def eat(self):
        return [bytearray(1 << 20) for _ in range(1 << 14)]

    def fail(self):
        raise LookupError("no such thing")

    def leave(self):
        sys.exit("bye")

    def child(self):
        self.started = subprocess.Popen(["sleep", "600"])
        raise LookupError(str(self.started.pid))

    def slow(self):
        time.sleep(0.2)


class FaultyOnLoop(Faulty):
    """The same on the event loop of its worker."""

    blocking = False


class Sends(SingleAgentEnv):
    """Returns as info what no message can hold, or what must arrive unchanged."""

    blocking = False

    def env_reset(self, *, seed=None):
        return "", {}

    def env_step(self, action):
        import numpy as np

        values = {
            "object": object(),
            "numpy": {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)},
            "nested": {"a": [1, {"b": None}], "ü": "ö", "f": 1e300},
            "surrogate": "\ud800 text",
        }
        return StepOutcome(action, 0.5, info={"value": values[action]})


class Roles(LudicEnv[str, str, str]):
    """Two roles with their own system prompts, which depend on the seed."""

    agent_ids = active_agents = ("a", "b")

    def reset(self, *, seed=None):
        self.seed = seed
        return {role: ("", {}) for role in self.agent_ids}

    def step(self, actions):
        return {role: StepOutcome("", 0.0) for role in self.agent_ids}

    def system_prompt_for(self, agent_id):
        return f"{agent_id} of seed {self.seed}"


class Hangs(Faulty):
    """Whatever the action is."""

    def env_step(self, action):
        self.hang()


def some_env(is_hanging: bool = False) -> SingleAgentEnv:
    """For many envs at a time."""
    return Hangs() if is_hanging else FaultyOnLoop()


def broken() -> SingleAgentEnv:
    """Cannot be made."""
    raise ValueError("no data here")


class Fated(SingleAgentEnv):
    """A sample says what happens in the first step: every process dies, that of every third start does, the first start hangs, or
    nothing. Every start is a character in the sample's file."""

    def __init__(self, sample: dict[str, str]) -> None:
        super().__init__()
        self.fate, self.file = sample["fate"], sample["file"]

    def env_reset(self, *, seed=None):
        with open(self.file, "ab", buffering=0) as starts:
            starts.write(b"x")
            self.num_before = starts.tell() - 1
        return "?", {}

    def env_step(self, action):
        if self.fate == "dies" or (self.fate == "every third dies" and self.num_before % 3 == 0):
            os.kill(os.getpid(), 9)
        if self.fate == "the first hangs" and self.num_before == 0:
            threading.Event().wait()
        return StepOutcome("", float(action.isupper()), terminated=True)
