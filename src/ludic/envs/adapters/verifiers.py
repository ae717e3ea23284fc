"""verifiers environments (its `v1` API) with Ludic agents, scored by their own rewards.

A verifiers env is a program: `run(task, agents)` asks agents and waits for what they say. It runs here as it is, with
seats (verifiers_seat.py) in place of its agents: what a seat is asked becomes an observation, and the next action is
its reply. An episode is one task (verifiers_tasks.py finds them); its rewards come at the end.
"""

import asyncio
import importlib
import json
import random
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ludic.envs.adapters.plain import plain
from ludic.envs.adapters.verifiers_seat import VerifiersRole, api, refuse_what_is_missing
from ludic.envs.env import LudicEnv
from ludic.types import ConfigError, Info, Observation, StepOutcome

# --- Loading the tasks of a verifiers environment: its own loaders, called once per source ---


@lru_cache(maxsize=16)
def load(taskset: str, taskset_args: str, env: str, env_args: str, num_tasks: int) -> tuple[Any, tuple[Any, ...]]:
    """The program and its tasks; shared by all envs of the same source, since both are only read."""
    loaders = api("utils.loaders")
    config = {**json.loads(env_args), "id": env, "taskset": {**json.loads(taskset_args), "id": _plug_in(taskset)}}
    try:
        program = loaders.load_environment(loaders.resolve_env_config(config))
        tasks = tuple(program.taskset.take(num_tasks))
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers cannot load the taskset {taskset!r} with {config}: {error}") from error
    if not tasks:
        raise ConfigError(f"The taskset {taskset!r} has no tasks with {taskset_args}.")
    refuse_what_is_missing(tasks[0], program.taskset.toolsets(program.taskset.config))
    return program, tasks


def _plug_in(taskset: str) -> str:
    """verifiers finds plug-ins under the names of top-level modules; one inside a package is made known as one."""
    if "." not in taskset:
        return taskset
    alias = taskset.replace(".", "_").lower()
    try:
        sys.modules.setdefault(alias, importlib.import_module(taskset))
    except ImportError as error:
        raise ConfigError(f"The taskset {taskset!r} cannot be imported: {error}.") from error
    return alias


class VerifiersEnv(LudicEnv[str, Observation, str]):
    """A verifiers environment: one of its tasks per episode, scored by its own rewards."""

    def __init__(
        self,
        taskset: str,
        *,
        taskset_args: Mapping[str, Any] | None = None,
        env: str = "",
        env_args: Mapping[str, Any] | None = None,
        index: int | None = None,
        num_tasks: int = 1000,
        answer_field: str | None = None,
    ) -> None:
        """`taskset` is an id of verifiers or the dotted module of a taskset, `env` the id of an env to pair it with (if
        empty, the taskset's own, else the single-agent one); the `_args` are their configs. An episode plays task
        `index`, or one of the first `num_tasks`, drawn by the seed. `answer_field` names the field of a task's data
        that holds a good answer; it is offered as the reference.
        """
        self._source = (taskset, json.dumps(taskset_args or {}), env, json.dumps(env_args or {}), num_tasks)
        program, tasks = load(*self._source)
        if index is not None and not 0 <= index < len(tasks):
            raise ConfigError(f"index={index}, but {taskset!r} has the tasks 0 to {len(tasks) - 1}.")
        self.index, self._answer_field = index, answer_field
        self._roles: list[str] = list(api("configs.agent").agent_config_fields(program.config))
        self._task = tasks[index or 0]
        self._over = True
        self._asked: dict[str, str] = {}
        self._played: list[dict[str, str]] = []
        self._running: asyncio.Task[None] | None = None
        self._seats: dict[str, VerifiersRole] = {}

    @property
    def agent_ids(self) -> list[str]:
        return list(self._roles)

    @property
    def active_agents(self) -> list[str]:
        return [] if self._over else list(self._asked)

    @property
    def suggested_sysprompt(self) -> str | None:
        """The task's own where one agent plays; several are told theirs in their first observation."""
        return self._task.data.system_prompt if len(self._roles) == 1 else None

    async def async_reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        _, tasks = load(*self._source)
        self._task = tasks[random.Random(seed).randrange(len(tasks)) if self.index is None else self.index]
        self._played = []
        await self._open()
        return {role: (self._view(role), {"task": self._task.data.idx}) for role in self._roles}

    async def async_step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        if self._running is None:  # a copy: it plays again what led here
            await self._open()
            for earlier in self._played:
                await self._answer(earlier)
        self._played.append(dict(actions))
        await self._answer(actions)
        return {role: self._outcome(role) for role in self._roles}

    async def async_close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _open(self) -> None:
        await self.async_close()
        self._bell = asyncio.Event()
        alone = len(self._roles) == 1
        self._seats = {role: VerifiersRole(role, self._bell, knows_system_prompt=alone) for role in self._roles}
        self._running = asyncio.create_task(_episode(load(*self._source)[0], self._task, self._seats))
        await self._until_asked()

    async def _answer(self, actions: Mapping[str, str]) -> None:
        for role in self._asked:
            self._seats[role].reply(actions.get(role, ""))
        await self._until_asked()

    async def _until_asked(self) -> None:
        """Run the program until it asks for a reply or ends."""
        assert self._running is not None, "only called while it runs"
        ring = asyncio.create_task(self._bell.wait())
        await asyncio.wait({self._running, ring}, return_when=asyncio.FIRST_COMPLETED)
        ring.cancel()
        self._bell.clear()
        self._over = self._running.done()
        if self._over:
            self._running.result()  # what the program raised is the episode's failure
        self._asked = {role: seat.question for role, seat in self._seats.items() if seat.question is not None}

    def _outcome(self, role: str) -> StepOutcome:
        trace = self._seats[role].trace
        if not self._over or trace is None:
            return StepOutcome(self._view(role), 0.0, terminated=self._over)
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        trainable = self._seats[role].trainable  # verifiers marks simulated users; filters may drop their samples
        info: Info = {"rewards": plain(rewards), "metrics": plain(trace.metrics), "trainable": trainable}
        cut = bool(trace.is_truncated)
        return StepOutcome(self._view(role), float(trace.reward), truncated=cut, terminated=not cut, info=info)

    def _view(self, role: str) -> Observation:
        others = "The episode is over." if self._over else f"Waiting for {', '.join(self._asked)}."
        return self._asked.get(role, others)

    def reference_action(self, agent_id: str) -> str | None:
        if self._answer_field is None or agent_id not in self.active_agents:
            return None
        answer = self._task.data.model_dump().get(self._answer_field)
        return None if answer is None else str(answer)

    def __getstate__(self) -> dict[str, Any]:
        gone: dict[str, Any] = {"_running": None, "_seats": {}, "_bell": None}
        return self.__dict__ | gone


async def _episode(program: Any, task: Any, seats: Mapping[str, VerifiersRole]) -> None:
    agents = api().Agents(program.config, lambda name, config: seats[name].configured(config))
    await program.setup(agents)
    await program.run(task, agents)
    episode = api().Episode(task=api().TraceTask(type=type(task).__name__, data=task.data))
    episode.traces.extend(seat.trace for seat in seats.values() if seat.trace is not None)
    await program.finalize(task, episode)
