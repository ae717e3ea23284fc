"""An env worker: a process whose event loop holds many envs and answers the calls of pools. Started by workers.supervisor as
`python -m ludic_envs.workers.process CONTROL_FD TRACE_FD`.

The control socket comes from the parent: its first frame is the set-up, and each further connection arrives there as a file
descriptor. When the parent ends, so does this process, with all processes that its envs have started.
"""

import asyncio
import contextlib
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ludic import registry
from ludic.envs.check import require_env
from ludic.envs.env import LudicEnv
from ludic.envs.single_agent_env import is_plain
from ludic.envs.threads import EnvThread, time_limit
from ludic.tools.tool import Tool, as_tool
from ludic.types import ConfigError, EnvContractError, EnvCrashed
from ludic_envs.workers.wire import RETIRING, Call, FrameReader, Line, Reply, error_to_wire, pack

Env = LudicEnv[Any, Any, Any]

_BEAT_S = 1.0
_MAX_HUNG = 8
"""Envs whose last call does not end, after which the worker retires: each keeps a thread and its memory."""
_FLUSH_S = 0.005
"""Replies wait at most this long for further ones of the same frame."""
_CLOSE_S, _CANCEL_S = 60.0, 3.0
_STACK_BYTES = 2 << 20
"""Stack of a thread where memory is limited: the usual 8 MiB count in full although few of them are touched."""


class Factory:
    """Makes the envs of one id."""

    def __init__(self, target: str, kwargs: Mapping[str, Any]) -> None:
        found = registry.envs.spec(target).load()  # imported now: what is wrong with it is said at the start
        self.is_light = isinstance(found, type) and issubclass(found, LudicEnv) and not found.blocking
        self.make: Callable[..., Any] = partial(registry.envs.make, target, **kwargs)


class _HeldEnv:
    """One env, its thread and its running call."""

    def __init__(self, factory: "Factory", *, in_threads: bool) -> None:
        self._factory, self._in_threads = factory, in_threads
        self._with_hints = False
        self._thread: EnvThread | None = None
        self._env: Env | None = None
        self.is_direct = False
        """True if reset and step are plain functions that return at once."""
        self.running: set[asyncio.Task[None]] = set()
        self._tools: dict[str, dict[str, Tool]] = {}

    async def make(self, kwargs: Mapping[str, Any], *, with_hints: bool) -> list[Any]:
        """[name of the class, agent ids, active agents, system prompt, full reward]."""
        self._with_hints = with_hints
        if not self._factory.is_light or self._in_threads:
            self._thread = EnvThread()
        make = partial(self._factory.make, **kwargs)
        made = make() if self._thread is None else await self._thread.run(make)
        env = self._env = require_env(made, type(made).__name__)
        if env.blocking and self._thread is not None:
            vars(env)["_thread"] = self._thread
        is_quick = is_plain(type(env)) and not env.blocking
        self.is_direct = is_quick and not self._in_threads
        self._is_threaded = is_quick and self._in_threads
        reward = None if env.full_reward is None else float(env.full_reward)
        return [type(env).__name__, list(env.agent_ids), list(env.active_agents), env.suggested_sysprompt, reward]

    @property
    def env(self) -> Env:
        if self._env is None:
            raise EnvCrashed("The env was not made, or is closed.")
        return self._env

    def reset(self, seed: int | None) -> list[Any]:
        return self._opened(self.env.reset(seed=seed))

    def step(self, actions: Mapping[str, Any]) -> list[Any]:
        return self._stepped(self.env.step(actions))

    async def async_reset(self, seed: int | None) -> list[Any]:
        if self._is_threaded and self._thread is not None:
            return self._opened(await self._thread.run(partial(self.env.reset, seed=seed)))
        return self._opened(await self.env.async_reset(seed=seed))

    async def async_step(self, actions: Mapping[str, Any]) -> list[Any]:
        if self._is_threaded and self._thread is not None:
            return self._stepped(await self._thread.run(partial(self.env.step, actions)))
        return self._stepped(await self.env.async_step(actions))

    async def call_tool(self, value: tuple[str, str, Any]) -> list[Any]:
        agent_id, name, arguments = value
        result = await self._tools[agent_id][name].call(arguments)
        return [result.content, result.is_error]

    def _opened(self, opening: Any) -> list[Any]:
        """[observations and infos, active agents, hints, system prompt, system prompts and tools of each agent]."""
        env = self.env
        if not isinstance(opening, Mapping) or not all(isinstance(o, tuple) and len(o) == 2 for o in opening.values()):
            raise EnvContractError(
                f"{type(env).__name__}.reset returned {opening!r:.120}; it must return (observation, info dict) per agent."
            )
        made = {agent: [as_tool(tool) for tool in env.episode_tools(agent)] for agent in env.agent_ids}
        self._tools = {agent: {tool.name: tool for tool in tools} for agent, tools in made.items() if tools}
        described = {
            agent: [[t.name, t.description, t.parameters, t.timeout_s] for t in tools]
            for agent, tools in made.items()
            if tools
        }
        prompts = {agent: env.system_prompt_for(agent) for agent in env.agent_ids}
        return [opening, env.active_agents, self._hints(), env.suggested_sysprompt, prompts, described]

    def _stepped(self, outcomes: Any) -> list[Any]:
        """[outcome per agent, active agents, hints]."""
        try:
            sent = {agent: (o.obs, o.reward, o.truncated, o.terminated, o.info) for agent, o in outcomes.items()}
        except AttributeError:
            raise EnvContractError(
                f"{type(self.env).__name__}.step returned {outcomes!r:.120}; it must return a StepOutcome per agent."
            ) from None
        return [sent, self.env.active_agents, self._hints()]

    def _hints(self) -> list[Any] | None:
        """[legal and reference action of each active agent, current observations]; None unless the pool asks for them."""
        if not self._with_hints:
            return None
        env = self.env
        actions = {agent: (env.legal_actions(agent), env.reference_action(agent)) for agent in env.active_agents}
        try:
            return [actions, env.current_obs()]
        except NotImplementedError:  # an env need not offer it
            return [actions, None]

    async def close(self) -> bool:
        """End the running call and close the env; False if the call does not end, which leaves the env as it is."""
        for task in self.running:
            task.cancel()
        is_ended = not self.running or not (await asyncio.wait(self.running, timeout=_CANCEL_S))[1]
        env, self._env = self._env, None
        own = None if env is None else vars(env).get("_thread")
        for thread in {self._thread, own}:
            is_ended &= thread is None or await thread.end()
        if env is not None and is_ended:
            async with time_limit(_CLOSE_S, f"{type(env).__name__}.async_close"):
                await env.async_close()
        return is_ended


class Connection:
    """The envs of one pool, and the line to it."""

    def __init__(self, sock: socket.socket, worker: "Worker") -> None:
        self._worker = worker
        self.envs: dict[int, _HeldEnv] = {}
        self._line = Line(
            sock, Call, on_messages=self._take, on_lost=self._lost, on_unsendable=lambda m, e: self._unsendable(m, e)
        )
        if worker.is_retiring:
            self.retire()

    def retire(self) -> None:
        self._line.send(Reply(0, RETIRING))

    def _take(self, calls: list[Call]) -> None:
        flush_at = time.perf_counter() + _FLUSH_S
        for call in calls:
            held = self.envs.get(call.env)
            if held is not None and held.is_direct and call.op in ("step", "reset"):
                self._answer_now(call, held)
                if time.perf_counter() > flush_at:
                    self._line.flush()
                    flush_at = time.perf_counter() + _FLUSH_S
            else:
                task = asyncio.create_task(self._answer(call, held))
                self._worker.tasks.add(task)
                task.add_done_callback(self._worker.tasks.discard)
                if call.op == "make":
                    held = self._new_env(call)
                if held is not None and call.op != "close":
                    held.running.add(task)
                    task.add_done_callback(held.running.discard)

    def _new_env(self, call: Call) -> _HeldEnv | None:
        factory = self._worker.factories.get(call.value[0]) if _is_make(call.value) else None
        if factory is None or call.env in self.envs:
            return None
        made = self.envs[call.env] = _HeldEnv(factory, in_threads=self._worker.in_threads)
        return made

    def _answer_now(self, call: Call, held: _HeldEnv) -> None:
        try:
            value = held.step(call.value) if call.op == "step" else held.reset(call.value)
            self._line.send(Reply(call.id, value))
        except BaseException as error:  # noqa: BLE001 - the caller gets what its env raises
            self._raised(call, error)

    async def _answer(self, call: Call, held: _HeldEnv | None) -> None:
        try:
            self._line.send(Reply(call.id, await self._answered(call, held)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._raised(call, RuntimeError("Something inside the env was cancelled."))
        except BaseException as error:  # noqa: BLE001 - the caller gets what its env raises
            self._raised(call, error)

    async def _answered(self, call: Call, held: _HeldEnv | None) -> Any:
        if call.op == "close":
            return await self.close_env(call.env)
        if call.op == "make":
            if not _is_make(call.value):
                raise EnvContractError(
                    f"make takes a name, arguments and whether hints are wanted, not {call.value!r:.80}."
                )
            name, kwargs, with_hints = call.value
            if held is not None or (held := self.envs.get(call.env)) is None:
                known = ", ".join(self._worker.factories)
                raise ConfigError(f"This worker makes the envs {known}, and not {name!r}.")
            return await held.make(kwargs, with_hints=with_hints)
        if held is None:
            raise EnvCrashed(f"The worker has no env {call.env}.")
        if len(held.running) > 1 and call.op != "tool":
            raise EnvContractError(f"{call.op} was called while another call of the env runs.")
        if call.op == "tool":
            return await held.call_tool(call.value)
        return await (held.async_step(call.value) if call.op == "step" else held.async_reset(call.value))

    async def close_env(self, number: int) -> bool:
        held = self.envs.pop(number, None)
        try:
            is_ended = held is None or await held.close()
            if not is_ended:
                self._worker.count_hung()
        finally:
            self._worker.end_if_done()
        return is_ended

    def _raised(self, call: Call, error: BaseException) -> None:
        if isinstance(error, MemoryError):
            self._worker.retire()
        self._line.send(Reply(call.id, None, error_to_wire(error)))

    def _unsendable(self, reply: Reply, error: Exception) -> Reply:
        what = f"The env returned what cannot be sent: {error}"
        return Reply(reply.id, None, error_to_wire(EnvContractError(what)))

    def _lost(self, _: str) -> None:
        self._worker.connections.discard(self)
        for number in list(self.envs):
            task = asyncio.create_task(self.close_env(number))
            self._worker.tasks.add(task)
            task.add_done_callback(self._worker.tasks.discard)
        self._worker.end_if_done()

    async def close(self) -> None:
        self._line.flush()
        self._line.close()
        await asyncio.gather(*map(self.close_env, list(self.envs)), return_exceptions=True)


def _is_make(value: Any) -> bool:
    return isinstance(value, list) and [*map(type, value)] == [str, dict, bool]


class Worker:
    """All connections of this process, and its state as the parent sees it."""

    def __init__(self, control: socket.socket, setup: Mapping[str, Any], trace_fd: int) -> None:
        self._control, self._trace_fd = control, trace_fd
        self._timeout_s: float | None = setup["timeout_s"]
        self.in_threads: bool = setup["in_threads"]
        self.factories = {name: Factory(*named) for name, named in setup["envs"].items()}
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.is_retiring = False
        self._num_hung = 0
        self._frames = FrameReader()
        self._sockets: list[int] = []
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the parent says stop, or, when retiring, until the last env is closed."""
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._obey)
        self._tell({"ready": os.getpid()})
        beating = asyncio.create_task(self._beat())
        await self._ended.wait()
        beating.cancel()
        await asyncio.gather(*(connection.close() for connection in self.connections))

    def _obey(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
        self._sockets += descriptors
        if not data:
            return  # the parent is gone; `_end_with_parent` ends this process
        for message in self._frames.feed(data):
            if message == "connection":
                self.connections.add(Connection(socket.socket(fileno=self._sockets.pop(0)), self))
            elif message == "stop":
                self._ended.set()

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            self._control.sendall(pack(message))

    async def _beat(self) -> None:
        """Show the parent that the event loop runs. If it stands still for too long, the interpreter's own watchdog, which needs no
        lock, writes where every thread is and ends the process."""
        while True:
            if self._timeout_s is not None:
                faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._trace_fd)
            self._tell({"beat": sum(len(connection.envs) for connection in self.connections)})
            await asyncio.sleep(min(_BEAT_S, (self._timeout_s or 4.0) / 4))

    def count_hung(self) -> None:
        self._num_hung += 1
        if self._num_hung >= _MAX_HUNG:
            self.retire()

    def retire(self) -> None:
        """Take no further envs: the parent starts a successor, and this process ends when its last env is closed."""
        if not self.is_retiring:
            self.is_retiring = True
            self._tell({"retiring": True})
            for connection in self.connections:
                connection.retire()

    def end_if_done(self) -> None:
        if self.is_retiring and not any(connection.envs for connection in self.connections):
            # Replies of this tick leave first.
            asyncio.get_running_loop().call_later(0.1, self._ended.set)


# --- the process ---


def main() -> int:
    control, trace_fd = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _end_with_parent(control)
    setup = _read_setup(control)
    _be_killed_first()
    if setup["memory_mb"] is not None:
        threading.stack_size(_STACK_BYTES)
    with _reported(control):
        worker = Worker(control, setup, trace_fd)
        if setup["memory_mb"] is not None:
            _limit_memory(setup["memory_mb"])
        loop = asyncio.new_event_loop()
        loop.run_until_complete(worker.run())
    return 0


def _read_setup(control: socket.socket) -> Any:
    """The first frame. No connection follows it before this process has said that it is ready."""
    reader = FrameReader()
    while not (frames := reader.feed(control.recv(1 << 16))):
        pass
    return frames[0]


@contextlib.contextmanager
def _reported(control: socket.socket) -> Iterator[None]:
    """Tell the parent why the process ends."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            control.sendall(pack({"failed": error_to_wire(error)}))
        raise


def _end_with_parent(control: socket.socket) -> None:
    def wait() -> None:
        watched = select.poll()
        watched.register(control.fileno(), select.POLLHUP | getattr(select, "POLLRDHUP", 0))
        watched.poll()
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)  # also what the envs have started
        os._exit(1)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()


def _be_killed_first() -> None:
    """When the machine runs out of memory, the kernel should end this process and not the trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def _limit_memory(memory_mb: int) -> None:
    """Limit what the envs may allocate beyond what the process has now; an allocation beyond it raises MemoryError."""
    with open("/proc/self/statm") as file:
        data_pages = int(file.read().split()[5])
    limit = data_pages * resource.getpagesize() + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
