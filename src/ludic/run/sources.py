"""The batch source of a run that plays its own episodes: which tasks, which of their samples.

Loads without torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic import registry
from ludic.batch_gen import DynamicSampling, OfflineBatchSource, RolloutBatchSource
from ludic.batch_gen.requests.curriculum import Curriculum, TaskCurriculum
from ludic.run.parts import (
    PROTOCOL,
    EpisodeSetup,
    env_arguments,
    make_algorithm,
    make_rewards,
    request_strategy,
    train_requests,
    train_samples,
)
from ludic.run.resolve import ResolvedRun
from ludic.types import (
    BatchSource,
    ConfigError,
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SampleFilter,
    SAWItem,
    UnknownName,
    derive_seed,
)

if TYPE_CHECKING:
    from ludic.training import RLAlgorithm

_TASK_SEEDS = 103
_NUM_TASKS = 1024
"""Seeds that a curriculum chooses from, for envs without samples, where `curriculum_set` has no num_tasks."""


def make_source(
    run: ResolvedRun, setup: EpisodeSetup, algorithm: RLAlgorithm, *, jsonl_path: Path | None
) -> BatchSource:
    """Fresh rollouts by the engine of this run, or the stored ones of the settings."""
    rollouts = run.config.rollouts
    if rollouts.rollouts:
        return OfflineBatchSource(
            rollouts.rollouts,
            algorithm=algorithm,
            batch_size=rollouts.rollouts_per_update,
            chunk_rollouts=max(64, rollouts.rollouts_per_update),
            sample_filter=make_filter(run),
            seed=run.seed,
        )
    curriculum = make_curriculum(run, algorithm)
    return RolloutBatchSource(
        setup.engine(jsonl_path=jsonl_path, seed=run.seed, max_failed_share=rollouts.max_failed_share),
        requests_fn=train_requests(run, setup) if curriculum is None else None,
        curriculum=curriculum,
        strategy=request_strategy(run, run.seed),
        algorithm=algorithm,
        max_steps=run.max_steps,
        concurrency=rollouts.concurrency or setup.concurrency,
        sample_filter=make_filter(run),
        dynamic_sampling=DynamicSampling(max_rounds=rollouts.dynamic_sampling) if rollouts.dynamic_sampling else None,
    )


def check_source(run: ResolvedRun) -> None:
    """ConfigError for rewards, filters, a curriculum or a reference that cannot work, before weights are loaded."""
    make_rewards(run.config.reward, run.config.agent, run.parts)
    algorithm = make_algorithm(run)
    make_filter(run)
    make_curriculum(run, algorithm)
    _check_stored(run)
    reference = run.config.algo.reference
    if reference is not None and not algorithm.loss.needs.reference:
        raise ConfigError(
            f"reference = {reference!r} is what kl_coeff holds the policy near; give --kl-coeff, such as 0.01."
        )


def _check_stored(run: ResolvedRun) -> None:
    """ConfigError for stored rollouts beside settings that are about playing."""
    rollouts = run.config.rollouts
    if not rollouts.rollouts:
        return
    for path in rollouts.rollouts:
        if not path.is_file():
            raise ConfigError(
                f"rollouts = {path}: there is no such file. `ludic rescore` writes one, and runs into rollouts/."
            )
    playing = {
        "engine = 'pipeline'": run.config.is_pipeline,
        "max_lag": run.max_lag,
        "dynamic_sampling": rollouts.dynamic_sampling,
        "curriculum": rollouts.curriculum,
    }
    if given := [name for name, value in playing.items() if value]:
        raise ConfigError(
            f"rollouts = … trains on stored episodes, and {given[0]} is about playing new ones. Leave one out."
        )


def make_filter(run: ResolvedRun) -> SampleFilter | None:
    """Keeps what every filter of the settings keeps; None if there is none."""
    filters: list[SampleFilter] = [registry.filters.make(name) for name in run.config.algo.filter]

    def keeps(item: SAWItem) -> bool:
        return all(each(item) for each in filters)

    return keeps if filters else None


# --- curricula -------------------------------------------------------------------------------------------------


def make_curriculum(run: ResolvedRun, algorithm: RLAlgorithm) -> Curriculum | None:
    """The curriculum of the settings over the run's tasks; None if there is none."""
    settings = run.config.rollouts
    if settings.curriculum is None:
        return None
    arguments: dict[str, Any] = dict(settings.curriculum_set)
    factory = registry.curricula.spec(settings.curriculum).load()
    tasks = _tasks(run, arguments.pop("num_tasks", None))
    arguments |= {"tasks": tasks, "batch_size": run.num_groups, "seed": derive_seed(run.seed, _TASK_SEEDS)}
    if isinstance(arguments.get("difficulty"), str):
        arguments["difficulty"] = _difficulty(arguments["difficulty"])
    if isinstance(factory, type) and issubclass(factory, TaskCurriculum):
        full = run.env.make(env_arguments(run.config.env, _first_sample(run))).full_reward
        arguments.setdefault("success_at", 1.0 if full is None else full)
        for (
            name
        ) in settings.curriculum_set:  # a subclass passes what it does not know on, so its own signature takes all
            known = {
                n: None for cls in factory.__mro__[:-1] for n in inspect.signature(cls).parameters if n != "settings"
            }
            if name not in known and name != "num_tasks":
                raise UnknownName.among(f"argument of the curriculum {settings.curriculum}", name, known)
    if "values" in inspect.signature(factory).parameters:
        arguments.setdefault("values", _values_of(algorithm, settings.curriculum))
    made = registry.curricula.make(settings.curriculum, **arguments)
    if not callable(getattr(made, "next_requests", None)) or not callable(getattr(made, "observe", None)):
        raise ConfigError(
            f"curriculum = {settings.curriculum!r} makes a {type(made).__name__}; it must have next_requests() and "
            "observe(rollouts), as the classes of ludic.batch_gen.requests.curriculum have."
        )
    found: Curriculum = made
    return found


def _tasks(run: ResolvedRun, num_tasks: int | None) -> list[RolloutRequest]:
    """One request per sample; for envs without samples one per seed."""
    inference = InferenceSpec(sampling=run.sampling, return_=ReturnSpec.for_rl())
    samples = train_samples(run)
    if samples is not None and num_tasks is not None:
        raise ConfigError(
            f"num_tasks = {num_tasks} is for envs without samples; here the {len(samples)} samples are the tasks."
        )
    seeds = range(_NUM_TASKS if num_tasks is None else num_tasks)
    tasks = [(index, None) for index in seeds] if samples is None else list(enumerate(samples))
    return [
        RolloutRequest(
            env=EnvSpec(run.config.env.id, env_arguments(run.config.env, sample)),
            protocol=ProtocolSpec(PROTOCOL),
            inference=inference,
            env_seed=derive_seed(run.seed, _TASK_SEEDS, index),
            meta={"sample_index": index},
        )
        for index, sample in tasks
    ]


def _first_sample(run: ResolvedRun) -> Any:
    samples = train_samples(run)
    return None if samples is None else samples[0]


def _difficulty(name: str) -> Callable[[RolloutRequest], float]:
    """By the user's function, or by a number in each sample (or in the env's arguments)."""
    if ":" in name:
        own: Callable[[RolloutRequest], float] = registry.curricula.spec(name).load()
        return own
    return partial(_number_in, name)


def _number_in(name: str, request: RolloutRequest) -> float:
    arguments = dict(request.env.kwargs)
    sample = arguments.get("sample", arguments)
    value = sample.get(name) if isinstance(sample, dict) else None
    if not isinstance(value, (int, float)):
        raise ConfigError(
            f"difficulty = {name!r} names a number of each sample, but a sample has {value!r} there: {sample!r:.200}. Name another "
            "key, or a function file.py:name of a request."
        )
    return float(value)


def _values_of(algorithm: RLAlgorithm, curriculum: str) -> Any:
    """What an algorithm that tracks its prompts knows of them."""
    tracker = getattr(algorithm.credit_assigner, "tracker", None)
    if tracker is None:
        raise ConfigError(
            f"curriculum = {curriculum!r} draws by the success that the algorithm tracks, but {algorithm.name} tracks none. Take "
            "--algo spo, or --curriculum success_band, which tracks its own."
        )
    return tracker
