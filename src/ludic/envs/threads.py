"""A thread for an environment: its calls run there one after the other, while the event loop keeps running.

`LudicEnv.async_reset` and `async_step` use it unless the env's class says `blocking = False`. All calls of one env run in one
thread, as some libraries require (sqlite, emulators, OpenGL), and in one copy of the context variables. The threads are daemons, so
one that hangs does not keep the process from ending.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from ludic.envs.env import LudicEnv

logger = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound="LudicEnv[Any, Any, Any]")

_FINISH_S, _INTERRUPTED_S = 1.0, 2.0
"""Seconds that an abandoned call may take to end: by itself, and then after it was interrupted."""
_HEARTBEAT_S = 1.0
_CLOSE_S = 60.0
"""For an env's `async_close`."""
_hung: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""Threads whose call did not end in time. Each leaves when its call returns."""


class _CallEnded(BaseException):
    """Raised inside an abandoned call. Not an Exception, so that an env that catches exceptions does not catch it."""


class _Call:
    """One call, shared by the thread and the event loop."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._is_running = True
        self.answer: asyncio.Future[tuple[BaseException | None, Any]] = self._loop.create_future()
        self.is_over = False
        self.ended: asyncio.Future[None] | None = None
        self.beat()

    def beat(self) -> None:
        """Wake the event loop every second: a signal that arrives while a thread computes may not wake it, and Ctrl-C is handled
        when it wakes."""
        self.heartbeat = self._loop.call_later(_HEARTBEAT_S, self.beat)

    def execute(self) -> None:
        """The thread's side."""
        assert self._work is not None, "a call is made once"
        outcome: tuple[BaseException | None, Any] = (None, None)
        try:
            try:
                outcome = (None, self._work())
            except BaseException as error:  # noqa: BLE001 - an env's exception fails its episode
                outcome = (error, None)
            self._work = None  # an idle thread keeps nothing of an env alive
        finally:
            with self._lock:
                self._is_running = False
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._deliver, outcome)

    def _deliver(self, outcome: tuple[BaseException | None, Any]) -> None:
        """The event loop's side."""
        self.is_over = True
        if not self.answer.done():
            self.answer.set_result(outcome)
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def interrupt(self, thread_id: int | None) -> None:
        """Raise _CallEnded inside it: ends a loop in Python at once, and a call into C when that returns."""
        with self._lock:
            if self._is_running and thread_id is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(_CallEnded))


class EnvThread:
    """One daemon thread that makes an env's calls; it ends with `end`, or when the object is no longer used."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._current: _Call | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(_make_calls, self._calls), name="ludic-env", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_thread, ()  # a copy of an env begins without one

    @property
    def is_usable(self) -> bool:
        """Idle, and not left behind in the parent of this process."""
        return self._thread.is_alive() and (self._current is None or self._current.is_over)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Its exceptions are raised here; SystemExit, KeyboardInterrupt and the like, which would end the
        program, become a RuntimeError."""
        self._current = call = _Call(work)
        self._calls.put(call)
        try:
            error, value = await call.answer
        finally:
            call.heartbeat.cancel()
        if error is None:
            result: T = value
            return result
        try:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise error
            what = f"The env raised {type(error).__name__}({', '.join(map(repr, error.args))})"
            raise RuntimeError(f"{what:.500}.").with_traceback(error.__traceback__) from error
        finally:
            del error  # its traceback holds this frame

    async def end(self) -> bool:
        """End the thread and its running call; False if the call does not end."""
        call = self._current
        self._calls.put(None)
        if call is None or call.is_over or not self._thread.is_alive():
            return True
        call.ended = asyncio.get_running_loop().create_future()
        await asyncio.wait({call.ended}, timeout=_FINISH_S)
        if not call.is_over:
            call.interrupt(self._thread.ident)
            await asyncio.wait({call.ended}, timeout=_INTERRUPTED_S)
        if call.is_over or not self._thread.is_alive():
            return True
        _hung.add(self._thread)
        num = num_hung()
        if num & (num - 1) == 0:  # 1, 2, 4, …
            logger.warning(
                "%d env thread%s in a call that does not end. The episode is given up and its env is not closed; the call keeps "
                "its memory, and a core if it computes.",
                num,
                " hangs" if num == 1 else "s hang",
            )
        return False


def num_hung() -> int:
    """Threads in an abandoned call that still runs."""
    return sum(thread.is_alive() for thread in list(_hung))


def _make_calls(calls: "SimpleQueue[_Call | None]") -> None:
    with contextlib.suppress(_CallEnded):  # it may arrive when the call is just over
        while (call := calls.get()) is not None:
            call.execute()
            del call


def _no_thread() -> None:
    return None


def thread_of(env: "LudicEnv[Any, Any, Any]") -> EnvThread:
    """The env's thread, made at its first call (or by `opened`)."""
    thread = vars(env).get("_thread")
    if isinstance(thread, EnvThread) and thread.is_usable:
        return thread
    vars(env)["_thread"] = made = EnvThread()
    return made


@contextlib.asynccontextmanager
async def opened(make: Callable[[], E | Awaitable[E]], *, on_loop: bool, timeout_s: float | None) -> AsyncIterator[E]:
    """An env for one episode, closed afterwards. Unless `on_loop`, its thread makes it, within `timeout_s`. On the loop, `make` may
    be a coroutine function, such as `EnvPool.make`, with the same limit.

    An env whose last call does not end is not closed: its thread may still use what closing would free.
    """
    thread = None if on_loop else EnvThread()
    made: list[E] = []  # by the thread; also if the episode is cancelled meanwhile
    try:
        if thread is not None:
            async with time_limit(timeout_s, "Making the env", "env_timeout_s"):
                await thread.run(lambda: made.append(cast(E, make())))
        elif isinstance(env := make(), Awaitable):
            async with time_limit(timeout_s, "Making the env", "env_timeout_s"):
                made.append(await env)
        else:
            made.append(env)
        (env,) = made
        if thread is not None and env.blocking:
            vars(env)["_thread"] = thread
        yield env
    finally:
        is_ended = thread is None or await thread.end()
        for env in made:
            own = vars(env).get("_thread")
            if own is not None and own is not thread:
                is_ended &= await own.end()
            if is_ended:
                async with time_limit(_CLOSE_S, f"{type(env).__name__}.async_close"):
                    await env.async_close()


class time_limit:
    """Like `asyncio.timeout`, but its TimeoutError names `what` and the setting. A generator would be several times slower."""

    __slots__ = ("_limit", "_timeout", "_what")

    def __init__(self, seconds: float | None, what: str, setting: str = "") -> None:
        self._timeout = asyncio.timeout(seconds)
        self._what = what
        self._limit = (seconds, setting)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            seconds, setting = self._limit
            limit = f"{setting}={seconds:g}" if setting else f"{seconds:g} s"
            raise TimeoutError(f"{self._what} took longer than {limit}.") from expired
