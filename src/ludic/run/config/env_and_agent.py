"""Settings of the sections env and agent: what is played, and how the model plays it. `ludic eval` has them too."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from ludic.batch_gen.episodes import DEFAULT_ENV_TIMEOUT_S
from ludic.catalog import CutOff, Unreadable
from ludic.run.config.entries import Arguments, Section
from ludic.run.features.base import plugged
from ludic.run.settings import may_change

AgentSandbox: TypeAlias = Literal["bubblewrap", "none"]


@dataclass(frozen=True, kw_only=True)
class EnvSettings(Section):
    """The env, and its limits."""

    id: str = ""
    """Id of an env, or file.py:Class; on the command line it is the TARGET."""
    set: Arguments = field(default_factory=dict)
    """Argument of the env; may be repeated."""
    data: Path | None = None
    """JSONL file of samples, one JSON object per line, for envs that ask questions; or hub:NAME:SPLIT,
    hub:NAME:CONFIG:SPLIT, such as hub:openai/gsm8k:main:train; or file.py:function, which generates them (docs/task-streams.md).
    With sft the answers of its rows are learned, and no TARGET is needed (docs/algorithms/sft.md)."""
    max_steps: int | None = None
    """Turns after which an episode is cut off. Default: what suits the env, else 32."""
    episode_timeout: float = may_change(3600.0)
    """Seconds after which an episode counts as failed; 0 is no limit."""
    env_timeout: float = may_change(DEFAULT_ENV_TIMEOUT_S)
    """Seconds for one reset or step of the env, after which its episode counts as failed; 0 is no limit."""
    env_workers: int = may_change(0)
    """Processes that hold the envs; 0: they are in this process (docs/env-workers.md)."""
    env_memory_mb: int | None = may_change(None)
    """With --env-workers: what the envs of one process may allocate together. Default: no limit."""
    env_server: str | None = may_change(None)
    """host:port of a `ludic env-server`, which holds the envs on another machine; its token is in $LUDIC_ENV_TOKEN."""
    sandbox: str | None = may_change(None)
    """Sandbox of the programs of code envs and of the python tool: bubblewrap, docker, podman …, or http://HOST:PORT of a `ludic
    sandbox-server`. Default: $LUDIC_SANDBOX, else the first back end that works here."""

    RANGES = ("max_steps env_memory_mb in [1, inf)", "episode_timeout env_timeout env_workers in [0, inf)")

    def problems(self) -> Iterator[str]:
        if self.env_server is not None and self.env_workers:
            yield (
                f"env_server = {self.env_server!r} has its own workers; leave env_workers = {self.env_workers} out, or the "
                "server."
            )
        if self.env_memory_mb is not None and not self.env_workers:
            yield f"env_memory_mb = {self.env_memory_mb} limits env workers; give --env-workers N as well."
        if self.sandbox is not None:
            plugged("sandbox", f"sandbox = {self.sandbox!r}").check_backend(self.sandbox)


@dataclass(frozen=True, kw_only=True)
class AgentSettings(Section):
    """The agent, its tools, context, parser and protocol."""

    agent: str | None = None
    """Registered agent (`ludic parts agent`), or file.py:Class; or file.py:function, an agent of any kind that is called with the
    task and the address of a model server (docs/gateway.md). Default: what suits the env, else agent: one model call per turn;
    react where there are --tools."""
    renderer: str | None = None
    """Write prompts with this renderer of the renderers package (docs/renderers.md), such as qwen3; auto: that of the model's hub
    id. Default: the tokenizer's own chat template."""
    agent_command: str | None = None
    """Instead of --agent: a command such as 'my-agent {task}', which gets the address of a model server in $OPENAI_BASE_URL and
    prints its answer (docs/gateway.md)."""
    agent_sandbox: AgentSandbox = "bubblewrap"
    """Place where --agent-command runs: in a sandbox without a network, or as a plain process with your rights."""
    agent_bind: tuple[Path, ...] = ()
    """Folder that a sandboxed command may read, in addition to the current one and this Python; may be repeated."""
    agent_memory: int | None = may_change(None)
    """MB of memory of a sandboxed command and its children together. Default: 8192 where memory cgroups can be made (as root), else
    64 GB of address space for each process."""
    agent_max_calls: int | None = None
    """Model calls of one episode of an agent that is a function or a command. Default: no limit."""
    agent_max_tokens: int | None = None
    """Tokens that such an agent may sample in one episode. Default: no limit."""
    lenient: bool = False
    """Accept what such an agent asks for beyond this server, formats of the answer and forced tools, without effect
    (docs/gateway.md)."""
    failed_reward: float | None = None
    """Reward of an episode whose agent raised an error, or ended with another exit code than 0, after at least one answered call.
    Default: the episode has failed and is lost (docs/gateway.md)."""
    tools: tuple[str, ...] = ()
    """Tools of the agent (`ludic parts tool`), or file.py:function."""
    agent_set: Arguments = field(default_factory=dict)
    """Argument of the agent; of a function, further keywords."""
    context: str = "full_dialog"
    """Memory: the part of the past that the model is shown (`ludic parts context`, or file.py:Class)."""
    context_set: Arguments = field(default_factory=dict)
    """Argument of the context."""
    parser: str | None = None
    """Reader of replies (`ludic parts parser`, or file.py:function). Default: what suits the env, else raw: the reply is the
    action."""
    parser_set: Arguments = field(default_factory=dict)
    """Argument of the parser, such as tag=move for xml_tag."""
    protocol: str | None = None
    """Protocol that runs the turns of an episode (`ludic parts protocol`), or file.py:Class. A class or function of yours is
    called with those of agent, agents (by role), client, model and chat_template that are its parameters. Default: single_agent;
    multi_agent where the env has several roles."""
    protocol_set: Arguments = field(default_factory=dict)
    """Argument of the protocol, such as 'delegates={"solver": "solves one sub-task"}' for delegating
    (docs/algorithms/fold_grpo.md)."""
    system_prompt: str | None = None
    """Instead of the one that the env suggests."""
    max_tokens: int | None = None
    """Tokens of one reply. Default: what suits the env, else 256."""
    cut_off: CutOff | None = None
    """A reply that ran out of tokens is rejected, or read like any other. Default: what suits the env, else reject; with
    max_tokens 1, read."""
    unreadable: Unreadable | None = None
    """After a reply that cannot be read: tell the model and go on, or end the episode. Default: what suits the env, else
    go_on."""

    RANGES = ("max_tokens agent_max_calls agent_max_tokens in [1, inf)", "agent_memory in [64, inf)")

    def problems(self) -> Iterator[str]:
        if self.agent_command is not None and (self.agent is not None or self.agent_set):
            yield f"agent_command = {self.agent_command!r} is the whole agent; leave agent and agent_set out, or the command."
        if self.protocol_set and self.protocol is None:
            yield "protocol_set holds arguments of a protocol, but none is named; give --protocol."
        if self.tools and "tools" in self.agent_set:
            yield "Tools were given twice, as --tools and as --agent-set tools=…; give --tools alone."

    @property
    def may_call_tools(self) -> bool:
        """Every agent but the plain ones, so its chat template has to read calls."""
        return self.agent_command is not None or self.agent not in (None, "agent", "folding")
