"""A seat at a verifiers program: it looks like one of its agents, and waits for a reply from outside.

Of a verifiers agent it offers what programs call: `run`, `interaction` and its `turn`, a `trace` of the conversation,
and scoring by the task when the conversation ends. Harnesses, model clients and runtimes it has none.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ludic.types import ConfigError, MissingExtra


def api(module: str = "") -> Any:
    """`verifiers.v1`, or a module in it."""
    try:
        return importlib.import_module(f"verifiers.v1.{module}".rstrip("."))
    except ImportError as error:
        raise MissingExtra("verifiers", f"The env 'verifiers' ({error})") from error


class VerifiersRole:
    """One agent of the program, for one conversation."""

    def __init__(self, name: str, bell: asyncio.Event, *, knows_system_prompt: bool) -> None:
        self.name = name
        self.trainable = True
        self.trace: Any = None
        self.question: str | None = None
        """What the program waits to hear an answer to."""
        self._bell = bell
        self._knows_system_prompt = knows_system_prompt

    def configured(self, config: Any) -> "VerifiersRole":
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
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator["VerifiersRole"]:
        if options:
            raise ConfigError(f"The program runs {self.name!r} with {sorted(options)}, which Ludic does not offer it.")
        if self.trace is not None:
            raise ConfigError(
                f"The program starts a second conversation with {self.name!r}, but an agent has one memory per episode."
            )
        refuse_what_is_missing(task, [])
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
        """The program says something; what is answered from outside is returned as verifiers' Segment."""
        limit = self.config.max_turns
        if limit is not None and self.trace.num_turns >= limit:
            self.trace.stop("max_turns")
            return api().Segment(messages=[], terminated=True)
        self.question = self._hear(message)
        self._answer = asyncio.get_running_loop().create_future()
        self._bell.set()
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
    """In place of the box that verifiers runs programs in; a task that uses it learns that there is none."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"The task uses its runtime (.{name}); Ludic plays verifiers tasks without one.")


def refuse_what_is_missing(task: Any, shared_tools: list[Any]) -> None:
    """Tasks that could not be played as they are meant to be."""
    wanted = {
        "a container": task.NEEDS_CONTAINER,
        "tool servers": shared_tools or task.toolsets(task.config),
        "@stop conditions": task.hooks("stop"),
        "@intercept hooks": api("utils.decorators").discover_decorated(task, "intercept"),
    }
    missing = [what for what, wants in wanted.items() if wants]
    if missing:
        raise ConfigError(
            f"{type(task).__name__} of verifiers needs {' and '.join(missing)}, which Ludic does not offer it. Run it with "
            "verifiers' own harness, against `ludic serve`."
        )
