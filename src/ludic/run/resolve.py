"""`resolve` makes a `ResolvedRun` of settings as written: it fills in every default, and has everything checked that needs no
weights."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ludic import registry
from ludic.catalog import Suggested
from ludic.run.checks import logger_problems, number_problems, stored_problems, task_problems
from ludic.run.config.entries import EnvEntry, PolicyEntry
from ludic.run.config.run_config import RunConfig
from ludic.run.config.training import AlgoSettings, Averaging
from ludic.run.features.base import engine_of
from ludic.run.given import EnvFactory, Parts, check_data, env_factory, has_task
from ludic.run.names import CHECKPOINTS
from ludic.run.settings import refuse, values_of, with_values
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.types import ConfigError, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _NamedEnv:
    """One of several envs of a run."""

    name: str
    share: float
    """Share of the episodes."""
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
    sampling: SamplingParams
    """For training; `eval_sampling` for evaluation."""
    eval_sampling: SamplingParams
    trainer: TrainerConfig
    checkpoint: CheckpointConfig
    envs: tuple[_NamedEnv, ...] = ()
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
        """Names of the policies that learn, of several; empty for a run with one."""
        return tuple(policy.name for policy in self.policies if not policy.is_frozen)

    @property
    def has_own_algorithms(self) -> bool:
        """True if an env of several has another algorithm than the others."""
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
        """The number of updates, unless a batch takes several."""
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
    parts, config = parts or Parts(), with_values(config, config.train.limits)
    if config.envs:
        return _resolve_several(config, parts)
    refuse(chain(stored_problems(config, parts), logger_problems(config.run.logger)))
    size, name, lag = _group_size(config.algo, parts), config.run.name or default_name(config), config.rollouts.max_lag
    max_lag = _usual_lag(config) if lag is None else lag
    values: dict[str, Any] = {
        "group_size": size,
        "reduction": None if parts.algorithm is not None else open_reduction(config.algo),
        "correction": _corrections(config, max_lag, parts),
        "name": name,
        "max_lag": max_lag,
    }
    values |= engine_of(config).filled(config, name, size)
    filled = with_values(resolve_play(config, env.suggested), values)
    refuse(chain(number_problems(filled, size), task_problems(filled, size), _data_problems(filled, env, parts)))
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
        sampling=replace(config.sampling, max_tokens=max_tokens),
        eval_sampling=SamplingParams(temperature=config.eval.eval_temperature, max_tokens=max_tokens),
        trainer=_trainer_config(filled, max_lag, max_steps),
        checkpoint=replace(config.checkpoint, output_dir=folder / CHECKPOINTS),
    )


def _usual_lag(config: RunConfig) -> int:
    """In versions; every batch makes `steps_per_batch` of them."""
    batches = engine_of(config).batches_behind or int(config.rollouts.close_batch_at < 1)
    return batches * config.trainer.steps_per_batch


def _resolve_several(config: RunConfig, parts: Parts) -> ResolvedRun:
    """Every env as a run with that env alone; the whole has the largest of their limits."""
    name = config.run.name or default_name(config)
    alone = replace(config, envs=(), recorded=(), run=replace(config.run, name=name))
    total = sum(entry.weight for entry in config.envs)
    envs = tuple(
        _NamedEnv(name=entry.label, share=entry.weight / total, run=_alone(alone, entry, parts))
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


def _alone(config: RunConfig, entry: EnvEntry, parts: Parts) -> ResolvedRun:
    """The run with this env alone."""
    own = with_entry(config, entry, name=config.run.name, set=entry.set, data=entry.data)
    return resolve(own, env_factory(entry.id, server=config.env.env_server), parts)


def with_entry(config: RunConfig, entry: EnvEntry | PolicyEntry, **values: Any) -> RunConfig:
    """The settings of a run with this env, or this policy, alone. A part that an entry names comes with the entry's arguments."""
    before = values_of(config)
    own = {name: value for name, value in vars(entry).items() if name in before and value not in (None, (), {})}
    for part in ("agent", "parser", "protocol", "algo"):
        arguments = f"{part}_set"
        if part in own:
            own[arguments] = getattr(entry, arguments)
        elif arguments in own:
            own[arguments] = {**before[arguments], **own[arguments]}
    return with_values(config, own | values)


def _trainer_config(config: RunConfig, max_lag: int, max_steps: int) -> TrainerConfig:
    trainer, schedule = config.trainer, config.trainer.lr_schedule
    end = config.train.steps if schedule is None else max(config.train.steps, schedule.warmup_steps + 1)
    return replace(
        trainer,
        lr_schedule=None if schedule is None else replace(schedule, total_steps=end),
        # Where others play, the source drops samples that are too old, by whole groups; the trainer would drop single ones.
        max_lag=max_lag or None if engine_of(config).plays_here else None,
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


def _group_size(algo: AlgoSettings, parts: Parts) -> int:
    if algo.group_size is not None:
        return algo.group_size
    if parts.algorithm is not None:
        return int(getattr(parts.algorithm.credit_assigner, "group_size", None) or 1)
    from ludic.training.algorithms import settings_of

    factory = registry.algorithms.spec(algo.algo).load()
    is_yours = ":" in algo.algo  # whether it compares is not known
    return 8 if is_yours or "group_size" in settings_of(factory) else 1


def open_reduction(algo: AlgoSettings) -> Averaging | None:
    """A token mean where the algorithm leaves it open: a sum grows with replies, and max_grad_norm would cut every step.

    Within a batch the two differ by one factor, so the direction stays that of the sum.
    """
    from ludic.training.algorithms import settings_of

    settings = settings_of(registry.algorithms.spec(algo.algo).load())
    is_open = "reduction" in settings and settings["reduction"] is None
    if algo.reduction is not None:
        takes_it = "reduction" in settings and algo.reduction in (settings["reduction"], "episode_mean")
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


def is_masked_when_old(algo: str) -> bool:
    """True for a preset that loses reward on old samples, and holds it with NEGATIVE_MASK."""
    return getattr(registry.algorithms.spec(algo).load(), "masked_when_old", False)


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
    needs_it = is_named and is_old and engine_of(config).corrects_lag(config) and is_masked_when_old(config.algo.algo)
    default = (NEGATIVE_MASK,) if needs_it else ()
    return tuple(c for text in given if text != "none" for c in (default if text == "auto" else (text,)))


def default_name(config: RunConfig) -> str:
    """Env, model and algorithm, as far as they can stand in the name of a folder."""
    env = "+".join(id.rpartition(":")[2].rpartition("/")[2] for id in config.env_ids)
    if config.stored is not None:
        env = env or config.stored.stem
    if config.policies:
        return slug(f"{env}-{'+'.join(config.policies)}")
    model = Path(config.model.model).name.removesuffix(".gguf")
    return slug(f"{env}-{model}-{config.algo.algo.rpartition(':')[2]}")


def slug(text: str) -> str:
    """The text as the name of a file."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


def _data_problems(config: RunConfig, env: EnvFactory, parts: Parts) -> Iterator[str]:
    if env.id and not env.takes_sample and config.stored is not None and config.stored == config.env.data:
        yield (
            f"algo = 'sft' learns the answers of {config.stored}, and {env.id!r} asks no questions: leave TARGET out, or name "
            "an env that asks questions."
        )
    if parts.samples is None and (config.env.id or config.stored is None):
        check_data(env, config.env.data, config.env.set, "--data")
    has_questions = config.eval.eval_data is not None or parts.eval_samples is not None or has_task(env, config.env.set)
    if config.is_evaluated and env.takes_sample and not has_questions:
        yield (
            "Evaluation asks questions too: give --eval-data FILE.jsonl, best with samples that are not trained on (the file "
            "of --data works, and measures something else)."
        )
