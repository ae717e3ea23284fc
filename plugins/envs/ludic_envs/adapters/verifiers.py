"""verifiers environments (its `v1` API) with Ludic agents, scored by their own rewards.

A verifiers env is a program: `run(task, agents)` asks agents and waits for their replies. It runs here unchanged, with a stand-in
for each agent: a question to it becomes an observation, and the next action is its reply. An episode is one task;
its rewards come at the end.
"""

import asyncio
import importlib
import json
import random
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.tasks import cancel_all
from ludic.types import ConfigError, Info, MissingExtra, Observation, StepOutcome
from ludic_envs.adapters.base import as_json


def api(module: str = "") -> Any:
    """`verifiers.v1`, or a module in it."""
    try:
        return importlib.import_module(f"verifiers.v1.{module}".rstrip("."))
    except ImportError as error:
        raise MissingExtra("verifiers", f"The env 'verifiers' ({error})") from error


@lru_cache(maxsize=16)
def load(taskset: str, taskset_args: str, env: str, env_args: str, num_tasks: int) -> tuple[Any, tuple[Any, ...]]:
    """The program and its tasks, from verifiers' own loaders; envs of the same source share them, since both are only read."""
    loaders = api("utils.loaders")
    config = {**json.loads(env_args), "id": env, "taskset": {**json.loads(taskset_args), "id": _plug_in(taskset)}}
    try:
        program = loaders.load_environment(loaders.resolve_env_config(config))
        tasks = tuple(program.taskset.take(num_tasks))
    except (ImportError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers cannot load the taskset {taskset!r} with {config}: {error}") from error
    if not tasks:
        raise ConfigError(f"The taskset {taskset!r} has no tasks with {taskset_args}.")
    _refuse_what_is_missing(tasks[0], program.taskset.toolsets(program.taskset.config))
    return program, tasks


def _plug_in(taskset: str) -> str:
    """verifiers finds plug-ins as top-level modules; one inside a package is registered under such a name."""
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
        self._agents: dict[str, _VerifiersRole] = {}

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
        if self._running is None:  # a copy replays the earlier actions
            await self._open()
            for earlier in self._played:
                await self._answer(earlier)
        self._played.append(dict(actions))
        await self._answer(actions)
        return {role: self._outcome(role) for role in self._roles}

    async def async_close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await cancel_all([running])

    async def _open(self) -> None:
        await self.async_close()
        self._question = asyncio.Event()
        alone = len(self._roles) == 1
        self._agents = {role: _VerifiersRole(role, self._question, knows_system_prompt=alone) for role in self._roles}
        self._running = asyncio.create_task(_episode(load(*self._source)[0], self._task, self._agents))
        await self._until_asked()

    async def _answer(self, actions: Mapping[str, str]) -> None:
        for role in self._asked:
            self._agents[role].reply(actions.get(role, ""))
        await self._until_asked()

    async def _until_asked(self) -> None:
        """Run the program until it asks for a reply or ends."""
        assert self._running is not None, "only called while it runs"
        ring = asyncio.create_task(self._question.wait())
        await asyncio.wait({self._running, ring}, return_when=asyncio.FIRST_COMPLETED)
        ring.cancel()
        self._question.clear()
        self._over = self._running.done()
        if self._over:
            self._running.result()  # an exception of the program fails the episode
        self._asked = {role: agent.question for role, agent in self._agents.items() if agent.question is not None}

    def _outcome(self, role: str) -> StepOutcome:
        trace = self._agents[role].trace
        if not self._over or trace is None:
            return StepOutcome(self._view(role), 0.0, terminated=self._over)
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        trainable = self._agents[role].trainable  # verifiers marks simulated users; filters may drop their samples
        info: Info = {"rewards": as_json(rewards), "metrics": as_json(trace.metrics), "trainable": trainable}
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
        gone: dict[str, Any] = {"_running": None, "_agents": {}, "_question": None}
        return self.__dict__ | gone


async def _episode(program: Any, task: Any, roles: Mapping[str, "_VerifiersRole"]) -> None:
    agents = api().Agents(program.config, lambda name, config: roles[name].configured(config))
    await program.setup(agents)
    await program.run(task, agents)
    episode = api().Episode(task=api().TraceTask(type=type(task).__name__, data=task.data))
    episode.traces.extend(agent.trace for agent in roles.values() if agent.trace is not None)
    await program.finalize(task, episode)


# --- the agents of a program ---


class _VerifiersRole:
    """Takes the place of a verifiers agent, for one conversation, and waits for replies from the env.

    It offers what programs call: `run`, `interaction` and its `turn`, a `trace` of the conversation, and scoring by the task at the
    end. Harnesses, model clients and runtimes it does not have.
    """

    def __init__(self, name: str, asked: asyncio.Event, *, knows_system_prompt: bool) -> None:
        self.name = name
        self.trainable = True
        self.trace: Any = None
        self.question: str | None = None
        """The question that the program waits for a reply to."""
        self._asked = asked
        self._knows_system_prompt = knows_system_prompt

    def configured(self, config: Any) -> "_VerifiersRole":
        self.config = config
        return self

    def reply(self, said: str) -> None:
        self.question = None
        if not self._answer.cancelled():  # the program may have failed elsewhere since it asked
            self._answer.set_result(said)

    # --- what a verifiers program calls ---

    async def run(self, task: Any, **options: Any) -> Any:
        async with self.interaction(task, **options) as conversation:
            await conversation.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator["_VerifiersRole"]:
        if options:
            raise ConfigError(f"The program runs {self.name!r} with {sorted(options)}, which Ludic does not offer it.")
        if self.trace is not None:
            raise ConfigError(
                f"The program starts a second conversation with {self.name!r}, but an agent has one memory per episode."
            )
        _refuse_what_is_missing(task, [])
        state = api("state").state_cls(type(task))()
        about = api().TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace = api().Trace(task=about, state=state, agent=api().AgentInfo(config=self.config, name=self.name))
        about_it = {"trace": self.trace, "runtime": _NoRuntime()}
        await api("utils.decorators").invoke(task.setup, about_it)
        yield self
        self.trace.stop("user_closed")
        await api("utils.decorators").invoke(task.finalize, about_it)
        await task.score(self.trace, _NoRuntime())
        self.trace.ok = True

    async def turn(self, message: Any = None) -> Any:
        """The program says something; returns the reply from outside as verifiers' Segment."""
        limit = self.config.max_turns
        if limit is not None and self.trace.num_turns >= limit:
            self.trace.stop("max_turns")
            return api().Segment(messages=[], terminated=True)
        self.question = self._hear(message)
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.set()
        said = api().AssistantMessage(content=await self._answer)
        self._note(said, sampled=True)
        return api().Segment(messages=[said])

    def _hear(self, message: Any) -> str:
        data = self.trace.task.data
        said = data.prompt if message is None else message
        messages = [api().UserMessage(content=said)] if isinstance(said, str) else list(said or ())
        messages = [api("dialects").parse_message(m) if isinstance(m, dict) else m for m in messages]
        system = (
            [api().SystemMessage(content=data.system_prompt)] if data.system_prompt and not self.trace.nodes else []
        )
        for heard in [*system, *messages]:
            self._note(heard)
        told = [*([] if self._knows_system_prompt else system), *messages]
        texts = [api("types").content_text(heard.content) for heard in told]
        if len(messages) > 1:
            texts = [f"{heard.role}: {text}" for heard, text in zip(told, texts, strict=True)]
        return "\n\n".join(texts)

    def _note(self, message: Any, *, sampled: bool = False) -> None:
        nodes = self.trace.nodes
        nodes.append(api().MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


class _NoRuntime:
    """In place of the container that verifiers runs programs in; a task that uses it gets an error."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"The task uses its runtime (.{name}); Ludic plays verifiers tasks without one.")


def _refuse_what_is_missing(task: Any, shared_tools: list[Any]) -> None:
    """Refuse tasks that need what Ludic does not offer."""
    wanted = {
        "a container": task.NEEDS_CONTAINER,
        "tool servers": shared_tools or task.toolsets(task.config),
        "@stop conditions": task.hooks("stop"),
        "@intercept hooks": api("utils.decorators").discover_decorated(task, "intercept"),
    }
    missing = [what for what, wants in wanted.items() if wants]
    if missing:
        raise ConfigError(
            f"{type(task).__name__} of verifiers needs {' and '.join(missing)}, which Ludic does not offer. Run it with "
            "verifiers' own harness, against `ludic serve`."
        )
