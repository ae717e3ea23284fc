"""`HarborEnv`: a task folder of Harbor or Terminal-Bench as an environment.

The instruction is the first observation. With `play="tool"` the agent gets a `shell` tool, and its one action, the final message,
ends the episode; with `play="commands"` every action is a command, and its output the next observation. Then the task's own tests
grade the workspace (ludic_sandbox.harbor.grading).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import ConfigError, Info, Observation, ResetNeeded, StepOutcome, UnknownName
from ludic_sandbox import SandboxError, SandboxLimits
from ludic_sandbox.harbor.containers import ContainerWorkspace
from ludic_sandbox.harbor.dockerfile import SYSTEM_FOLDERS
from ludic_sandbox.harbor.grading import PREPARE, Grade, grade
from ludic_sandbox.harbor.task import HarborTask, find_tasks
from ludic_sandbox.harbor.workspace import (
    FOLDERS,
    BubblewrapWorkspace,
    CommandOutput,
    LocalWorkspace,
    Workspace,
    WorkspaceKind,
)

Play: TypeAlias = Literal["tool", "commands"]
_FENCED = re.compile(r"```(?:bash|sh|shell|console)?[ \t]*\n(.*?)```", re.DOTALL)
_DONE = re.compile(r"\W*(?:done|exit)\W*", re.IGNORECASE)
_SEED_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of an episode; arguments of `HarborEnv`."""

    command_timeout_s: float = 30.0
    """Seconds of one command."""
    agent_timeout_s: float | None = None
    """Seconds of all commands of the agent. Default: that of task.toml."""
    test_timeout_s: float | None = None
    """Default: that of task.toml."""
    max_output_chars: int = 4_000
    """Characters of a command's output that the agent sees."""
    memory_mb: int = 2048
    """The most memory that a task gets."""
    storage_mb: int = 256
    """The most room that a task gets in each folder."""

    def __post_init__(self) -> None:
        if self.max_output_chars < 100:
            raise ConfigError(f"max_output_chars={self.max_output_chars}; it must be at least 100.")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Limits":
        known = [limit.name for limit in fields(cls)]
        for name in given:
            if name not in known:
                own = list(HarborEnv.__init__.__kwdefaults__ or {})
                raise UnknownName.among("argument of HarborEnv", name, ["sample", *own, *known])
        return cls(**given)


class HarborEnv(SingleAgentEnv):
    """A task folder (Harbor, Terminal-Bench): a shell in a workspace, graded by the task's own tests."""

    blocking = False  # the workspace is another process

    def __init__(
        self,
        sample: Mapping[str, Any] | str | None = None,
        *,
        task: str | Mapping[str, Any] | None = None,
        workspace: WorkspaceKind = "bubblewrap",
        play: Play = "tool",
        max_commands: int = 16,
        ignore: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        reward_key: str = "reward",
        container_args: Sequence[str] = (),
        system_prompt: str | None = None,
        **limits: Any,
    ) -> None:
        """`sample` is {"task": folder} or {"files": {path: text}}, a whole task; `task` is the same, or a folder with one task or
        with several, of which the seed chooses. `ignore` names what a task asks for and can do without (see the message of a
        refused task); `variables` are values for ${NAME} in task.toml; `container_args` are further arguments of `podman run` or
        `docker run`. `limits`: see `Limits`."""
        super().__init__()
        if play not in ("tool", "commands"):
            raise ConfigError(f"play={play!r}; it is 'tool' (a shell tool) or 'commands' (every action is a command).")
        if workspace not in (kinds := get_args(WorkspaceKind)):
            raise UnknownName.among("workspace", str(workspace), kinds)
        if max_commands < 1:
            raise ConfigError(f"max_commands={max_commands}; it must be at least 1.")
        self.play = play
        self.workspace_kind = workspace
        self.max_commands = max_commands
        self.limits = Limits.of(limits)
        self._ignore = [ignore] if isinstance(ignore, str) else [*ignore]
        self._reward_key = reward_key
        self._container_args = [*container_args]
        self._system_prompt = system_prompt
        self._workspace: Workspace | None = None
        if (sample is None) == (task is None):
            raise ConfigError(
                "Give HarborEnv a task: task='folder' (--set task=folder), or a sample (--data tasks.jsonl)."
            )
        self.tasks = self._read_tasks(task if sample is None else sample, variables or {})
        for one in self.tasks:
            one.check(_HAS.get(workspace, ()), self._ignore, workspace)
        self._begin(self.tasks[0])

    @staticmethod
    def _read_tasks(given: Any, variables: Mapping[str, str]) -> list[HarborTask]:
        if isinstance(given, Mapping) and isinstance(given.get("files"), Mapping):
            return [HarborTask.from_files(given["files"], str(given.get("id", "task")), variables)]
        folder = given.get("task") if isinstance(given, Mapping) else given
        if not isinstance(folder, str | Path):
            raise ConfigError(f"A sample of harbor has 'task', a folder, or 'files'; this one is {given!r:.80}.")
        return [HarborTask.read(path, variables) for path in find_tasks(folder)]

    def _begin(self, task: HarborTask) -> None:
        self.task = task
        self._num_commands = 0
        self._seconds = 0.0
        solution = task.solution if len(task.solution) == 1 and not task.solution_env else {}
        is_one_script = self.play == "commands" and task.solution_script in solution
        self._reference = solution[task.solution_script or ""].decode() if is_one_script else None
        self.full_reward = 1.0 if is_one_script else None

    @property
    def suggested_sysprompt(self) -> str | None:
        if self._system_prompt is not None:
            return self._system_prompt
        limit = f"at most {self.max_commands} commands" if self.max_commands > 1 else "one command"
        each = f"Each starts in {self.task.setup.workdir} in a new shell; processes end with their command."
        if self.play == "tool":
            return (
                f"You solve a task in a Linux workspace with the shell tool. You may run {limit}. {each} Check your work; when the "
                "task is solved, say so in one sentence, without a tool call."
            )
        if self.max_commands == 1:
            return (
                "You solve a task in a Linux workspace with one bash script, which runs in "
                f"{self.task.setup.workdir}. Reply with the script in one code block:\n```bash\n…\n```"
            )
        return (
            f"You solve a task in a Linux workspace. Reply with one bash command or script per turn, in a code block:\n"
            f"```bash\nls\n```\nYou see what it writes, and may run {limit}. {each} When the task is solved, reply DONE."
        )

    # --- an episode ---

    async def async_env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        await self.async_close()
        self._begin(self._choose(seed))
        setup = self.task.setup
        self._workspace = await self._open()
        is_in_image = isinstance(self._workspace, ContainerWorkspace)
        files = {} if is_in_image else setup.files
        files = {path: data for path, data in files.items() if path.split("/")[1] not in SYSTEM_FOLDERS}
        made = " ".join(f"'{folder}'" for folder in sorted(setup.folders) if folder != "/")
        done = await self._workspace.run(
            f"{PREPARE}; /bin/mkdir -p {made} {setup.workdir}", files=files, timeout_s=_SEED_S
        )
        if done.exit_code != 0:
            await self.async_close()
            raise SandboxError(
                f"The files of the task {self.task.name} could not be written: {done.text or done.detail}"
            )
        return self.task.instruction, {"task": self.task.name}

    def _choose(self, seed: int | None) -> HarborTask:
        return self.tasks[(seed or 0) % len(self.tasks)]

    async def _open(self) -> Workspace:
        memory_mb, storage_mb = self.limits.memory_mb, self.limits.storage_mb
        limits = SandboxLimits(
            memory_mb=min(memory_mb, self.task.memory_mb or memory_mb),
            workspace_mb=min(storage_mb, self.task.storage_mb or storage_mb),
            max_processes=256,
            max_open_files=1024,
            max_output_bytes=1 << 20,
            max_outputs_bytes=1 << 20,
        )
        folders = sorted({*FOLDERS, *self.task.setup.top_folders} - {f"/{name}" for name in SYSTEM_FOLDERS})
        match self.workspace_kind:
            case "bubblewrap":
                return await BubblewrapWorkspace.open(limits, folders)
            case "unsafe-local":
                return await LocalWorkspace.open(limits, folders)
            case "podman" | "docker":
                return await ContainerWorkspace.open(
                    self.workspace_kind, self.task, limits, run_args=self._container_args
                )

    async def async_close(self) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            await workspace.close()

    def episode_tools(self, agent_id: str) -> Sequence[Callable[..., Any]]:
        return (self.shell,) if self.play == "tool" else ()

    async def shell(self, command: str) -> str:
        """Run a bash command in the workspace and return what it writes.

        Args:
            command: One command or a whole script.
        """
        self._require_running()
        if self._num_commands >= self.max_commands:
            return f"Error: all {self.max_commands} commands are used. End the task now."
        return self._shown(await self._command(command))

    shell.timeout_s = None  # type: ignore[attr-defined] # each command has its own limit

    async def async_env_step(self, action: str) -> StepOutcome:
        if self.play == "commands":
            command = command_in(action)
            if command is not None:
                done = await self._command(command)
                if self._num_commands < self.max_commands and not done.is_lost:
                    return StepOutcome(
                        self._shown(done), 0.0, info={"task": self.task.name, "exit_code": done.exit_code}
                    )
            elif not _DONE.fullmatch(action.strip()) and self.max_commands > 1:
                self._num_commands += 1  # so that an episode of such replies ends
                if self._num_commands < self.max_commands:
                    return StepOutcome(
                        "There is no command in a code block. Write one, or DONE.", 0.0, info={"task": self.task.name}
                    )
        return await self._end()

    async def _command(self, command: str) -> CommandOutput:
        if self._workspace is None:
            raise ResetNeeded("The workspace is closed; call reset.")
        self._num_commands += 1
        left = (self.limits.agent_timeout_s or self.task.agent_timeout_s or float("inf")) - self._seconds
        if left <= 0:
            return CommandOutput(text="", exit_code=None, detail="The time for this task is up. End it now.")
        done = await self._workspace.run(
            command,
            cwd=self.task.setup.workdir,
            env=self.task.setup.env,
            timeout_s=min(self.limits.command_timeout_s, left),
        )
        self._seconds += done.seconds
        return done

    def _shown(self, done: CommandOutput) -> str:
        text, limit = done.text.rstrip(), self.limits.max_output_chars
        if len(text) > limit:
            cut = f"\n… {len(text) - limit:,} characters left out …\n"
            text = text[: limit // 2] + cut + text[-limit // 2 :]
        ending = done.detail or (f"exit code {done.exit_code}" if done.exit_code else "")
        return f"{text}\n[{ending}]".lstrip() if ending else text or "[no output]"

    async def _end(self) -> StepOutcome:
        if self._workspace is None:
            raise ResetNeeded("The workspace is closed; call reset.")
        try:
            graded = await self._grade(self._workspace)
        finally:
            await self.async_close()
        info: Info = {
            "task": self.task.name,
            "correct": graded.reward >= 1.0,
            "num_commands": self._num_commands,
            "rewards": dict(graded.rewards),
            "grading_problem": graded.problem,
            "test_exit_code": graded.exit_code,
            "test_output": graded.output,
        }
        return StepOutcome(f"Reward {graded.reward:g}.", graded.reward, terminated=True, info=info)

    async def _grade(self, workspace: Workspace) -> Grade:
        timeout_s = self.limits.test_timeout_s or self.task.test_timeout_s
        return await grade(workspace, self.task, timeout_s=timeout_s, reward_key=self._reward_key)

    # --- reference ---

    async def solve(self) -> CommandOutput:
        """Run the task's own solution in the workspace, as Harbor's oracle does."""
        if self._workspace is None or self.task.solution_script is None:
            raise ConfigError(f"The task {self.task.name} has no solution, or no episode is running.")
        return await self._workspace.run(
            f"/solution/{self.task.solution_script}",
            cwd=self.task.setup.workdir,
            env={**self.task.setup.env, **self.task.solution_env},
            files={f"/solution/{path}": data for path, data in self.task.solution.items()},
            timeout_s=self.limits.agent_timeout_s or self.task.agent_timeout_s or self.limits.command_timeout_s,
            is_trusted=True,
        )

    def env_current_obs(self) -> Observation:
        return self.task.instruction

    def reference_action(self, agent_id: str) -> str | None:
        if self._reference is None:
            return None
        return f"```bash\n{self._reference}\n```" if self._num_commands == 0 else "DONE"


_HAS: Mapping[str, tuple[str, ...]] = {
    "podman": ("RUN", "FROM", "USER", "COPY", "ADD", "network", ".dockerignore", "ONBUILD"),
    "docker": ("RUN", "FROM", "USER", "COPY", "ADD", "network", ".dockerignore", "ONBUILD"),
}


def command_in(action: str) -> str | None:
    """The command of a reply: its code blocks, or a reply of one line; None if there is none, or it says that the agent is done."""
    blocks = [block for block in _FENCED.findall(action) if block.strip()]
    if blocks:
        return "\n".join(blocks)
    text = action.strip()
    if not text or "\n" in text or _DONE.fullmatch(text):
        return None
    return text
