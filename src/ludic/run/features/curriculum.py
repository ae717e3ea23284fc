"""Curricula: what chooses the next tasks of a run (setting `curriculum`)."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ludic import registry
from ludic.batch_gen.requests.curriculum import Curriculum, TaskCurriculum
from ludic.batch_gen.requests.streams import StreamFunction, first_samples
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Feature
from ludic.run.given import Parts
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import PROTOCOL
from ludic.run.parts.requests import train_inference
from ludic.run.parts.samples import env_arguments, first_env, train_samples, train_stream
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import require_kind
from ludic.seeds import BatchSeeds
from ludic.types import ConfigError, EnvSpec, ProtocolSpec, RolloutRequest, UnknownName, derive_seed

if TYPE_CHECKING:
    from ludic.training import RLAlgorithm

_NUM_TASKS = 1024
"""Seeds that a curriculum chooses from, for envs without samples, where `curriculum_set` has no num_tasks."""


class HasCurriculum(Feature):
    """Tasks are chosen by how episodes went, instead of in random order."""

    name = "curriculum"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.rollouts.curriculum is not None

    def check(self, run: ResolvedRun) -> None:
        make_curriculum(run, make_algorithm(run))

    def says(self, run: ResolvedRun) -> list[str]:
        return [f"The curriculum {run.config.rollouts.curriculum} chooses the tasks."]


def make_curriculum(run: ResolvedRun, algorithm: "RLAlgorithm") -> Curriculum | None:
    """The curriculum of the settings over the run's tasks; None if there is none."""
    settings = run.config.rollouts
    if settings.curriculum is None:
        return None
    arguments: dict[str, Any] = dict(settings.curriculum_set)
    factory = registry.curricula.spec(settings.curriculum).load()
    takes = inspect.signature(factory).parameters
    takes_stream = "stream" in takes
    if takes_stream:
        arguments |= {"stream": _required_stream(run, settings.curriculum), "build": partial(_task, run)}
    else:
        arguments["tasks"] = _tasks(run, arguments.pop("num_tasks", None))
    arguments |= {"batch_size": run.num_groups, "seed": derive_seed(run.seed, BatchSeeds.TASKS)}
    if "success_at" in takes or (isinstance(factory, type) and issubclass(factory, TaskCurriculum)):
        full = first_env(run).full_reward
        arguments.setdefault("success_at", 1.0 if full is None else full)
    if isinstance(arguments.get("difficulty"), str):
        arguments["difficulty"] = _difficulty(arguments["difficulty"])
    if isinstance(factory, type) and issubclass(factory, TaskCurriculum):
        for (
            name
        ) in settings.curriculum_set:  # a subclass passes what it does not know on, so its own signature takes all
            known = {
                n: None for cls in factory.__mro__[:-1] for n in inspect.signature(cls).parameters if n != "settings"
            }
            if name not in known and name != "num_tasks":
                raise UnknownName.among(f"argument of the curriculum {settings.curriculum}", name, known)
    if "values" in takes:
        arguments.setdefault("values", _values_of(algorithm, settings.curriculum))
    made = registry.curricula.make(settings.curriculum, **arguments)
    must = "have next_requests() and observe(rollouts), as the classes of ludic.batch_gen.requests.curriculum have"
    require_kind(made, ("next_requests", "observe"), f"curriculum = {settings.curriculum!r}", must)
    found: Curriculum = made
    return found


def _required_stream(run: ResolvedRun, curriculum: str) -> StreamFunction:
    stream = train_stream(run)
    if stream is None:
        raise ConfigError(
            f"curriculum = {curriculum!r} draws from a function of seed and difficulty: give --data file.py:function "
            "(docs/task-streams.md). For samples of a file take easiest_first."
        )
    return stream


def _tasks(run: ResolvedRun, num_tasks: int | None) -> list[RolloutRequest]:
    """One request per sample; for envs without samples one per seed."""
    samples, stream = train_samples(run), train_stream(run)
    if stream is not None:
        samples = first_samples(stream, num_tasks or _NUM_TASKS, seed=run.seed)
    elif samples is not None and num_tasks is not None:
        raise ConfigError(
            f"num_tasks = {num_tasks} is for envs without samples and for streams; here the {len(samples)} samples are the tasks."
        )
    seeds = range(_NUM_TASKS if num_tasks is None else num_tasks)
    tasks = [(index, None) for index in seeds] if samples is None else list(enumerate(samples))
    return [_task(run, index, sample) for index, sample in tasks]


def _task(run: ResolvedRun, index: int, sample: Any) -> RolloutRequest:
    return RolloutRequest(
        env=EnvSpec(run.config.env.id, env_arguments(run.config.env, sample)),
        protocol=ProtocolSpec(PROTOCOL),
        inference=train_inference(run),
        env_seed=derive_seed(run.seed, BatchSeeds.TASKS, index),
        meta={"sample_index": index},
    )


def _difficulty(name: str) -> Callable[[RolloutRequest], float]:
    """The user's function, or a number in each sample (or in the env's arguments)."""
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


def _values_of(algorithm: "RLAlgorithm", curriculum: str) -> Any:
    """The tracker of an algorithm that tracks its prompts."""
    tracker = getattr(algorithm.credit_assigner, "tracker", None)
    if tracker is None:
        raise ConfigError(
            f"curriculum = {curriculum!r} draws by the success that the algorithm tracks, but {algorithm.name} tracks none. Take "
            "--algo spo, or --curriculum success_band, which tracks its own."
        )
    return tracker
