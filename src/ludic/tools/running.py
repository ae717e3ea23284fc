"""Running a sync tool, and turning what it returns into text."""

import asyncio
import contextlib
import contextvars
import dataclasses
import inspect
import json
import threading
from collections.abc import Callable
from typing import Any


async def in_daemon_thread(work: Callable[[], Any], *, name: str) -> Any:
    """Run `work`, which must not raise, in a thread that cannot keep the interpreter from exiting.

    The default executor would: the interpreter joins its threads on exit, and one hung tool would hang the run.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def deliver(outcome: Any) -> None:
        if not answer.done():
            answer.set_result(outcome)
        elif inspect.iscoroutine(outcome):
            outcome.close()  # nobody waits any more; unclosed, it would warn that it was never awaited

    def run() -> None:
        outcome = work()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True, name=name).start()
    return await answer


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # the text itself, also of a str enum
    if isinstance(value, dict | list | tuple | bool | int | float) or _is_dataclass_instance(value):
        with contextlib.suppress(TypeError, ValueError):  # keys JSON cannot have, a list that contains itself
            return json.dumps(value, default=_plain, ensure_ascii=False)
    return str(value)


def _plain(value: Any) -> Any:
    if _is_dataclass_instance(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
