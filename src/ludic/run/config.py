"""The settings of a training run, as the user wrote them. `resolve` (resolve.py) fills in the defaults.

Every field is a flag (`--group-size 8`) and a key of its section in the file (`[algo]` … `group_size = 8`). `ludic eval` shares the
sections env and agent. See docs/ludic-train.md. `ludic launch` tells its children where Redis and the server are by environment
variables: config.toml holds what the user wrote, and a password is in no file and in no list of processes.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from ludic.batch_gen.episodes import DEFAULT_ENV_TIMEOUT_S
from ludic.catalog import CutOff, Unreadable
from ludic.judges import JudgeBy
from ludic.models import TINY
from ludic.run.entries import Arguments, EnvEntry, LeagueSettings, RecordedEntry, ReplaySettings, at_least
from ludic.run.policies.entry import PolicyEntry, check_policies
from ludic.sandbox.backends import check_backend
from ludic.training.config import CheckpointConfig, LRSchedule, TrainerConfig
from ludic.types import ConfigError, SamplingParams, shown_url
from ludic.types.urls import PUT_LOGIN, refuse_login

REDIS_VARIABLE = "LUDIC_REDIS_URL"
SERVER_VARIABLE = "LUDIC_SERVER"
"""URLs of the vLLM servers, with spaces between them."""
DEFAULT_MAX_LAG = 4
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run folder."""
FILE_SECTIONS = frozenset({"league", "replay"})
"""Sections whose settings are no flags, like lists of tables: a file has them."""

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Engine: TypeAlias = Literal["local", "vllm", "sglang", "pipeline"]
Push: TypeAlias = Literal["merged", "adapter"]
Transport: TypeAlias = Literal["auto", "shared_memory", "cuda_ipc", "file", "gloo", "nccl"]
AgentSandbox: TypeAlias = Literal["bubblewrap", "none"]
KLEstimate: TypeAlias = Literal["k1", "k2", "k3"]
Averaging: TypeAlias = Literal["token_mean", "sample_mean", "episode_mean", "sample_sum"]
LoggerName: TypeAlias = Literal["rich", "print", "tensorboard", "wandb", "trackio", "none"]


def check_name(name: str | None, pattern: str = r"[\w.+-]+") -> None:
    """The name of a folder, which stays inside the folder that it is created in."""
    if name is not None and (not re.fullmatch(pattern, name) or {".", ".."} & set(name.split("/"))):
        raise ConfigError(
            f"name = {name!r}; a folder is named with letters, digits and . _ + -, and cannot be . or .. (--runs or --out "
            "chooses where it is)."
        )


def is_served(model: str | None) -> bool:
    """Whether a setting names a server instead of a model."""
    return model is not None and model.startswith(("http://", "https://"))


# --- sections that training and evaluation share ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """What is played."""

    id: str = ""
    """Id of an env, or file.py:Class; on the command line it is the TARGET."""
    set: Arguments = field(default_factory=dict)
    """Argument of the env; may be repeated."""
    data: Path | None = None
    """JSONL file of samples, one JSON object per line, for envs that ask questions; or hub:NAME:SPLIT,
    hub:NAME:CONFIG:SPLIT, such as hub:openai/gsm8k:main:train; or file.py:function, which generates them (docs/task-streams.md)."""
    max_steps: int | None = None
    """Turns after which an episode is cut off. Default: what suits the env, else 32."""
    episode_timeout: float = 3600.0
    """Seconds after which an episode counts as failed; 0 is no limit."""
    env_timeout: float = DEFAULT_ENV_TIMEOUT_S
    """Seconds for one reset or step of the env, after which its episode counts as failed; 0 is no limit."""
    env_workers: int = 0
    """Processes that hold the envs; 0: they are in this process (docs/env-workers.md)."""
    env_memory_mb: int | None = None
    """With --env-workers: what the envs of one process may allocate together. Default: no limit."""
    env_server: str | None = None
    """host:port of a `ludic env-server`, which holds the envs on another machine; its token is in $LUDIC_ENV_TOKEN."""
    sandbox: str | None = None
    """Where the programs of code envs and of the python tool run: bubblewrap, docker, podman …, or http://HOST:PORT of a `ludic
    sandbox-server`. Default: $LUDIC_SANDBOX, else the first back end that works here."""

    def __post_init__(self) -> None:
        at_least(1, max_steps=self.max_steps, env_memory_mb=self.env_memory_mb)
        at_least(0, episode_timeout=self.episode_timeout, env_timeout=self.env_timeout, env_workers=self.env_workers)
        if self.env_server is not None and self.env_workers:
            raise ConfigError(
                f"env_server = {self.env_server!r} has its own workers; leave env_workers = {self.env_workers} out, or the "
                "server."
            )
        if self.env_memory_mb is not None and not self.env_workers:
            raise ConfigError(f"env_memory_mb = {self.env_memory_mb} limits env workers; give --env-workers N, too.")
        if self.sandbox is not None:
            check_backend(self.sandbox)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, and how it is held."""

    model: str = "smollm2-135m"
    """A folder, a checkpoint or run, a hub id, a .gguf file, smollm2-135m; or random weights: a config.json, or tiny, with a
    token per character."""
    lora_rank: int = 0
    """Train a LoRA adapter of this rank; 0 trains all weights."""
    lora_alpha_mult: float = 2.0
    """LoRA's alpha, in units of the rank."""
    lora_experts: bool = False
    """Of a mixture: the adapter is on the experts, too, each with its own matrices of that rank."""
    lora_dropout: float = 0.0
    """Dropout before the adapter, while training."""
    quantize_base: Literal["4bit"] | None = None
    """With --lora-rank: hold the frozen base in four bits (QLoRA; the package bitsandbytes)."""
    freeze_vision: bool = False
    """Do not train the vision tower of a vision-language model. An adapter is never put on it."""
    fork_from: Path | None = None
    """Checkpoint of another run, or its run folder, to take the weights of (and nothing else)."""
    dtype: Dtype = "auto"
    """Number format of the weights; auto is what the hardware is fast at."""
    device: str | None = None
    """cpu, cuda, cuda:1. Default: the GPU if there is one."""
    threads: int | None = None
    """CPU threads of PyTorch. Default: 1 for the tiny model, else PyTorch's own choice."""

    def __post_init__(self) -> None:
        at_least(0, lora_rank=self.lora_rank, lora_dropout=self.lora_dropout)
        at_least(1, threads=self.threads)
        if self.lora_experts and (not self.lora_rank or self.lora_dropout):
            raise ConfigError(
                f"lora_experts with lora_rank = {self.lora_rank} and lora_dropout = {self.lora_dropout}: adapters on experts need "
                "a rank, and cannot drop out. Give --lora-rank, and leave --lora-dropout out."
            )
        if self.lora_alpha_mult <= 0:
            raise ConfigError(f"lora_alpha_mult = {self.lora_alpha_mult}; it must be above 0.")
        if self.quantize_base is not None and not self.lora_rank:
            raise ConfigError(
                f"quantize_base = {self.quantize_base!r} holds a frozen base, but lora_rank = 0 trains all weights. Give "
                "--lora-rank."
            )

    @property
    def num_threads(self) -> int | None:
        return 1 if self.threads is None and self.model == TINY else self.threads


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """How the model plays."""

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
    """Where --agent-command runs: in a sandbox without a network, or as a plain process with your rights."""
    agent_bind: tuple[Path, ...] = ()
    """Folder that a sandboxed command may read, beside the current one and this Python; may be repeated."""
    agent_max_calls: int | None = None
    """Model calls of one episode of an agent that is a function or a command. Default: no limit."""
    agent_max_tokens: int | None = None
    """Tokens that such an agent may sample in one episode. Default: no limit."""
    tools: tuple[str, ...] = ()
    """Tools of the agent (`ludic parts tool`), or file.py:function."""
    agent_set: Arguments = field(default_factory=dict)
    """Argument of the agent; of a function, further keywords."""
    context: str = "full_dialog"
    """What the model is shown of the past (`ludic parts context`, or file.py:Class)."""
    context_set: Arguments = field(default_factory=dict)
    """Argument of the context."""
    parser: str | None = None
    """How a reply is read (`ludic parts parser`, or file.py:function). Default: what suits the env, else raw: the reply is the
    action."""
    parser_set: Arguments = field(default_factory=dict)
    """Argument of the parser, such as tag=move for xml_tag."""
    protocol: str | None = None
    """What runs the turns of an episode (`ludic parts protocol`), or file.py:Class. A class or function of yours is called with
    those of agent, agents (by role), client, model and chat_template that are its parameters. Default: single_agent; multi_agent
    where the env has several roles."""
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

    def __post_init__(self) -> None:
        at_least(1, max_tokens=self.max_tokens)
        at_least(1, agent_max_calls=self.agent_max_calls, agent_max_tokens=self.agent_max_tokens)
        if self.agent_command is not None and (self.agent is not None or self.agent_set):
            raise ConfigError(
                f"agent_command = {self.agent_command!r} is the whole agent; leave agent and agent_set out, or the command."
            )
        if self.protocol_set and self.protocol is None:
            raise ConfigError("protocol_set holds arguments of a protocol, but none is named; give --protocol.")
        if self.tools and "tools" in self.agent_set:
            raise ConfigError("Tools were given twice, as --tools and as --agent-set tools=…; give --tools alone.")

    @property
    def may_call_tools(self) -> bool:
        """Every agent but the plain ones, so its chat template has to read calls."""
        return self.agent_command is not None or self.agent not in (None, "agent", "folding")


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Rewards beside the env's (docs/rewards.md)."""

    reward: tuple[str, ...] = ()
    """Scorer of finished episodes (`ludic parts reward`), or file.py:function, which is called with a rollout; NAME=… names its
    component; may be repeated."""
    reward_set: Arguments = field(default_factory=dict)
    """Argument of a scorer, such as length.per_tokens=500; may be repeated."""
    reward_weight: dict[str, float] = field(default_factory=dict)
    """Weight of a reward component, such as length=0.1 or env=2; may be repeated. Default: 1."""
    judge: str | None = None
    """Model that grades episodes, the component judge: a model as for --model, or the URL of an OpenAI-compatible endpoint
    (docs/judges.md)."""
    judge_criteria: Path | None = None
    """TOML file of criteria: a table [NAME] with text, and if wanted weight and scale. Default: one, whether the task is solved."""
    judge_by: JudgeBy = "reply"
    """What the judge sees: one reply, the replies of a group to rank, or pairs of them."""
    judge_reference: str | None = None
    """Key in the info of an env's last step of a right answer that the judge may see, such as target_answer."""
    judge_model: str | None = None
    """For a judge behind a URL: what the endpoint calls its model. Default: the only one that it lists."""
    judge_key_env: str | None = None
    """For a judge behind a URL: environment variable that holds its key."""
    judge_tokens: int = 512
    """Tokens of a verdict."""
    judge_concurrency: int = 64
    """Calls of the judge at a time."""
    judge_cache: Path | None = None
    """JSONL file of verdicts, which several runs may share. Default: they are kept in memory."""
    judge_device: str | None = None
    """Of a judge in this process. Default: the GPU if there is one."""

    def __post_init__(self) -> None:
        at_least(1, judge_tokens=self.judge_tokens, judge_concurrency=self.judge_concurrency)
        self._check_judge()
        names = [name for name, _ in self.named]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"Two rewards are called {twice.pop()!r}; name one of them: --reward NAME=file.py:function."
            )
        for key in self.reward_set:
            if key.partition(".")[0] not in names or "." not in key:
                raise ConfigError(
                    f"reward_set {key!r} is no argument of a scorer: write NAME.argument, where --reward has NAME (there is "
                    f"{', '.join(names) or 'none'})."
                )
        for name, weight in self.reward_weight.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise ConfigError(f"reward_weight {name} = {weight!r}; a weight is a number.")

    def _check_judge(self) -> None:
        usual = {one.name: one.default for one in fields(self) if one.name.startswith("judge_")}
        if self.judge is None:
            for name, value in usual.items():
                if getattr(self, name) != value:
                    raise ConfigError(f"{name} = {getattr(self, name)} is for a judge; give --judge MODEL, too.")
        elif self.judge_is_served:
            refuse_login("judge", self.judge, f"A key is given by --judge-key-env NAME. Or: {PUT_LOGIN}")
        else:
            for name in ("judge_model", "judge_key_env"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} is for a judge behind a URL; judge = {self.judge!r} is loaded in this process."
                    )

    def check_siblings(self, num: int, flag: str) -> None:
        """ConfigError if the judge compares siblings and there are none."""
        if self.judge_by != "reply" and num < 2:
            raise ConfigError(
                f"judge_by = {self.judge_by!r} compares the episodes of one task, but {flag} is {num}. Give at least 2."
            )

    @property
    def judge_is_served(self) -> bool:
        return is_served(self.judge)

    @property
    def named(self) -> list[tuple[str, str]]:
        """(name of the component, id of the scorer)."""
        pairs = [given.partition("=") if "=" in given.partition(":")[0] else ("", "", given) for given in self.reward]
        return [(name or id.rpartition(":")[2].rpartition("/")[2], id) for name, _, id in pairs]


# --- sections of a training run --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AlgoSettings:
    """What is learned from the rollouts."""

    algo: str = "grpo"
    """Registered algorithm (`ludic parts algorithm`), or file.py:function that returns one."""
    algo_set: Arguments = field(default_factory=dict)
    """Argument of the algorithm, such as clip_eps_high=0.28."""
    group_size: int | None = None
    """Rollouts of the same task that are compared. Default: 8, or 1 for a built-in algorithm that compares none. A
    function of yours that makes an algorithm is given it if it has a parameter `group_size`."""
    reduction: Averaging | None = None
    """What the loss of all action tokens is divided by: their number, each sample's number and then samples, each episode's
    number and then episodes, or samples. Default: token_mean, or what the algorithm itself does where it is a mean."""
    entropy_bonus: float = 0.0
    """Above 0, the policy is rewarded for the entropy of its choices, by so much: it goes on exploring."""
    kl_coeff: float = 0.0
    """Above 0, the policy is held near a frozen reference by so much KL."""
    kl_estimator: KLEstimate = "k3"
    """How that KL is estimated (docs/algorithms/README.md)."""
    kl_weighted: bool = False
    """Count the terms of that KL by the ratio of trained to sampled probability: right for samples of older versions too."""
    correction: tuple[str, ...] = ("auto",)
    """What is done about samples of another policy than the trained one (docs/importance_sampling.md): token_mask,
    negative_sequence_mask, divergence_mask=0.2, …, which may be repeated; none; or auto: negative_sequence_mask=0.05 for cispo,
    scalerl and sapo with max_lag or replay above 0, else none."""
    reference: str | None = None
    """The frozen reference, a model as for --model. Default: the weights that the run begins with; of a LoRA run the model under
    the adapter, which takes no memory."""
    filter: tuple[str, ...] = ()
    """Which samples are trained on (`ludic parts filter`), or file.py:function, which is called with a sample. Several: those that
    all keep."""
    teacher: str | None = None
    """For algorithms that learn from a teacher (opd, grpo_opd, mopd): a model as for --model, or the URL of a vLLM server."""
    teacher_tokenizer: str | None = None
    """For a teacher behind a URL: its folder or hub id, where the server does not name one that can be read here."""
    train_on: tuple[str, ...] = ()
    """For sft, rft and echo: the roles whose texts are learned, such as assistant tool (docs/renderers.md). Default: what the
    policy sampled; for echo also all that answers it."""

    def __post_init__(self) -> None:
        at_least(1, group_size=self.group_size)
        at_least(0, entropy_bonus=self.entropy_bonus, kl_coeff=self.kl_coeff)
        if self.teacher is not None and self.teacher_is_served:
            refuse_login("teacher", self.teacher, PUT_LOGIN)
        if self.teacher_tokenizer is not None and not self.teacher_is_served:
            raise ConfigError(
                f"teacher_tokenizer = {self.teacher_tokenizer!r} is for a teacher behind a URL; teacher = {self.teacher!r} has one."
            )

    @property
    def teacher_is_served(self) -> bool:
        return is_served(self.teacher)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How episodes are played."""

    rollouts: tuple[Path, ...] = ()
    """Train on the rollouts of these files, which `ludic rescore` or another run wrote, instead of playing."""
    preferences: Path | None = None
    """For dpo, ipo and kto: train on the pairs or labels of this file (JSONL, Parquet, hub:NAME:SPLIT) instead of playing,
    rollouts_per_update of them at a time. No TARGET is needed then; an env is for evaluation (docs/algorithms/dpo.md)."""
    rollouts_per_update: int = 128
    """Episodes per batch; a multiple of group_size. A batch is one update, unless updates_per_batch or mini_batches is above 1."""
    close_batch_at: float = 1.0
    """Below 1, an update begins when this share of the episodes is done, in whole groups; the others go on into the next one, at
    most max_lag versions later."""
    dynamic_sampling: int = 0
    """Above 1, groups of equal returns are replaced by fresh tasks, in at most so many rounds of an update. 0: they stay."""
    curriculum: str | None = None
    """What chooses the next tasks (`ludic parts curriculum`), or file.py:Class. Default: the data in random order, or new seeds."""
    curriculum_set: Arguments = field(default_factory=dict)
    """Argument of the curriculum."""
    concurrency: int | None = None
    """Episodes at a time. It changes the speed, not the episodes. Default: as many as the engine computes together (512 on a GPU,
    64 on a CPU), of which those wait that its free memory has no room for; with servers 64."""
    max_lag: int | None = None
    """Above 0, the next batch is generated while this one is trained on, at most so many versions behind; each update makes one.
    Default: 0; in a pipeline those of 4 batches; with close_batch_at those of 1."""
    engine: Engine = "local"
    """What generates: local is the engine inside this process; vllm a server, or several; sglang servers that are running
    (untested against a real one: docs/serving.md); pipeline separate actor processes (`ludic actor`, or `ludic launch` for all)."""
    server: tuple[str, ...] = ()
    """For sglang, and for vllm, also as actor_engine: servers that are running (`ludic serve --engine vllm`). Default: one is
    started for the run, in a pipeline by `ludic launch`; not for sglang."""
    control_token: Path | None = None
    """For vllm: the file with the servers' control token, or the run folder it is in. Default: $LUDIC_CONTROL_TOKEN."""
    server_memory: float = 0.4
    """For vllm: the share of the GPU's memory that a server started for the run may take; the trainer has the rest."""
    server_sleep: bool = False
    """For vllm: a server started for the run frees the GPU's memory while the trainer computes, so that server_memory may be most
    of it (docs/serving.md). Not with max_lag."""
    server_quantization: Literal["fp8"] | None = None
    """For vllm: a server started for the run rounds its weights to 8 bits when they arrive; watch logp_difference_abs
    (docs/memory.md)."""
    server_hung_after: float = 60.0
    """For vllm: a server started for the run that leaves /health unanswered for so many seconds is restarted."""
    push: Push = "merged"
    """For vllm and LoRA: send all weights with the adapter merged into them, or the adapter alone."""
    transport: Transport = "auto"
    """For vllm: how all weights reach the servers (docs/weights.md). auto: shared memory on this machine, else gloo; cuda_ipc: a
    server on the trainer's GPU."""
    save_rollouts: bool = True
    """Write every episode to the run folder."""
    save_tokens: str = "all"
    """Write to the run folder what the trainer computes of every token (advantage, log-prob, entropy), for `ludic view`: all,
    every=N (each N-th update), or off."""
    max_failed_share: float = 0.5
    """The run stops when a larger share of an update's episodes raised an error, each tried twice; 1 never stops it."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_failed_share <= 1:
            raise ConfigError(
                f"max_failed_share = {self.max_failed_share}; it is a share of the episodes, from 0 to 1."
            )
        if not 0 < self.close_batch_at <= 1:
            raise ConfigError(
                f"close_batch_at = {self.close_batch_at}; it is a share of the episodes, above 0 and at most 1, such as 0.9."
            )
        if self.close_batch_at < 1 and self.dynamic_sampling:
            raise ConfigError("dynamic_sampling waits for whole rounds of episodes, so close_batch_at = 1 beside it.")
        if not 0 < self.server_hung_after < math.inf:
            raise ConfigError(f"server_hung_after = {self.server_hung_after}; give seconds, such as 60.")
        for url in self.server:
            refuse_login("server", url, PUT_LOGIN)
        self.tokens_every  # noqa: B018 - raises
        at_least(1, rollouts_per_update=self.rollouts_per_update, concurrency=self.concurrency)
        at_least(0, max_lag=self.max_lag, dynamic_sampling=self.dynamic_sampling)
        if self.dynamic_sampling == 1:
            raise ConfigError(
                "dynamic_sampling = 1 leaves no round to replace groups in; give 2 or more, or 0 for none."
            )
        if self.curriculum_set and self.curriculum is None:
            raise ConfigError("curriculum_set holds arguments of a curriculum, but none is named; give --curriculum.")

    @property
    def tokens_every(self) -> int:
        """`save_tokens` as a number of updates; 0 is off."""
        known = {"all": 1, "off": 0}
        name, _, number = self.save_tokens.partition("=")
        if self.save_tokens in known:
            return known[self.save_tokens]
        if name == "every" and number.isascii() and number.isdigit() and int(number) >= 1:
            return int(number)
        raise ConfigError(f"save_tokens = {self.save_tokens!r}; there are all, off, and every=N, such as every=10.")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How the weights are changed."""

    steps: int = 30
    """Updates: optimizer steps."""

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Evaluation while training; none unless asked for."""

    eval_episodes: int = 200
    """Tasks of one evaluation."""
    eval_pass_k: int = 1
    """Episodes of each task; above 1, pass@k is measured too."""
    eval_data: Path | None = None
    """JSONL file (or hub:…, or file.py:function) of held-out samples, for envs that ask questions."""
    eval_temperature: float = 0.6
    """Of sampling while evaluating; 0 is greedy."""

    def __post_init__(self) -> None:
        at_least(0, eval_temperature=self.eval_temperature)
        at_least(1, eval_episodes=self.eval_episodes, eval_pass_k=self.eval_pass_k)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What is kept and shown."""

    name: str | None = None
    """Name of the run folder. Default: env, model and algorithm."""
    runs: Path = Path("runs")
    """Where run folders are."""
    logger: tuple[LoggerName, ...] = ("rich",)
    """What shows progress: rich, print, tensorboard, wandb, trackio, none; several are possible. metrics.jsonl is always
    written."""

    def __post_init__(self) -> None:
        check_name(self.name, r"[\w.+-]+(/[\w.+-]+)*")


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """For engine = pipeline: separate actor processes, and the queue between them and the learner."""

    redis: str | None = None
    """URL of the queue's Redis. Default: $LUDIC_REDIS_URL, which may hold a password; else `ludic launch` starts a Redis."""
    queue_key: str | None = None
    """Name of the queue in Redis. Default: ludic: and the name of the run."""
    actors: int = 2
    """How many actors `ludic launch` starts."""
    actor_engine: Literal["local", "vllm"] = "local"
    """What actors sample with: local is an engine with its own weights in each; vllm the servers."""
    max_waiting: int | None = None
    """Groups that may wait in the queue; when it is full, actors wait. Default: four updates' worth, at least 64."""
    acknowledge: Literal["saved", "trained"] = "saved"
    """When a sample may be forgotten: with the first checkpoint after its update, or with the update itself."""
    corrections: bool = True
    """Tokens and samples that the trained policy has moved too far away from do not count."""
    max_restarts: int = 5
    """How often `ludic launch` restarts a role, and a run its own vLLM server, within ten minutes before it gives up."""

    def __post_init__(self) -> None:
        at_least(1, actors=self.actors, max_waiting=self.max_waiting)
        at_least(0, max_restarts=self.max_restarts)
        if self.redis is not None:
            if self.redis.partition("://")[0] not in ("redis", "rediss", "unix"):
                raise ConfigError(
                    f"redis = {shown_url(self.redis)!r}; a Redis URL begins with redis://, rediss:// (TLS) or unix://."
                )
            how = f"Put the URL into the environment variable {REDIS_VARIABLE} instead, and for --resume again."
            refuse_login("redis", self.redis, how)


_OPEN_END = 2**31
"""Last step of the schedule as written; `resolve` puts the run's last step there."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that makes a run what it is, as it was written: None means that `resolve` chooses.

    `trainer`, `checkpoint` and `sampling` are the library's own dataclasses; `KEYS` says which of their fields are settings, and
    under which section and name a file or a flag has them.
    """

    env: EnvSettings = field(default_factory=EnvSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    algo: AlgoSettings = field(default_factory=AlgoSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    train: TrainSettings = field(default_factory=TrainSettings)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalSettings = field(default_factory=EvalSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    run: RunSettings = field(default_factory=RunSettings)
    league: LeagueSettings = field(default_factory=LeagueSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    teachers: dict[str, str] = field(default_factory=dict)
    """Instead of --teacher: domain -> model, as for --teacher. A domain is the name of an entry of [[envs]], or what stored
    rollouts say (docs/algorithms/mopd.md)."""
    envs: tuple[EnvEntry, ...] = ()
    recorded: tuple[RecordedEntry, ...] = ()
    policies: dict[str, PolicyEntry] = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(CHECKPOINTS, every_n_steps=20))

    KEYS: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "rollouts": {name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p")},
        "train": {
            "lr": "trainer.learning_rate",  # the one of the two names that wins
            "schedule": "trainer.lr_schedule.kind",
            "warmup_steps": "trainer.lr_schedule.warmup_steps",
            **{
                name: f"trainer.{name}"
                for name in (
                    "critic_lr", "optimizer", "weight_decay", "max_grad_norm", "max_seq_len", "too_long", "micro_token_budget",
                    "share_prefixes", "gradient_checkpointing", "offload_activations", "context_parallel", "compile", "bitwise",
                    "seed", "balance_experts", "replay_experts", "updates_per_batch", "mini_batches",
                )
            },
        },
        "eval": {
            "eval_every": "trainer.eval_every_n_steps",
            **{
                name: f"trainer.{name}"
                for name in ("eval_at_start", "eval_in_background", "eval_concurrency", "eval_timeout_s")
            },
        },
        "run": {
            "checkpoint_every": "checkpoint.every_n_steps",
            "checkpoint_keep": "checkpoint.max_to_keep",
            "save_optimizer": "checkpoint.save_optimizer",
            "best_metric": "checkpoint.best_metric",
            "best_mode": "checkpoint.best_mode",
        },
    }  # fmt: skip

    def __post_init__(self) -> None:
        schedule = self.trainer.lr_schedule or LRSchedule(total_steps=_OPEN_END)
        norm = self.trainer.max_grad_norm or 0.0  # a file has no word for None
        object.__setattr__(self, "trainer", replace(self.trainer, lr_schedule=schedule, max_grad_norm=norm))
        if self.envs and self.env.id:
            raise ConfigError(
                f"[[envs]] names the envs of the run, and [env] or the command line names {self.env.id!r}; give one."
            )
        for what, names in (("envs", [e.label for e in self.envs]), ("recorded", [r.name for r in self.recorded])):
            if len(set(names)) != len(names):
                raise ConfigError(f'[[{what}]] has the names {", ".join(names)}; give each entry its own name = "…".')
        check_policies(self.policies)
        self._check_teachers()

    def _check_teachers(self) -> None:
        for domain, teacher in self.teachers.items():
            if is_served(teacher):
                refuse_login(f"[teachers] {domain}", teacher, PUT_LOGIN)
        if self.teachers and self.algo.teacher is not None:
            raise ConfigError(
                f"teacher = {self.algo.teacher!r} teaches all samples, and [teachers] has one for each domain. Leave one out."
            )

    @property
    def all_teachers(self) -> tuple[str, ...]:
        """The only teacher, or that of each domain; empty where there is none."""
        return tuple(self.teachers.values()) if self.algo.teacher is None else (self.algo.teacher,)

    @property
    def env_ids(self) -> tuple[str, ...]:
        return tuple(entry.id for entry in self.envs) or ((self.env.id,) if self.env.id else ())

    @property
    def is_evaluated(self) -> bool:
        return self.trainer.eval_at_start or bool(self.trainer.eval_every_n_steps)

    @property
    def is_pipeline(self) -> bool:
        return self.rollouts.engine == "pipeline"

    @property
    def samples_on_vllm(self) -> bool:
        """Whether vLLM samples: the weights are in another process, one copy of them."""
        return self.rollouts.engine == "vllm" or (self.is_pipeline and self.pipeline.actor_engine == "vllm")


MAY_CHANGE_ON_RESUME = frozenset(
    {"steps", "logger", "name", "runs", "checkpoint_every", "checkpoint_keep", "save_optimizer", "best_metric", "best_mode",
     "save_rollouts", "save_tokens", "max_failed_share", "concurrency", "threads", "device", "micro_token_budget", "share_prefixes",
     "gradient_checkpointing", "offload_activations", "context_parallel", "compile", "bitwise", "eval_every",
     "eval_at_start", "eval_in_background", "eval_episodes", "eval_pass_k", "eval_data", "eval_temperature",
     "eval_concurrency", "eval_timeout_s", "redis", "episode_timeout", "env_timeout", "env_workers", "env_memory_mb",
     "env_server", "sandbox", "actors", "max_waiting", "acknowledge", "max_restarts", "server", "control_token",
     "server_memory", "server_sleep", "server_hung_after", "judge_key_env", "judge_concurrency", "judge_cache", "judge_device",
     "transport"}
)  # fmt: skip
"""Settings with which a run stays the same run."""


# --- what the processes of a pipeline tell each other through the environment ----------------------------------


def given_redis(settings: PipelineSettings) -> str | None:
    return settings.redis or os.environ.get(REDIS_VARIABLE) or None


def redis_url(settings: PipelineSettings) -> str:
    """URL of the queue; ConfigError if none was given."""
    url = given_redis(settings)
    if url is None:
        raise ConfigError(
            f"engine = 'pipeline' needs a Redis that learner and actors share: give --redis redis://HOST:6379/0, set "
            f"${REDIS_VARIABLE}, or use `ludic launch`, which starts one with everything else on this machine."
        )
    return url


def given_servers(servers: Sequence[str]) -> tuple[str, ...]:
    return tuple(servers) or tuple(os.environ.get(SERVER_VARIABLE, "").split())


def required_servers(servers: Sequence[str]) -> tuple[str, ...]:
    found = given_servers(servers)
    if not found:
        raise ConfigError(
            "actor_engine = 'vllm' needs servers: give --server URL (`ludic serve --engine vllm` starts one), or use `ludic "
            "launch`, which starts one on this machine."
        )
    return found
