"""`RemoteEnv`: an env whose state is in a worker process; and `WorkerLine`, the connection to that worker.

The awaitable methods travel as messages. What the interface answers at once (active agents, system prompt, tools) comes from the
last reply.
"""

import asyncio
import functools
import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.envs.threads import time_limit
from ludic.tools.tool import Tool, ToolResult
from ludic.types import ConfigError, EnvCrashed, Info, LudicError, SnapshotUnsupported, StepOutcome
from ludic_envs.workers.supervisor import Worker
from ludic_envs.workers.wire import RETIRING, Call, Line, Reply, error_from_wire

logger = logging.getLogger(__name__)

_CLOSE_S = 20.0
"""For the worker to answer that an env is closed or that its call hangs; it needs at most half of it."""
_DEATH_S = 5.0


class WorkerLine:
    """The connection of one event loop to one worker."""

    def __init__(self, sock: socket.socket, index: int, *, worker: Worker | None, server: str = "") -> None:
        """`worker`: the process, if it is one of this machine's; else `server` is its address."""
        self.index = index
        self.is_retiring = False
        self.worker, self._server = worker, server
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._lost: str | None = None
        self._ending: asyncio.Task[None] | None = None
        self._line = Line(sock, Reply, on_messages=self._take, on_lost=self._on_lost, on_unsendable=self._unsendable)

    @property
    def is_usable(self) -> bool:
        """True if new envs can be made over it."""
        return self._line.is_open and not self.is_retiring

    def call(self, env: int, op: str, value: Any = None) -> "asyncio.Future[Any]":
        """The answer of the worker; EnvCrashed if it has ended."""
        if not self._line.is_open:
            raise EnvCrashed(self._lost or "The connection to the env's worker is closed.")
        id = next(self._ids)
        answer = self._calls[id] = self._loop.create_future()
        self._line.send(Call(id, env, op, value))
        return answer

    def _take(self, replies: list[Reply]) -> None:
        for reply in replies:
            answer = self._calls.pop(reply.id, None)
            if answer is None or answer.done():
                self.is_retiring |= reply.id == 0 and reply.value == RETIRING
            elif reply.error is None:
                answer.set_result(reply.value)
            else:
                answer.set_exception(error_from_wire(reply.error))

    def _unsendable(self, call: Call, error: Exception) -> None:
        what = "arguments of the env" if call.op == "make" else f"value of {call.op}"
        self._fail(call.id, ConfigError(f"The {what} cannot be sent to a worker, which takes plain data: {error}"))

    def _fail(self, id: int, error: LudicError) -> None:
        answer = self._calls.pop(id, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def _on_lost(self, why: str) -> None:
        self._lost = why
        self._ending = asyncio.create_task(self._end(why))

    async def _end(self, why: str) -> None:
        """Fail the running calls, with the reason for the worker's end if it is known."""
        if self.worker is None:
            where = f"The connection to worker {self.index} of the env server at {self._server}"
            why = f"{where} was lost{f' ({why})' if why else ''}: the worker or the server has ended."
        else:
            death = asyncio.shield(asyncio.wrap_future(self.worker.death))
            await asyncio.wait({death}, timeout=_DEATH_S)
            why = death.result() if death.done() else f"Env worker {self.index} closed its connection. {why}"
        self._lost = why
        for id in list(self._calls):
            self._fail(id, EnvCrashed(why))

    def give_up(self) -> None:
        """The worker does not answer: end it, where it is one of this machine's."""
        if self.worker is not None and self._line.is_open:
            self.worker.kill("did not answer and was killed.")

    def forget(self, env: int) -> None:
        """An env that could not be made: what is left of it in the worker is closed, without waiting."""
        if self._line.is_open:
            self._line.send(Call(0, env, "close"))

    @property
    def is_open(self) -> bool:
        return self._line.is_open

    def close(self) -> None:
        self._line.close()


@dataclass(frozen=True, slots=True)
class _RemoteTool(Tool):
    """A tool of the episode: its arguments are read, and it runs, in the worker."""

    ask: Callable[[Any], Any] = lambda _: None

    async def __call__(self, **arguments: Any) -> ToolResult:
        return await self.call(arguments)

    async def call(self, arguments: str | Mapping[str, Any]) -> ToolResult:
        content, is_error = await self.ask(arguments if isinstance(arguments, str) else dict(arguments))
        return ToolResult(content, is_error)


class RemoteEnv(LudicEnv[str, Any, Any]):
    """Made by `EnvPool.make`. Its class has the name of the env's class."""

    blocking = False

    def __init__(
        self, line: WorkerLine, number: int, made: Sequence[Any], *, release: Callable[[], None], with_hints: bool
    ) -> None:
        self._line, self._number = line, number
        _, self._agent_ids, self._active, self._sysprompt, self.full_reward = made
        self._release = release
        self._with_hints = with_hints
        self._hints: Any = None
        self._tools: dict[str, list[_RemoteTool]] = {}
        self._prompts: dict[str, str | None] = {}
        self._is_closed = False

    @property
    def agent_ids(self) -> list[str]:
        return list(self._agent_ids)

    @property
    def active_agents(self) -> list[str]:
        return list(self._active)

    @property
    def suggested_sysprompt(self) -> str | None:
        prompt: str | None = self._sysprompt
        return prompt

    def system_prompt_for(self, agent_id: str) -> str | None:
        return self._prompts.get(agent_id, self.suggested_sysprompt)

    @property
    def worker(self) -> int:
        """Number of the worker that holds the env."""
        return self._line.index

    async def async_reset(self, *, seed: int | None = None) -> dict[str, tuple[Any, Info]]:
        reply = await self._line.call(self._number, "reset", seed)
        opening, self._active, self._hints, self._sysprompt, self._prompts, tools = reply
        self._tools = {agent: [self._tool(agent, *each) for each in offered] for agent, offered in tools.items()}
        return {agent: (obs, info) for agent, (obs, info) in opening.items()}

    async def async_step(self, actions: Mapping[str, Any]) -> dict[str, StepOutcome]:
        outcomes, self._active, self._hints = await self._line.call(self._number, "step", actions)
        return {agent: StepOutcome(*outcome) for agent, outcome in outcomes.items()}

    async def async_close(self) -> None:
        """Close the env in its worker. Ends a call that runs there; a worker that does not answer is killed."""
        if self._is_closed:
            return
        self._is_closed, self._active = True, []
        await close_remotely(self._line, self._number, self._release)

    def _tool(
        self, agent_id: str, name: str, description: str, parameters: dict[str, Any], timeout_s: float | None
    ) -> _RemoteTool:
        async def ask(arguments: Any) -> Any:
            return await self._line.call(self._number, "tool", [agent_id, name, arguments])

        async def run(**arguments: Any) -> ToolResult:
            return ToolResult(*await ask(arguments))

        return _RemoteTool(name, description, parameters, run, timeout_s, {}, ask)

    def episode_tools(self, agent_id: str) -> Sequence[_RemoteTool]:
        return self._tools.get(agent_id, ())

    # --- hints ---

    def legal_actions(self, agent_id: str) -> list[str] | None:
        legal: list[str] | None = self._hint(0).get(agent_id, (None, None))[0]
        return legal

    def reference_action(self, agent_id: str) -> str | None:
        action: str | None = self._hint(0).get(agent_id, (None, None))[1]
        return action

    def current_obs(self) -> dict[str, Any]:
        shown: dict[str, Any] | None = self._hint(1)
        if shown is None:
            raise NotImplementedError(f"{type(self).__name__} does not offer current_obs.")
        return shown

    def _hint(self, which: int) -> Any:
        if not self._with_hints:
            raise ConfigError(
                "Replies of env workers carry legal and reference actions only with EnvPool(…, hints=True)."
            )
        return ({}, None)[which] if self._hints is None else self._hints[which]

    def snapshot(self) -> Any:
        raise SnapshotUnsupported("An env in a worker process does not offer snapshots.")


async def close_remotely(line: WorkerLine, number: int, release: Callable[[], None]) -> None:
    try:
        async with time_limit(_CLOSE_S, "Closing an env in its worker"):
            await line.call(number, "close")
    except TimeoutError:
        line.give_up()
    except EnvCrashed:
        pass  # with the worker, the env is gone
    finally:
        release()


@functools.lru_cache(maxsize=256)
def remote_class(name: str) -> type[RemoteEnv]:
    """RemoteEnv under the name of the env's class: messages and rollouts say the same as in process."""
    return type(name, (RemoteEnv,), {"blocking": False, "__doc__": RemoteEnv.__doc__})
