"""Agents that talk to the gateway: a function of this process, or a command in a sandbox.

`GatewayProtocol` calls one per episode with the task and the address of the episode's session; the answer is text. What an agent
raises fails its episode. A command runs under bubblewrap without a network; `forwarder.py` connects it to the gateway.
"""

import asyncio
import contextlib
import difflib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ludic.envs.threads import EnvThread
from ludic.tasks import cancel_all
from ludic.types import ConfigError, Info
from ludic_sandbox import Bind, BubblewrapConfig, RunStatus, SandboxError, SandboxLimits
from ludic_sandbox.bubblewrap import BubblewrapLauncher, find_interpreter
from ludic_sandbox.interface import explain_failure
from ludic_sandbox.process import Process, start_process
from ludic_sandbox.process_sandbox import ProcessSandbox
from ludic_sandbox.runner.runner_process import BASE_ENV
from ludic_serve.gateway.hosting import GatewayPool

AgentSandbox: TypeAlias = Literal["bubblewrap", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentCall:
    """The task of one episode, and the address at which its agent calls the model."""

    task: Any
    """The env's first observation; for tasks of `ludic.gateway.train`, the task itself."""
    base_url: str
    """For OpenAI clients, …/v1; Anthropic's add that themselves."""
    api_key: str
    """The session's: requests with it are part of the episode."""
    model: str
    """The name of the trained policy."""
    session_id: str
    system_prompt: str | None = None
    """The system prompt of the settings, else of the env."""
    env_info: Info = field(default_factory=dict)
    """The info that came with the env's first observation."""
    sample: Any = None
    """For envs that ask about samples: the whole sample, the solution included."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the env's tools, in OpenAI's form; the agent calls one with a POST of its arguments to `tools_url`/NAME."""
    socket: Path | None = None
    """The gateway's Unix socket, for sandboxed commands."""
    close: Callable[[], None] = lambda: None
    """Refuses further model calls and ends those that wait. A thread cannot be stopped; this ends what it waits for."""

    @property
    def task_text(self) -> str:
        return answer_text(self.task)

    @property
    def tools_url(self) -> str:
        return f"{self.base_url}/tools"


class OutsideAgent(ABC):
    """An agent that makes its model calls through a gateway."""

    name: str
    needs_socket: bool = False

    @abstractmethod
    async def answer(self, call: AgentCall) -> str:
        """Run the agent once. When this returns or raises, nothing of it is running."""

    async def close(self) -> None:
        """Free what episodes shared; more episodes may follow."""
        return

    @cached_property
    def gateways(self) -> GatewayPool:
        """The servers that its episodes share."""
        return GatewayPool(needs_socket=self.needs_socket, on_end=self.close)


def answer_text(answer: Any) -> str:
    """An agent's answer as an action for the env: text as it is, None is empty, other values as JSON."""
    if isinstance(answer, str):
        return answer
    try:
        return "" if answer is None else json.dumps(answer, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The agent answered with a {type(answer).__name__}: {error}. Return text, or what JSON can hold."
        ) from error


# --- functions ---

KEYWORDS = ("base_url", "api_key", "model", "session_id", "system_prompt", "env_info", "sample", "tools", "tools_url")
"""Keywords that a function may take in addition to the task; it is given those that its signature has."""


class AgentFunction(OutsideAgent):
    """`async def agent(task, *, base_url, api_key, model)`. A function that is not async runs in a thread.

    `arguments` are further keywords of every call.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> None:
        self.name = getattr(function, "__qualname__", None) or type(function).__qualname__
        self._function = function
        self._arguments = dict(arguments or {})
        self._takes = _taken_keywords(function, self.name, self._arguments)
        called = function.func if isinstance(function, partial) else function
        self._is_async = any(map(inspect.iscoroutinefunction, (called, getattr(called, "__call__", None))))  # noqa: B004

    async def answer(self, call: AgentCall) -> str:
        given = {name: getattr(call, name) for name in self._takes}
        work = partial(self._function, call.task, **{**given, **self._arguments})
        answer = work() if self._is_async else await in_thread(work, f"The agent {self.name}", call.close)
        return answer_text(await answer if inspect.isawaitable(answer) else answer)


def _taken_keywords(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The agent {name} has no signature: {error}. Name a function of your own.") from error
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    taken = tuple(keyword for keyword in KEYWORDS if takes_all or keyword in by_name)
    try:
        signature.bind(None, **{**dict.fromkeys(taken), **arguments})
    except TypeError as error:
        raise ConfigError(
            f"The agent {name}{signature} cannot be called: {error}. Its first argument is the task; the others are by name, "
            f"as many as it needs of {', '.join(KEYWORDS)}."
        ) from error
    return taken


async def in_thread(work: Callable[[], Any], what: str, on_cancel: Callable[[], None] | None = None) -> Any:
    """The result of blocking code. If this is cancelled, `on_cancel` ends what the code waits for, and it is interrupted when it
    next runs Python."""

    def guarded() -> Any:
        try:
            return work()
        except (SystemExit, KeyboardInterrupt) as error:  # would end the program
            raise RuntimeError(f"{what} raised {error!r:.200}.") from error

    thread = EnvThread()
    try:
        return await thread.run(guarded)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        raise
    finally:
        await thread.end()


# --- commands ---

_PORT = 8000
"""Port of the gateway for a sandboxed command; the sandbox has its own loopback, so the port is free."""
_SOCKET = "/run/ludic/gateway.sock"
_PLACEHOLDERS = ("task", "base_url", "api_key", "model")
_WORD = re.compile(r"\{(\w+)\}")
_STDERR_CHARS = 2_000
_MAX_OUTPUT = 8 << 20
_LONGEST_S = 7 * 86_400.0
"""The rollout engine limits the time of an episode; this is for the sandbox, which wants a number."""
_SYSTEM = tuple(map(Path, ("/usr", "/etc", "/proc", "/dev", "/tmp", "/run", "/bin", "/lib")))

AGENT_LIMITS = SandboxLimits(
    memory_mb=8192, max_processes=512, workspace_mb=1024, max_open_files=4096, max_output_bytes=_MAX_OUTPUT
)
"""Limits of one sandboxed command, its children included."""
_ADDRESS_SPACE_MB = 64 << 10
"""Limit of each process where no cgroup limits memory: Node reserves 10 GB for one instance of WebAssembly, and uses a few MB."""
_NO_LIMIT_MB = 1 << 27  # more than any process can address


class AgentCommand(OutsideAgent):
    """`my-agent {task}`: its stdout is the answer, a non-zero exit code fails the episode.

    The command is split as a shell would, without a shell. Arguments may contain {task}, {base_url}, {api_key} and {model}; the
    environment has them too (see `_environment`). It starts in the current folder. In the sandbox that folder, this Python and
    `binds` are read-only, HOME and /tmp are a new folder in memory, and the gateway is all that it can connect to.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        sandbox: AgentSandbox = "bubblewrap",
        binds: Sequence[str | Path] = (),
        memory_mb: int | None = None,
    ) -> None:
        """`memory_mb` limits the command and its children together; default: AGENT_LIMITS."""
        self._argv = split_command(command)
        self.name = Path(self._argv[0]).name
        self._launcher: BubblewrapLauncher | None = None
        self._folder, self._path = Path.cwd(), _search_path()
        program = shutil.which(self._argv[0], path=self._path)
        if program is None:
            raise ConfigError(f"There is no program {self._argv[0]!r} for the agent command, in {self._path}.")
        if sandbox == "none":
            if binds:
                raise ConfigError("The agent command runs without a sandbox, so it sees every folder: leave binds out.")
            if memory_mb is not None:
                raise ConfigError(
                    f"--agent-memory {memory_mb} limits the sandbox, but --agent-sandbox none has none. Leave one out."
                )
            return
        self.needs_socket = True
        shown = [Path(folder).resolve() for folder in binds]
        if missing := [str(folder) for folder in shown if not folder.exists()]:
            raise ConfigError(f"The agent's sandbox cannot show {missing[0]}: there is no such file or folder.")
        self._binds = _visible_folders([self._folder, *map(Path, (sys.prefix, sys.base_prefix)), *shown])
        self._check_visible(Path(program))
        _check_readable([self._folder, *shown])
        self._path = ":".join(entry for entry in self._path.split(":") if _is_visible(Path(entry), self._binds))
        try:
            self._launcher = BubblewrapLauncher(BubblewrapConfig(loopback=True))
        except SandboxError as error:
            raise ConfigError(
                f"{error} Or run agent commands without a sandbox, with your files, your network and your rights: "
                "--agent-sandbox none."
            ) from error
        if memory_mb is not None and not self._launcher.has_groups:
            raise ConfigError(
                f"--agent-memory {memory_mb} needs a memory cgroup, which cannot be made here (it takes root). Leave it out: each "
                f"process then has {_ADDRESS_SPACE_MB >> 10} GB of address space."
            )
        self._limits = replace(
            AGENT_LIMITS,
            memory_mb=memory_mb or AGENT_LIMITS.memory_mb,
            address_space_mb=_NO_LIMIT_MB if self._launcher.has_groups else _ADDRESS_SPACE_MB,
        )
        forwarder = (Path(__file__).parent / "forwarder.py").read_text()
        folder = self._folder if _is_visible(self._folder, self._binds) else Path("/tmp")
        python = find_interpreter().path
        self._prefix = [python, "-I", "-S", "-B", "-c", forwarder, _SOCKET, str(_PORT), str(folder)]

    def _check_visible(self, program: Path) -> None:
        for place in (program.absolute(), program.resolve()):
            if not _is_visible(place, self._binds):
                raise ConfigError(
                    f"The agent's sandbox does not show {place}. Show the folder that it needs with --agent-bind "
                    f"{place.parent.parent if place.parent.name == 'bin' else place.parent}, or use --agent-sandbox none."
                )

    async def answer(self, call: AgentCall) -> str:
        if self._launcher is None:
            return await self._run_plainly(call)
        assert call.socket is not None, "the gateway of a sandboxed command has a socket"
        url = f"http://127.0.0.1:{_PORT}/v1"
        binds = [Bind(source=str(folder), target=str(folder)) for folder in self._binds]
        binds += [
            Bind(source=str(call.socket.parent / name), target=target)
            for name, target in ((call.socket.name, _SOCKET), ("passwd", "/etc/passwd"), ("hosts", "/etc/hosts"))
        ]
        sandbox = ProcessSandbox(self._launcher, self._limits, keep_spare=False)
        try:
            done = await sandbox.run_command(
                [*self._prefix, *self._filled(call, url)],
                binds=binds,
                timeout_s=_LONGEST_S,
                env_vars={"PATH": f"{self._path}:{BASE_ENV['PATH']}", **_environment(call, url)},
            )
        finally:
            await sandbox.close()
        if done.run_status is RunStatus.SANDBOX_ERROR:
            raise SandboxError(f"The sandbox of the agent command failed: {done.detail}")
        if not done.succeeded:
            why = explain_failure(done, f"The agent command {self.name}")
            if done.run_status is RunStatus.MEMORY_EXCEEDED and self._launcher.has_groups:
                why += f" It may use {self._limits.memory_mb} MB; raise --agent-memory."
            raise RuntimeError(_failed(why, done.stderr))
        return done.stdout

    async def close(self) -> None:
        if self._launcher is not None:
            await self._launcher.close()

    async def _run_plainly(self, call: AgentCall) -> str:
        env = {**os.environ, "PATH": self._path, **_environment(call, call.base_url)}
        process = await start_process(self._filled(call, call.base_url), env=env, new_session=True)
        process.stdin.close()
        stdout, stderr = bytearray(), bytearray()
        reading = [
            asyncio.create_task(_read(stream, kept, process))
            for stream, kept in ((process.stdout, stdout), (process.stderr, stderr))
        ]
        try:
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too; a process that left the group stays
            process.kill()
            await process.wait()
            await asyncio.wait(reading, timeout=1.0)  # what is in the pipes
            await cancel_all(reading)
            process.close_pipes()
        code = process.returncode or 0
        if len(stdout) > _MAX_OUTPUT:
            raise RuntimeError(f"The agent command {self.name} wrote more than {_MAX_OUTPUT >> 20} MB to stdout.")
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise RuntimeError(_failed(f"The agent command {self.name} {how}.", stderr.decode("utf-8", "replace")))
        return stdout.decode("utf-8", "replace")

    def _filled(self, call: AgentCall, url: str) -> list[str]:
        values = {"task": call.task_text.replace("\0", ""), "base_url": url, "api_key": call.api_key}
        values["model"] = call.model
        return [_WORD.sub(lambda found: values.get(found[1], found[0]), argument) for argument in self._argv]


def split_command(command: str | Sequence[str]) -> list[str]:
    """The arguments of a command line; ConfigError if it is empty, or for a placeholder with a typing error."""
    try:
        argv = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(f"The agent command {command!r} cannot be split into arguments: {error}.") from error
    if not argv:
        raise ConfigError("The agent command is empty; give a program and its arguments, such as 'my-agent {task}'.")
    for word in _WORD.findall(" ".join(argv)):
        near = difflib.get_close_matches(word, _PLACEHOLDERS, n=1)
        if word not in _PLACEHOLDERS and near:
            raise ConfigError(f"The agent command has {{{word}}}. Did you mean {{{near[0]}}}?")
    return argv


def _environment(call: AgentCall, url: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": call.api_key,
        "OPENAI_MODEL": call.model,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": call.api_key,
        "ANTHROPIC_MODEL": call.model,
        "LUDIC_TASK": call.task_text.replace("\0", ""),
        "LUDIC_SESSION": call.session_id,
        "LUDIC_TOOLS_URL": f"{url}/tools",
    }


def _search_path() -> str:
    """This Python's own programs come first, so that `python agent.py` has its packages."""
    return f"{sys.prefix}/bin:{os.environ.get('PATH') or BASE_ENV['PATH']}"


def _visible_folders(wanted: Sequence[Path]) -> list[Path]:
    """The folders to show, parents first and without their sub-folders. Folders that hold the system's own are never shown."""
    found: list[Path] = []
    for folder in sorted({path for given in wanted for path in (given.absolute(), given.resolve())}):
        hides_system = any(system.is_relative_to(folder) for system in _SYSTEM)
        if not hides_system and not _is_visible(folder, found):
            found.append(folder)
    return found


def _check_readable(folders: Sequence[Path]) -> None:
    """Root's sandbox runs commands as another user, who must be able to read what it shows."""
    closed = [folder for folder in folders if os.geteuid() == 0 and not folder.stat().st_mode & stat.S_IROTH]
    if closed:
        raise ConfigError(
            f"The agent's sandbox runs the command as another user, who may not read {closed[0]}: allow it (chmod o+rx "
            f"{closed[0]}), start in another folder, or use --agent-sandbox none."
        )


def _is_visible(path: Path, binds: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in (Path("/usr"), Path("/bin"), Path("/sbin"), *binds))


def _failed(what: str, stderr: str) -> str:
    end = stderr.strip()[-_STDERR_CHARS:]
    return f"{what} The end of its stderr:\n{end}" if end else f"{what} It wrote nothing to stderr."


async def _read(stream: asyncio.StreamReader, kept: bytearray, process: Process) -> None:
    """All that it writes; the process is killed when that is too much."""
    while piece := await stream.read(1 << 16):
        kept += piece
        if len(kept) > _MAX_OUTPUT:
            process.kill()
            return
