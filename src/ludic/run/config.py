"""The settings of a training run, and what becomes of those that were left open.

Every field is a flag (`--group-size 8`) and a key of its section in the file (`[algo]` … `group_size = 8`). `ludic eval`
shares the sections env and agent. See docs/ludic-train.md.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import tyro

from ludic import registry
from ludic.batch_gen.episodes import DEFAULT_ENV_TIMEOUT_S
from ludic.catalog import CutOff, Suggested, Unreadable
from ludic.models import TINY
from ludic.run.env import EnvFactory
from ludic.run.pipeline import DEFAULT_MAX_LAG, PipelineSettings
from ludic.run.settings import Arguments, MaybeFloat, MaybeInt, MaybePath, MaybeText, values_of, with_values
from ludic.types import ConfigError, shown_url
from ludic.types.urls import PUT_LOGIN, refuse_login

T = TypeVar("T")

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
MaybeCutOff: TypeAlias = Annotated[CutOff | None, tyro.conf.arg(metavar="{reject,read}", help_behavior_hint="")]
MaybeUnreadable: TypeAlias = Annotated[Unreadable | None, tyro.conf.arg(metavar="{go_on,stop}", help_behavior_hint="")]
Engine: TypeAlias = Literal["local", "vllm", "pipeline"]
Push: TypeAlias = Literal["merged", "adapter"]
Averaging: TypeAlias = Literal["token_mean", "sample_mean", "sample_sum"]
MaybeAveraging: TypeAlias = Annotated[
    Averaging | None, tyro.conf.arg(metavar="{token_mean,sample_mean,sample_sum}", help_behavior_hint="")
]
LoggerName: TypeAlias = Literal["rich", "print", "tensorboard", "wandb", "none"]


def check_name(name: str | None, pattern: str = r"[\w.+-]+") -> None:
    """The name of a folder, which stays inside the folder that it is created in."""
    if name is not None and (not re.fullmatch(pattern, name) or {".", ".."} & set(name.split("/"))):
        raise ConfigError(
            f"name = {name!r}; a folder is named with letters, digits and . _ + -, and cannot be . or .. (--runs or --out "
            "chooses where it is)."
        )


def _at_least(low: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < low:
            raise ConfigError(f"{name} = {value}; it must be at least {low:g}.")


# --- sections that training and evaluation share ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """What is played."""

    id: tyro.conf.Suppress[str] = ""
    """Id of an env, or file.py:Class; on the command line it is the TARGET."""
    set: Arguments = field(default_factory=dict)
    """Argument of the env; may be repeated."""
    data: MaybePath = None
    """JSONL file of samples, one JSON object per line, for envs that ask questions; or hub:NAME:SPLIT,
    hub:NAME:CONFIG:SPLIT, such as hub:openai/gsm8k:main:train."""
    max_steps: MaybeInt = None
    """Turns after which an episode is cut off. Default: what suits the env, else 32."""
    episode_timeout: float = 3600.0
    """Seconds after which an episode counts as failed; 0 is no limit."""
    env_timeout: float = DEFAULT_ENV_TIMEOUT_S
    """Seconds for one reset or step of the env, after which its episode counts as failed; 0 is no limit."""

    def __post_init__(self) -> None:
        _at_least(1, max_steps=self.max_steps)
        _at_least(0, episode_timeout=self.episode_timeout, env_timeout=self.env_timeout)


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
    lora_dropout: float = 0.0
    """Dropout before the adapter, while training."""
    fork_from: MaybePath = None
    """Checkpoint of another run, or its run folder, to take the weights of (and nothing else)."""
    dtype: Dtype = "auto"
    """Number format of the weights; auto is what the hardware is fast at."""
    device: MaybeText = None
    """cpu, cuda, cuda:1. Default: the GPU if there is one."""
    threads: MaybeInt = None
    """CPU threads of PyTorch. Default: 1 for the tiny model, else PyTorch's own choice."""

    def __post_init__(self) -> None:
        _at_least(0, lora_rank=self.lora_rank, lora_dropout=self.lora_dropout)
        _at_least(1, threads=self.threads)
        if self.lora_alpha_mult <= 0:
            raise ConfigError(f"lora_alpha_mult = {self.lora_alpha_mult}; it must be above 0.")

    @property
    def num_threads(self) -> int | None:
        return 1 if self.threads is None and self.model == TINY else self.threads


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """How the model plays."""

    agent: MaybeText = None
    """Registered agent (`ludic parts agent`), or file.py:Class. Default: what suits the env, else agent: one model call per turn;
    react where there are --tools."""
    tools: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TOOL…", help_behavior_hint="")] = ()
    """Tools of the agent (`ludic parts tool`), or file.py:function."""
    agent_set: Arguments = field(default_factory=dict)
    """Argument of the agent."""
    context: str = "full_dialog"
    """What the model is shown of the past (`ludic parts context`, or file.py:Class)."""
    context_set: Arguments = field(default_factory=dict)
    """Argument of the context."""
    parser: MaybeText = None
    """How a reply is read (`ludic parts parser`, or file.py:function). Default: what suits the env, else raw: the reply is the
    action."""
    parser_set: Arguments = field(default_factory=dict)
    """Argument of the parser, such as tag=move for xml_tag."""
    system_prompt: MaybeText = None
    """Instead of the one that the env suggests."""
    max_tokens: MaybeInt = None
    """Tokens of one reply. Default: what suits the env, else 256."""
    cut_off: MaybeCutOff = None
    """A reply that ran out of tokens is rejected, or read like any other. Default: what suits the env, else reject; with
    max_tokens 1, read."""
    unreadable: MaybeUnreadable = None
    """After a reply that cannot be read: tell the model and go on, or end the episode. Default: what suits the env, else
    go_on."""

    def __post_init__(self) -> None:
        _at_least(1, max_tokens=self.max_tokens)
        if self.tools and "tools" in self.agent_set:
            raise ConfigError("Tools were given twice, as --tools and as --agent-set tools=…; give --tools alone.")

    @property
    def may_call_tools(self) -> bool:
        """Every agent but the plain ones, so its chat template has to read calls."""
        return self.agent not in (None, "agent", "folding")


# --- sections of a training run --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AlgoSettings:
    """What is learned from the rollouts."""

    algo: str = "grpo"
    """Registered algorithm (`ludic parts algorithm`), or file.py:function that returns one."""
    algo_set: Arguments = field(default_factory=dict)
    """Argument of the algorithm, such as clip_eps_high=0.28."""
    group_size: MaybeInt = None
    """Rollouts of the same task that are compared. Default: 8, or 1 where the algorithm compares none."""
    reduction: MaybeAveraging = None
    """What the loss of all action tokens is divided by: their number, each sample's number and then samples, or samples.
    Default: token_mean, or what the algorithm itself does where it is a mean."""
    teacher: MaybeText = None
    """For algorithms that learn from a teacher (opd, grpo_opd, mopd): a model as for --model, or the URL of a vLLM server."""
    teacher_tokenizer: MaybeText = None
    """For a teacher behind a URL: its folder or hub id, where the server does not name one that can be read here."""

    def __post_init__(self) -> None:
        _at_least(1, group_size=self.group_size)
        if self.teacher is not None and self.teacher_is_served:
            refuse_login("teacher", self.teacher, PUT_LOGIN)
        if self.teacher_tokenizer is not None and not self.teacher_is_served:
            raise ConfigError(
                f"teacher_tokenizer = {self.teacher_tokenizer!r} is for a teacher behind a URL; teacher = {self.teacher!r} has one."
            )

    @property
    def teacher_is_served(self) -> bool:
        return self.teacher is not None and self.teacher.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How episodes are played."""

    rollouts_per_update: int = 128
    """Episodes per update; a multiple of group_size."""
    concurrency: int = 64
    """Episodes at a time. It changes the speed, not the episodes."""
    temperature: float = 1.0
    """Of sampling while training."""
    max_lag: MaybeInt = None
    """Above 0, the next batch is generated while this one is trained on, at most so many versions behind. Default: 0; in a
    pipeline 4."""
    engine: Engine = "local"
    """What generates: local is the engine inside this process; vllm a server, or several; pipeline actors of their own
    (`ludic actor`, or `ludic launch` for all of it)."""
    server: Annotated[tuple[str, ...], tyro.conf.arg(metavar="URL…", help_behavior_hint="")] = ()
    """For vllm, also as actor_engine: servers that are running (`ludic serve --engine vllm`). Default: one is started for the
    run, in a pipeline by `ludic launch`."""
    control_token: MaybePath = None
    """For vllm: the file with the servers' control token, or the run folder it is in. Default: $LUDIC_CONTROL_TOKEN."""
    server_memory: float = 0.4
    """For vllm: the share of the GPU's memory that a server started for the run may take; the trainer has the rest."""
    push: Push = "merged"
    """For vllm and LoRA: send all weights with the adapter merged into them, or the adapter alone."""
    save_rollouts: bool = True
    """Write every episode to the run folder."""
    max_failed_share: float = 0.5
    """The run stops when a larger share of an update's episodes raised an error, each tried twice; 1 never stops it."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_failed_share <= 1:
            raise ConfigError(
                f"max_failed_share = {self.max_failed_share}; it is a share of the episodes, from 0 to 1."
            )
        for url in self.server:
            refuse_login("server", url, PUT_LOGIN)
        _at_least(1, rollouts_per_update=self.rollouts_per_update, concurrency=self.concurrency)
        _at_least(0, max_lag=self.max_lag, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How the weights are changed."""

    steps: int = 30
    """Updates."""
    lr: float = 1e-5
    """Learning rate."""
    critic_lr: MaybeFloat = None
    """Of the critic, for algorithms that have one. Default: lr."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """What becomes of the learning rate until the last update."""
    warmup_steps: int = 0
    """Updates in which the learning rate rises."""
    weight_decay: float = 0.01
    """AdamW's."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    max_seq_len: int = 1024
    """Tokens of an episode, prompt and replies; one that gets longer is ended."""
    micro_token_budget: int = 8192
    """Tokens in one forward pass: memory and speed, not the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations: less memory, slower."""
    compile: bool = False
    """Compile the layers: a minute at the start, then faster on a GPU."""
    seed: int = 0
    """Of everything random."""

    def __post_init__(self) -> None:
        _at_least(1, steps=self.steps)
        _at_least(0, warmup_steps=self.warmup_steps, weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Evaluation while training; none unless asked for."""

    eval_every: int = 0
    """Evaluate after every n-th update; 0 never."""
    eval_at_start: bool = False
    """Evaluate before the first update."""
    eval_in_background: bool = False
    """Evaluate a copy of the weights while training goes on."""
    eval_episodes: int = 200
    """Episodes of one evaluation."""
    eval_data: MaybePath = None
    """JSONL file (or hub:…) of held-out samples, for envs that ask questions."""
    eval_temperature: float = 0.6
    """Of sampling while evaluating; 0 is greedy."""
    eval_concurrency: int = 32
    """Episodes at a time."""
    eval_timeout_s: MaybeFloat = None
    """Seconds for one model call. Default: no limit."""

    def __post_init__(self) -> None:
        _at_least(0, eval_every=self.eval_every, eval_temperature=self.eval_temperature)
        _at_least(1, eval_episodes=self.eval_episodes, eval_concurrency=self.eval_concurrency)

    @property
    def is_on(self) -> bool:
        return self.eval_at_start or self.eval_every > 0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What is kept and shown."""

    name: MaybeText = None
    """Name of the run folder. Default: env, model and algorithm."""
    runs: Path = Path("runs")
    """Where run folders are."""
    logger: Annotated[tuple[LoggerName, ...], tyro.conf.arg(metavar="NAME…")] = ("rich",)
    """What shows progress: rich, print, tensorboard, wandb, none; several are possible. metrics.jsonl is always written."""
    checkpoint_every: int = 20
    """Save after every n-th update; the last one is saved in any case. 0: only that."""
    checkpoint_keep: int = 2
    """How many checkpoints stay."""

    def __post_init__(self) -> None:
        _at_least(0, checkpoint_every=self.checkpoint_every)
        _at_least(1, checkpoint_keep=self.checkpoint_keep)
        check_name(self.name, r"[\w.+-]+(/[\w.+-]+)*")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that makes a run what it is."""

    env: EnvSettings = field(default_factory=EnvSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)
    algo: AlgoSettings = field(default_factory=AlgoSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    run: RunSettings = field(default_factory=RunSettings)

    @property
    def folder(self) -> Path:
        assert self.run.name is not None, "resolve gives it one"
        return self.run.runs / self.run.name

    @property
    def group_size(self) -> int:
        assert self.algo.group_size is not None, "resolve gives it one"
        return self.algo.group_size

    @property
    def num_groups(self) -> int:
        """Tasks per update."""
        return self.rollouts.rollouts_per_update // self.group_size

    @property
    def max_lag(self) -> int:
        assert self.rollouts.max_lag is not None, "resolve gives it one"
        return self.rollouts.max_lag

    @property
    def is_pipeline(self) -> bool:
        return self.rollouts.engine == "pipeline"

    @property
    def queue_key(self) -> str:
        assert self.pipeline.queue_key is not None, "resolve gives it one in a pipeline"
        return self.pipeline.queue_key

    @property
    def max_waiting(self) -> int:
        assert self.pipeline.max_waiting is not None, "resolve gives it one in a pipeline"
        return self.pipeline.max_waiting

    @property
    def samples_on_vllm(self) -> bool:
        """Somebody else's processes hold the weights that are sampled from, and only one set of them."""
        return self.rollouts.engine == "vllm" or (self.is_pipeline and self.pipeline.actor_engine == "vllm")


MAY_CHANGE_ON_RESUME = frozenset(
    {"steps", "logger", "name", "runs", "checkpoint_every", "checkpoint_keep", "save_rollouts", "max_failed_share", "concurrency",
     "threads", "device", "micro_token_budget", "gradient_checkpointing", "compile", "eval_every", "eval_at_start",
     "eval_in_background", "eval_episodes", "eval_data", "eval_temperature", "eval_concurrency", "eval_timeout_s", "redis",
     "episode_timeout", "env_timeout",
     "actors", "max_waiting", "acknowledge", "max_restarts", "server", "control_token", "server_memory"}
)  # fmt: skip
"""What a run is not another run for."""


# --- leaving nothing open --------------------------------------------------------------------------------------


def resolve_play(config: T, suggested: Suggested) -> T:
    """What the env suggests, where nothing was said: agent, parser, turns, tokens."""
    given = values_of(config)
    agent_set = suggested.agent_args if given["agent"] is None else {}
    parser_set = suggested.parser_args if given["parser"] is None else {}
    max_tokens = given["max_tokens"] or suggested.max_tokens
    agent = "react" if given["tools"] and suggested.agent == "agent" else suggested.agent
    return with_values(
        config,
        {
            "agent": given["agent"] or agent,
            "agent_set": {**agent_set, **given["agent_set"]},
            "parser": given["parser"] or suggested.parser,
            "parser_set": {**parser_set, **given["parser_set"]},
            "max_steps": given["max_steps"] or suggested.max_steps,
            "max_tokens": max_tokens,
            # One token has no room for an end.
            "cut_off": given["cut_off"] or ("read" if max_tokens == 1 else suggested.cut_off),
            "unreadable": given["unreadable"] or suggested.unreadable,
        },
    )


def resolve(config: RunConfig, found: EnvFactory) -> RunConfig:
    """The config with every default filled in, and checked as a whole."""
    resolved = with_values(
        resolve_play(config, found.suggested),
        {
            "group_size": _group_size(config.algo),
            "reduction": _reduction(config.algo),
            "name": config.run.name or default_name(config),
        },
    )
    resolved = with_values(resolved, _pipeline_defaults(resolved))
    _check_temperature(resolved)
    _check_groups(resolved)
    _check_engine(resolved)
    _check_lengths(resolved)
    _check_data(resolved, found)
    return resolved


def _pipeline_defaults(config: RunConfig) -> dict[str, Any]:
    """What depends on whether learner and actors are apart."""
    lag = config.rollouts.max_lag
    if not config.is_pipeline:
        return {"max_lag": 0 if lag is None else lag}
    pipeline, groups = config.pipeline, config.rollouts.rollouts_per_update // (config.algo.group_size or 1)
    return {
        "max_lag": DEFAULT_MAX_LAG if lag is None else lag,
        "queue_key": pipeline.queue_key or f"ludic:{config.run.name}",
        "max_waiting": pipeline.max_waiting or max(64, 4 * groups),
    }


def _check_engine(config: RunConfig) -> None:
    rollouts = config.rollouts
    if config.algo.teacher is not None and config.is_pipeline:
        raise ConfigError(
            "A teacher is not there for engine = 'pipeline'; use local or vllm, or wrap the learner's source yourself "
            "(TeacherAnnotatedBatchSource)."
        )
    if config.pipeline.redis and not config.is_pipeline:
        raise ConfigError(f"redis is for engine = 'pipeline', but the engine is {rollouts.engine!r}.")
    if rollouts.server and not config.samples_on_vllm:
        servers = ", ".join(map(shown_url, rollouts.server))
        who = "actor_engine" if config.is_pipeline else "engine"
        what = config.pipeline.actor_engine if config.is_pipeline else rollouts.engine
        raise ConfigError(f"server = {servers} is for {who} = 'vllm', but the {who.replace('_', ' ')} is {what!r}.")
    if rollouts.push == "adapter" and rollouts.engine != "vllm":
        raise ConfigError(f"push = 'adapter' is for engine = 'vllm', but the engine is {rollouts.engine!r}.")
    if config.eval.eval_in_background and config.samples_on_vllm:
        raise ConfigError(
            "eval_in_background needs an engine that can keep a copy of the weights: local. A vLLM server has one set of weights, "
            "and they change with every update. Evaluate without it."
        )


def _group_size(algo: AlgoSettings) -> int:
    if algo.algo == "sft":
        raise ConfigError(
            "algo = 'sft' imitates rollouts that somebody else has written; `ludic train` plays its own. See "
            "examples/tic_tac_toe for supervised fine-tuning on a file."
        )
    if algo.group_size is not None:
        return algo.group_size
    factory = registry.algorithms.spec(algo.algo).load()
    return 8 if "group_size" in inspect.signature(factory).parameters else 1


def _reduction(algo: AlgoSettings) -> Averaging | None:
    """A token mean where the algorithm leaves it open: a sum grows with replies, and max_grad_norm would cut every step.

    Within a batch the two differ by one factor, so the direction stays that of the sum.
    """
    reduction = inspect.signature(registry.algorithms.spec(algo.algo).load()).parameters.get("reduction")
    if algo.reduction is not None:
        if reduction is None:
            raise ConfigError(
                f"reduction = {algo.reduction!r} is for algorithms that leave it open, such as grpo; {algo.algo} takes a mean "
                "by its own rule (docs/algorithms)."
            )
        return algo.reduction
    is_open = reduction is not None and reduction.default is None
    return "token_mean" if is_open and not algo.algo_set.keys() & _SAYS_THE_REDUCTION else None


_SAYS_THE_REDUCTION = {"reduction", "length_normalize", "constant_length"}
"""Arguments of an algorithm that decide it."""


def default_name(config: RunConfig) -> str:
    """Env, model and algorithm, as far as they can stand in the name of a folder."""
    env = config.env.id.rpartition(":")[2].rpartition("/")[2]
    model = Path(config.model.model).name.removesuffix(".gguf")
    return slug(f"{env}-{model}-{config.algo.algo.rpartition(':')[2]}")


def slug(text: str) -> str:
    """What can stand in the name of a file."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


def _check_temperature(config: RunConfig) -> None:
    if config.rollouts.temperature == 0:
        raise ConfigError(
            "temperature = 0 always takes the likeliest token: all rollouts of a task are the same, and there is nothing to learn "
            "from. Give --temperature above 0, usually 1; --eval-temperature may be 0."
        )


def _check_groups(config: RunConfig) -> None:
    total, size = config.rollouts.rollouts_per_update, config.group_size
    if total % size:
        below = total // size * size
        near = f"{below} or {below + size}" if below else str(size)
        raise ConfigError(
            f"rollouts_per_update = {total} is not a multiple of group_size = {size}: the last group would be incomplete. "
            f"Take {near}, or another group size."
        )


def _check_lengths(config: RunConfig) -> None:
    train = config.train
    if train.micro_token_budget < train.max_seq_len:
        raise ConfigError(
            f"micro_token_budget = {train.micro_token_budget} is less than max_seq_len = {train.max_seq_len}: the longest "
            "episode has to fit one forward pass. Raise the first or lower the second."
        )
    if config.agent.max_tokens is not None and config.agent.max_tokens >= train.max_seq_len:
        raise ConfigError(
            f"max_tokens = {config.agent.max_tokens} leaves no room for a prompt in max_seq_len = {train.max_seq_len}. "
            "Raise --max-seq-len or lower --max-tokens."
        )
    if train.schedule != "constant" and train.warmup_steps >= train.steps:
        raise ConfigError(f"warmup_steps = {train.warmup_steps} leaves none of the {train.steps} steps after it.")


def _check_data(config: RunConfig, found: EnvFactory) -> None:
    check_data(found, config.env.data, config.env.set, "--data")
    if config.eval.is_on and found.takes_sample and config.eval.eval_data is None and "sample" not in config.env.set:
        raise ConfigError(
            "Evaluation asks questions too: give --eval-data FILE.jsonl, best with samples that are not trained on (the file "
            "of --data works, and measures something else)."
        )


def check_data(found: EnvFactory, data: Path | None, arguments: Mapping[str, Any], flag: str) -> None:
    """A file of samples is given exactly where the env asks about samples."""
    if data is None and found.takes_sample and "sample" not in arguments:
        raise ConfigError(
            f"The env {found.id!r} asks about samples; give {flag} FILE.jsonl with one JSON object per line"
            + (f" such as {dict(found.example)['sample']!r:.200}" if "sample" in found.example else "")
            + f", or {flag} hub:NAME:SPLIT."
        )
    if data is not None and not found.takes_sample:
        raise ConfigError(f"{flag} {data} was given, but the env {found.id!r} has no argument `sample` to take it.")
