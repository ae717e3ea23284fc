"""From settings as written to a `ResolvedRun`: finds the env, fills in every default, checks everything that needs no weights."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ludic import registry
from ludic.catalog import Suggested
from ludic.envs.check import require_env
from ludic.envs.workers import EnvPool
from ludic.envs.workers.server import ServerAddress, connect, suggested_by
from ludic.interaction.base import AnyEnv
from ludic.run.config import CHECKPOINTS, DEFAULT_MAX_LAG, AlgoSettings, Averaging, RunConfig
from ludic.run.entries import EnvEntry
from ludic.run.settings import values_of, with_values
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.learner.stop import run_sync
from ludic.types import (
    BatchSource,
    ConfigError,
    Failure,
    LudicError,
    Reducer,
    SamplingParams,
    Scorer,
    TrainingLogger,
    UnknownName,
    shown_url,
)

if TYPE_CHECKING:
    from ludic.agents import Agent
    from ludic.gateway.protocol import RewardFunction
    from ludic.gateway.session import Policy
    from ludic.interaction import InteractionProtocol
    from ludic.models.loading import LoadedModel
    from ludic.parsers import Parser
    from ludic.training import RLAlgorithm

T = TypeVar("T")


# --- the env ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvFactory:
    """An env that can be made."""

    id: str
    factory: Callable[..., AnyEnv]
    takes_sample: bool
    """It asks about one sample of a dataset, its argument `sample`."""
    example: Mapping[str, Any] = field(default_factory=dict)
    suggested: Suggested = field(default_factory=Suggested)

    def make(self, arguments: Mapping[str, Any]) -> AnyEnv:
        try:
            made = self.factory(**arguments)
        except LudicError:
            raise
        except (Exception, SystemExit) as error:  # the env's own code may raise anything
            given = ", ".join(f"{name}={value!r:.60}" for name, value in arguments.items())
            failure = Failure.from_exception(error)
            hint = ". Give arguments with --set NAME=VALUE." if isinstance(error, TypeError) and not arguments else ""
            raise ConfigError(
                f"The env {self.id!r} cannot be made with {given or 'no arguments'}: {failure.summary}{hint}"
                + (f"\n{failure.user_traceback}" if failure.user_traceback else "")
            ) from error
        return require_env(made, self.id)


def env_factory(env: str | Callable[..., AnyEnv], *, server: str | None = None) -> EnvFactory:
    """A registered env, `module:Class` or `file.py:Class`; or an env class, or a function that makes one. With `server`, an env
    that this env server has; it need not be installed here."""
    if server is not None:
        return _served(env if isinstance(env, str) else registry.name_of(env), server)
    if not isinstance(env, str):
        return EnvFactory(
            id=registry.name_of(env), factory=env, takes_sample="sample" in inspect.signature(env).parameters
        )
    spec = registry.envs.spec(env) if ":" in env else _registered(env)
    found = spec.load()
    return EnvFactory(
        id=env,
        factory=found if ":" in env else partial(registry.envs.make, env),
        takes_sample="sample" in inspect.signature(found).parameters,
        example=dict(spec.example),
        suggested=spec.suggested,
    )


def _served(id: str, server: str) -> EnvFactory:
    """The env of an env server; `make` there makes it and closes it at once, for what can be asked of it."""

    async def made_and_closed(**arguments: Any) -> AnyEnv:
        async with EnvPool(id, server=server) as pool:
            env = await pool.make(**arguments)
            await env.async_close()
            return env

    _, info = run_sync(connect(ServerAddress.parse(server), worker=None))
    served = info.envs[info.require(id)]
    return EnvFactory(
        id=id,
        factory=lambda **arguments: run_sync(made_and_closed(**arguments)),
        takes_sample=served.takes_sample,
        example=served.example,
        suggested=suggested_by(served),
    )


def no_env() -> EnvFactory:
    """Of a run that learns from stored preferences and plays nothing."""

    def refuse() -> AnyEnv:
        raise ConfigError("This run names no env, so there is nothing to play. Give one as TARGET.")

    return EnvFactory(id="", factory=refuse, takes_sample=False)


def _registered(id: str) -> registry.EntrySpec:
    """The entry of a registered env; a path of a file or folder gets an error that says so."""
    try:
        return registry.envs.spec(id)
    except UnknownName:
        path = Path(id)
        if path.suffix == ".py":
            raise ConfigError(f"{id} is a file; which env in it? Write {id}:Class.") from None
        if path.parent != Path() and path.parent.is_dir():
            there = ", ".join(sorted(file.parent.name for file in path.parent.glob("*/config.toml"))) or "none"
            raise ConfigError(
                f"There is no run in {id}, nor an env of that name. Runs in {path.parent}: {there}."
            ) from None
        raise


# --- the run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Objects that were given to `build` instead of names. None, or empty: the name in the settings decides."""

    agent: "Callable[..., Agent] | None" = None
    """Called with client, model, ctx, parser, chat_template and the arguments of the settings for every episode."""
    context: Callable[..., Any] | None = None
    parser: "Parser | None" = None
    tools: Sequence[Any] = ()
    algorithm: "RLAlgorithm | None" = None
    loss: Any = None
    """Replaces the algorithm's."""
    model: "LoadedModel | None" = None
    samples: Sequence[Any] | Callable[..., Any] | None = None
    """For envs that ask about samples: instead of a file. A function generates them (docs/task-streams.md)."""
    eval_samples: Sequence[Any] | Callable[..., Any] | None = None
    loggers: Sequence[TrainingLogger] = ()
    """Beside those of the settings."""
    reward: "RewardFunction | None" = None
    """For an agent that is a function or a command: instead of the env's reward. Not for engine = pipeline."""
    scorers: "Sequence[Scorer | Callable[..., Any]]" = ()
    """Scorers and reward functions beside those of the settings. Not for engine = pipeline."""
    policies: "Mapping[str, Policy]" = field(default_factory=dict)
    """For such an agent: further models by the names that it asks for. Not for engine = pipeline."""
    protocol: "Callable[..., InteractionProtocol] | None" = None
    """Called with client, model and chat_template for every episode; replaces agent, context, parser and tools."""
    source: Callable[[BatchSource], BatchSource] | None = None
    """Wraps the source of fresh rollouts, e.g. by a replay buffer. Not for engine = pipeline."""
    reducers: Mapping[str, Reducer] = field(default_factory=dict)
    """Training metrics beside the usual ones."""
    command: str = ""
    """The command line of a script that trains this run, for messages that say how to resume it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedEnv:
    """One of several envs of a run."""

    name: str
    share: float
    """Of the episodes."""
    run: "ResolvedRun"
    """The settings as if the run had this env alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedPolicy:
    """One of several policies of a run."""

    name: str
    run: "ResolvedRun"
    """The settings as if the run had this policy alone; its folder is in the folder of the whole run."""
    is_frozen: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """A run with every default filled in; all its parts are built from this."""

    config: RunConfig
    """The settings with every default filled in, as they are written to config.toml."""
    env: EnvFactory
    parts: Parts = field(default_factory=Parts)
    folder: Path
    group_size: int
    max_steps: int
    """Turns of an episode."""
    max_lag: int
    queue_key: str
    max_waiting: int
    sampling: SamplingParams
    """For training; `eval_sampling` for evaluation."""
    eval_sampling: SamplingParams
    trainer: TrainerConfig
    checkpoint: CheckpointConfig
    envs: tuple[NamedEnv, ...] = ()
    """Empty for a run with one env."""
    policies: tuple[NamedPolicy, ...] = ()
    """Empty for a run with one policy."""
    seatings: tuple[Mapping[str, str], ...] = ()
    """With several policies: which of them plays which role, in turn."""

    @property
    def each(self) -> "tuple[ResolvedRun, ...]":
        """The settings of every env."""
        return tuple(env.run for env in self.envs) or (self,)

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Of several policies those that learn; empty for a run with one."""
        return tuple(policy.name for policy in self.policies if not policy.is_frozen)

    @property
    def has_own_algorithms(self) -> bool:
        """Whether an env of several has another algorithm than the others."""
        return any(own.config.algo != self.each[0].config.algo for own in self.each)

    @property
    def num_groups(self) -> int:
        """Tasks per update."""
        return self.config.rollouts.rollouts_per_update // self.group_size

    @property
    def steps(self) -> int:
        return self.config.train.steps

    @property
    def num_batches(self) -> int:
        """As many as the updates, unless a batch takes several."""
        return math.ceil(self.steps / self.trainer.steps_per_batch)

    @property
    def shown_batches(self) -> str:
        size, each = self.config.rollouts.rollouts_per_update, self.trainer.steps_per_batch
        return (
            f"{self.steps} updates × {size} rollouts"
            if each == 1
            else f"{self.num_batches} batches × {size} rollouts, {each} updates each"
        )

    @property
    def seed(self) -> int:
        return self.trainer.seed


def resolve(config: RunConfig, env: EnvFactory, parts: Parts | None = None) -> ResolvedRun:
    """Fill in every default and check the settings as a whole. Nothing is loaded and nothing is written."""
    parts = parts or Parts()
    if config.envs:
        return _resolve_several(config, parts)
    _check_stored_kind(config, parts)
    size, name, lag = _group_size(config.algo, parts), config.run.name or default_name(config), config.rollouts.max_lag
    max_lag = _usual_lag(config) if lag is None else lag
    queue_key = config.pipeline.queue_key or f"ludic:{name}"
    max_waiting = config.pipeline.max_waiting or max(64, 4 * (config.rollouts.rollouts_per_update // size))
    values: dict[str, Any] = {
        "group_size": size,
        "reduction": None if parts.algorithm is not None else open_reduction(config.algo),
        "correction": _corrections(config, max_lag, parts),
        "name": name,
    }
    values["max_lag"] = max_lag
    if config.is_pipeline:
        values |= {"queue_key": queue_key, "max_waiting": max_waiting}
    filled = with_values(resolve_play(config, env.suggested), values)
    _check_numbers(filled, size)
    _check_engine(filled, parts)
    _check_tasks(filled, size)
    _check_data(filled, env, parts)
    folder = config.run.runs / name
    max_tokens, max_steps = filled.agent.max_tokens or 1, filled.env.max_steps or 1
    return ResolvedRun(
        config=filled,
        env=env,
        parts=parts,
        folder=folder,
        group_size=size,
        max_steps=max_steps,
        max_lag=max_lag,
        queue_key=queue_key,
        max_waiting=max_waiting,
        sampling=replace(config.sampling, max_tokens=max_tokens),
        eval_sampling=SamplingParams(temperature=config.eval.eval_temperature, max_tokens=max_tokens),
        trainer=_trainer_config(filled, max_lag, max_steps),
        checkpoint=replace(config.checkpoint, output_dir=folder / CHECKPOINTS),
    )


def _usual_lag(config: RunConfig) -> int:
    """In versions; every batch makes `steps_per_batch` of them."""
    batches = DEFAULT_MAX_LAG if config.is_pipeline else int(config.rollouts.close_batch_at < 1)
    return batches * config.trainer.steps_per_batch


def _resolve_several(config: RunConfig, parts: Parts) -> ResolvedRun:
    """Every env as a run with that env alone; the whole has the largest of their limits."""
    refused = {
        "rollouts": config.rollouts.rollouts,
        "curriculum": config.rollouts.curriculum,
        "league_every": config.league.league_every,
        "engine = 'pipeline'": config.is_pipeline,
        "protocol=": parts.protocol,
        "data=": parts.samples,
    }
    given = [name for name, value in refused.items() if value]
    if given:
        raise ConfigError(f"[[envs]] does not go with {', '.join(given)}: these are for runs with one env.")
    name = config.run.name or default_name(config)
    alone = replace(config, envs=(), recorded=(), run=replace(config.run, name=name))
    total = sum(entry.weight for entry in config.envs)
    envs = tuple(
        NamedEnv(
            name=entry.label,
            share=entry.weight / total,
            run=resolve(config_of_entry(alone, entry), env_factory(entry.id, server=config.env.env_server), parts),
        )
        for entry in config.envs
    )
    first, max_steps = envs[0].run, max(env.run.max_steps for env in envs)
    longest = max(env.run.sampling.max_tokens for env in envs)
    corrections = {env.run.config.algo.correction for env in envs}
    same = {"correction": corrections.pop()} if len(corrections) == 1 else {}  # else auto decides for each again
    whole = replace(
        first,
        config=with_values(config, {"name": name, "max_lag": first.max_lag, **same}),
        max_steps=max_steps,
        sampling=replace(first.sampling, max_tokens=longest),
        trainer=replace(first.trainer, eval_max_steps=max_steps),
        envs=envs,
    )
    if parts.algorithm is not None and whole.has_own_algorithms:
        raise ConfigError(
            "algo= is one algorithm for all envs, but an entry of [[envs]] has its own. Give one of the two."
        )
    return whole


def config_of_entry(config: RunConfig, entry: EnvEntry) -> RunConfig:
    """The settings of a run with this env alone. A part that an entry names comes with the entry's arguments."""
    values: dict[str, Any] = {"id": entry.id, "set": entry.set, "data": entry.data}
    for part in ("agent", "parser", "protocol", "algo"):
        if (named := getattr(entry, part)) is not None:
            values |= {part: named, f"{part}_set": getattr(entry, f"{part}_set")}
        elif arguments := getattr(entry, f"{part}_set"):
            values[f"{part}_set"] = {**values_of(config)[f"{part}_set"], **arguments}
    own = {
        name: getattr(entry, name) for name in ("max_steps", "system_prompt", "max_tokens", "group_size", "eval_data")
    }
    values |= {name: value for name, value in own.items() if value is not None}
    return with_values(config, values | ({"tools": entry.tools} if entry.tools else {}))


def _trainer_config(config: RunConfig, max_lag: int, max_steps: int) -> TrainerConfig:
    trainer, schedule = config.trainer, config.trainer.lr_schedule
    end = config.train.steps if schedule is None else max(config.train.steps, schedule.warmup_steps + 1)
    return replace(
        trainer,
        lr_schedule=None if schedule is None else replace(schedule, total_steps=end),
        # In a pipeline the source drops samples that are too old, by whole groups; the trainer would drop single ones.
        max_lag=None if config.is_pipeline else max_lag or None,
        eval_max_steps=max_steps,
    )


def resolve_play(config: T, suggested: Suggested) -> T:
    """The config with the agent, parser, turns and tokens that the env suggests, where none were given."""
    given = values_of(config)
    takes_suggested = given["agent"] is None and given["agent_command"] is None
    agent_set = suggested.agent_args if takes_suggested else {}
    parser_set = suggested.parser_args if given["parser"] is None else {}
    max_tokens = given["max_tokens"] or suggested.max_tokens
    needs_tools = given["tools"] or given["protocol"] == "delegating"
    agent = "react" if needs_tools and suggested.agent == "agent" else suggested.agent
    agent = given["agent"] if not takes_suggested else agent
    return with_values(
        config,
        {
            "agent": agent,
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


def _check_engine(config: RunConfig, parts: Parts) -> None:
    rollouts = config.rollouts
    if config.trainer.bitwise and rollouts.engine != "local":
        raise ConfigError(
            f"bitwise needs engine = 'local', where sampler and trainer make the same calls on one machine; the engine is "
            f"{rollouts.engine!r}. Leave bitwise out, or use engine = 'local'."
        )
    if config.all_teachers and config.is_pipeline:
        raise ConfigError(
            "A teacher is not there for engine = 'pipeline'; use local or vllm, or wrap the learner's source yourself "
            "(TeacherAnnotatedBatchSource)."
        )
    if (parts.reward is not None or parts.policies) and config.is_pipeline:
        raise ConfigError(
            "reward= and policies= are objects of this process; with engine = 'pipeline' actors play the episodes. Give the "
            "reward by an env of your own (file.py:Class), whose step grades the answer."
        )
    if parts.scorers and config.is_pipeline:
        raise ConfigError(
            "scorers= are objects of this process; with engine = 'pipeline' actors play the episodes. Give reward="
            "'file.py:function'."
        )
    if parts.source is not None and config.is_pipeline:
        raise ConfigError("source= wraps rollouts that this process plays; with engine = 'pipeline' actors play them.")
    if config.pipeline.redis and not config.is_pipeline:
        raise ConfigError(f"redis is for engine = 'pipeline', but the engine is {rollouts.engine!r}.")
    if rollouts.engine == "sglang" and not rollouts.server:
        raise ConfigError(
            "engine = 'sglang' needs servers that are running: give --server http://HOST:30000 (python -m sglang.launch_server)."
        )
    if rollouts.server and not config.samples_on_vllm and rollouts.engine != "sglang":
        servers = ", ".join(map(shown_url, rollouts.server))
        who = "actor_engine" if config.is_pipeline else "engine"
        what = config.pipeline.actor_engine if config.is_pipeline else rollouts.engine
        raise ConfigError(f"server = {servers} is for {who} = 'vllm', but the {who.replace('_', ' ')} is {what!r}.")
    if rollouts.push == "adapter" and rollouts.engine != "vllm":
        raise ConfigError(f"push = 'adapter' is for engine = 'vllm', but the engine is {rollouts.engine!r}.")
    if rollouts.transport != "auto" and not config.samples_on_vllm:
        raise ConfigError(
            f"transport = {rollouts.transport!r} is for engine = 'vllm', but the engine is {rollouts.engine!r}."
        )
    if rollouts.transport != "auto" and rollouts.push == "adapter":
        raise ConfigError(
            "transport is for all weights; with push = 'adapter' the server reads files of the run folder."
        )
    if rollouts.engine == "vllm" and not rollouts.server and rollouts.transport in ("file", "gloo", "nccl"):
        raise ConfigError(
            f"transport = {rollouts.transport!r} is for servers named with --server: one that is started for the run and restarted "
            "gets the last weights again, which shared_memory and cuda_ipc keep."
        )
    if config.trainer.eval_in_background and (config.samples_on_vllm or rollouts.engine == "sglang"):
        raise ConfigError(
            "eval_in_background needs an engine that can keep a copy of the weights: local. A server has one set of weights, "
            "and they change with every update. Evaluate without it."
        )


def _check_tasks(config: RunConfig, group_size: int) -> None:
    rollouts = config.rollouts
    if rollouts.dynamic_sampling and group_size == 1:
        raise ConfigError(
            f"dynamic_sampling = {rollouts.dynamic_sampling} replaces groups of equal returns, but group_size = 1: there are none."
        )
    own = {
        "dynamic_sampling": rollouts.dynamic_sampling,
        "curriculum": rollouts.curriculum,
        "close_batch_at": rollouts.close_batch_at < 1,
        "filter": config.algo.filter,
        "[[recorded]]": config.recorded,
        "league_every": config.league.league_every,
        "[replay]": config.replay.replay,
    }
    if config.replay.replay and (rollouts.max_lag or rollouts.close_batch_at < 1):
        raise ConfigError(
            "[replay] brings older samples by itself; max_lag and close_batch_at bound the lag of new ones. Give one of the two."
        )
    if config.is_pipeline and any(own.values()):
        given = ", ".join(name for name, value in own.items() if value)
        raise ConfigError(
            f"{given}: for runs that play their own episodes (engine = local or vllm); in a pipeline actors play them."
        )
    per_batch, lag = config.trainer.steps_per_batch, rollouts.max_lag or 0
    if rollouts.close_batch_at < 1 and lag < per_batch:
        raise ConfigError(
            f"close_batch_at = {rollouts.close_batch_at:g} trains on episodes that began a batch earlier, so max_lag = {lag} is "
            f"too little: give {per_batch} or more, or leave it out."
        )
    if rollouts.server_sleep and (rollouts.engine != "vllm" or rollouts.server):
        raise ConfigError(
            "server_sleep is for a vLLM server that the run starts: give --engine vllm, without --server, or leave it out."
        )
    if rollouts.server_sleep and (rollouts.max_lag or rollouts.close_batch_at < 1):
        raise ConfigError(
            "server_sleep frees the server's memory while the trainer computes, but with max_lag or close_batch_at it generates "
            "meanwhile. Give one of the two."
        )
    if config.league.league_every and rollouts.engine != "local":
        raise ConfigError(
            f"league_every needs an engine that can keep copies of the weights: local, not {rollouts.engine!r}."
        )
    if config.league.league_every and config.agent.protocol is not None:
        raise ConfigError(
            f"league_every seats the policy and its snapshots by its own protocol, so protocol = {config.agent.protocol!r} has no "
            "meaning. Leave one out."
        )
    if config.league.league_every and rollouts.curriculum is not None:
        raise ConfigError(
            "league_every draws the opponents of new tasks; with a curriculum a task comes again. Give one."
        )


PREFERENCE_ALGORITHMS = ("dpo", "ipo", "kto")


def _check_stored_kind(config: RunConfig, parts: Parts) -> None:
    """ConfigError for an algorithm and data that do not go together."""
    algo, preferences = config.algo.algo, config.rollouts.preferences
    if parts.algorithm is None and algo in PREFERENCE_ALGORITHMS and preferences is None:
        raise ConfigError(
            f"algo = {algo!r} learns from stored preferences; give --preferences FILE.jsonl (docs/algorithms/dpo.md)."
        )
    if parts.algorithm is None and algo == "sft" and not config.rollouts.rollouts:
        raise ConfigError(
            "algo = 'sft' imitates recorded rollouts, but a run plays its own: give --rollouts FILE.jsonl. For texts that are no "
            "rollouts see examples/tic_tac_toe."
        )
    if preferences is None:
        return
    if parts.algorithm is None and ":" not in algo and algo not in PREFERENCE_ALGORITHMS:
        raise ConfigError(
            f"preferences = {preferences} is for {', '.join(PREFERENCE_ALGORITHMS)}, but algo = {algo!r}."
        )
    rollouts = config.rollouts
    playing = {
        "rollouts": rollouts.rollouts,
        f"engine = {rollouts.engine!r}": rollouts.engine != "local",
        "max_lag": rollouts.max_lag,
        "close_batch_at": rollouts.close_batch_at < 1,
        "dynamic_sampling": rollouts.dynamic_sampling,
        "curriculum": rollouts.curriculum,
        "filter": config.algo.filter,
        "teacher": config.algo.teacher,
        "[teachers]": config.teachers,
        "[[envs]]": config.envs,
        "[[recorded]]": config.recorded,
        "league_every": config.league.league_every,
        "[replay]": config.replay.replay,
        "data": config.env.data,
    }
    if given := [name for name, value in playing.items() if value]:
        raise ConfigError(
            f"preferences = {preferences} replaces played episodes, so {given[0]} has no meaning. Leave one out."
        )
    if config.is_evaluated and not config.env.id:
        raise ConfigError("An evaluation plays an env: name one as TARGET, or leave eval_every and eval_at_start out.")


def _group_size(algo: AlgoSettings, parts: Parts) -> int:
    if algo.group_size is not None:
        return algo.group_size
    if parts.algorithm is not None:
        return int(getattr(parts.algorithm.credit_assigner, "group_size", None) or 1)
    factory = registry.algorithms.spec(algo.algo).load()
    is_yours = ":" in algo.algo  # whether it compares is not known
    return 8 if is_yours or "group_size" in inspect.signature(factory).parameters else 1


def open_reduction(algo: AlgoSettings) -> Averaging | None:
    """A token mean where the algorithm leaves it open: a sum grows with replies, and max_grad_norm would cut every step.

    Within a batch the two differ by one factor, so the direction stays that of the sum.
    """
    reduction = inspect.signature(registry.algorithms.spec(algo.algo).load()).parameters.get("reduction")
    is_open = reduction is not None and reduction.default is None
    if algo.reduction is not None:
        takes_it = reduction is not None and algo.reduction in (reduction.default, "episode_mean")
        if not (is_open or takes_it):
            raise ConfigError(
                f"reduction = {algo.reduction!r} is for algorithms that leave it open, such as grpo; {algo.algo} takes a mean "
                "by its own rule (docs/algorithms)."
            )
        return algo.reduction
    return "token_mean" if is_open and not algo.algo_set.keys() & _SAYS_THE_REDUCTION else None


_SAYS_THE_REDUCTION = {"reduction", "length_normalize", "constant_length"}
"""Arguments of an algorithm that decide it."""


NEGATIVE_MASK = "negative_sequence_mask=0.05"
MASKED_WHEN_OLD = ("cispo", "scalerl", "sapo")
"""Presets that lose reward on samples of 4 batches ago, and hold it with NEGATIVE_MASK (docs/results/stale_data_presets.jsonl)."""


def _corrections(config: RunConfig, max_lag: int, parts: Parts) -> tuple[str, ...]:
    """Those of the settings, with the default in the place of auto.

    Several updates on each fresh batch alone are no reason for it: four lose little without the mask and gain little by it ("×4" in
    the records).
    """
    given, none = config.algo.correction, ("none",)
    if "none" in given and given != none:
        raise ConfigError(f"correction = {', '.join(given)}: none stands alone. Leave it out, or the others.")
    is_named = parts.algorithm is None and parts.loss is None  # what an object needs is not known
    is_old = max_lag > 0 or config.replay.replay > 0
    is_off = config.is_pipeline and not config.pipeline.corrections
    needs_it = is_named and is_old and not is_off and config.algo.algo in MASKED_WHEN_OLD
    default = (NEGATIVE_MASK,) if needs_it else ()
    return tuple(c for text in given if text != "none" for c in (default if text == "auto" else (text,)))


def default_name(config: RunConfig) -> str:
    """Env, model and algorithm, as far as they can stand in the name of a folder."""
    env = "+".join(id.rpartition(":")[2].rpartition("/")[2] for id in config.env_ids)
    if config.rollouts.preferences is not None:
        env = env or config.rollouts.preferences.stem
    if config.policies:
        return slug(f"{env}-{'+'.join(config.policies)}")
    model = Path(config.model.model).name.removesuffix(".gguf")
    return slug(f"{env}-{model}-{config.algo.algo.rpartition(':')[2]}")


def slug(text: str) -> str:
    """What can stand in the name of a file."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


def _check_numbers(config: RunConfig, group_size: int) -> None:
    total = config.rollouts.rollouts_per_update
    max_tokens, max_seq_len = config.agent.max_tokens or 1, config.trainer.max_seq_len
    if config.sampling.temperature == 0:
        raise ConfigError(
            "temperature = 0 always takes the likeliest token: all rollouts of a task are the same, and there is nothing to learn "
            "from. Give --temperature above 0, usually 1; --eval-temperature may be 0."
        )
    if total % group_size:
        below = total // group_size * group_size
        near = f"{below} or {below + group_size}" if below else str(group_size)
        raise ConfigError(
            f"rollouts_per_update = {total} is not a multiple of group_size = {group_size}: the last group would be incomplete. "
            f"Take {near}, or another group size."
        )
    if max_tokens >= max_seq_len:
        raise ConfigError(
            f"max_tokens = {max_tokens} leaves no room for a prompt in max_seq_len = {max_seq_len}. Raise --max-seq-len or lower "
            "--max-tokens."
        )
    schedule = config.trainer.lr_schedule
    if schedule is not None and schedule.kind != "constant" and schedule.warmup_steps >= config.train.steps:
        raise ConfigError(
            f"warmup_steps = {schedule.warmup_steps} leaves none of the {config.train.steps} steps after it."
        )


def _check_data(config: RunConfig, env: EnvFactory, parts: Parts) -> None:
    if parts.samples is None:
        check_data(env, config.env.data, config.env.set, "--data")
    has_questions = (
        config.eval.eval_data is not None or parts.eval_samples is not None or _has_task(env, config.env.set)
    )
    if config.is_evaluated and env.takes_sample and not has_questions:
        raise ConfigError(
            "Evaluation asks questions too: give --eval-data FILE.jsonl, best with samples that are not trained on (the file "
            "of --data works, and measures something else)."
        )


def _has_task(env: EnvFactory, arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments say what is asked: the sample, or what the env's example has instead, such as a folder of tasks."""
    return not arguments.keys().isdisjoint({"sample", *env.example})


def check_data(found: EnvFactory, data: Path | None, arguments: Mapping[str, Any], flag: str) -> None:
    """A file of samples is given exactly where the env asks about samples."""
    if data is None and found.takes_sample and not _has_task(found, arguments):
        raise ConfigError(
            f"The env {found.id!r} asks about samples; give {flag} FILE.jsonl with one JSON object per line"
            + (f" such as {dict(found.example)['sample']!r:.200}" if "sample" in found.example else "")
            + f", {flag} hub:NAME:SPLIT, or {flag} file.py:function, which generates them"
            + "".join(f", or --set {name}=…" for name in found.example if name != "sample")
            + "."
        )
    if data is not None and not found.takes_sample:
        raise ConfigError(f"{flag} {data} was given, but the env {found.id!r} has no argument `sample` to take it.")
