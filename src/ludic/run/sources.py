"""The batch source of a run that plays its own episodes: which tasks of which envs, against whom, and what is beside them.

Loads without torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic import registry
from ludic.agents import Agent
from ludic.batch_gen import (
    DynamicSampling,
    IdentityStrategy,
    OfflineBatchSource,
    RequestsFn,
    RequestStrategy,
    RolloutBatchSource,
    make_chat_template_step_to_item,
)
from ludic.batch_gen.requests.curriculum import Curriculum, TaskCurriculum
from ludic.batch_gen.requests.dataset import WeightedPart, WeightedRequests
from ludic.batch_gen.requests.roles import AssignedRequests
from ludic.batch_gen.requests.streams import StreamFunction, first_samples
from ludic.batch_gen.sources.mixed import MixedBatchSource, MixedPart, ReplayBatchSource
from ludic.batch_gen.sources.stragglers import Stragglers
from ludic.inference import ChatTemplate, HFChatTemplate
from ludic.interaction import Policies
from ludic.run.parts.algorithm import PLAYED, make_algorithm, recorded_algorithm
from ludic.run.parts.episodes import PROTOCOL, EpisodeSetup
from ludic.run.parts.requests import request_strategy, train_inference, train_requests
from ludic.run.parts.rewards import make_rewards
from ludic.run.parts.samples import env_arguments, first_env, train_samples, train_stream
from ludic.run.protocols.agents import agent_factory
from ludic.run.resolve import ResolvedRun
from ludic.types import (
    BatchSource,
    ChatClient,
    ConfigError,
    EnvSpec,
    FollowsDrift,
    ProtocolSpec,
    RolloutRequest,
    SampleFilter,
    SAWItem,
    UnknownName,
    derive_seed,
)

if TYPE_CHECKING:
    from ludic.inference.local import LocalEngine
    from ludic.inference.local.snapshot import League
    from ludic.training import RLAlgorithm

_TASK_SEEDS, _ENV_SEEDS, _RECORDED_SEEDS, _REPLAY_SEEDS = 103, 104, 105, 107
_NUM_TASKS = 1024
"""Seeds that a curriculum chooses from, for envs without samples, where `curriculum_set` has no num_tasks."""


def make_source(
    run: ResolvedRun,
    setup: EpisodeSetup,
    algorithm: RLAlgorithm,
    *,
    jsonl_path: Path | None,
    league: League | None = None,
    spans_by: ChatTemplate | None = None,
) -> BatchSource:
    """Fresh rollouts by the engine of this run, or the stored ones of the settings. `spans_by` finds the message of each token of
    stored ones that do not say it."""
    rollouts = run.config.rollouts
    if rollouts.rollouts:
        return OfflineBatchSource(
            rollouts.rollouts,
            algorithm=algorithm,
            batch_size=rollouts.rollouts_per_update,
            chunk_rollouts=max(64, rollouts.rollouts_per_update),
            group_size=run.group_size if run.group_size > 1 else None,
            sample_filter=make_filter(run),
            seed=run.seed,
            spans_by=spans_by,
        )
    curriculum = make_curriculum(run, algorithm)
    requests: RequestsFn | None = None
    strategy: RequestStrategy = request_strategy(run, run.seed)
    if run.envs:
        requests, strategy = _requests_of_several(run, setup), IdentityStrategy()
    elif league is not None:
        requests = seated_requests(run, setup, _league_seatings(run))
    elif curriculum is None:
        requests = train_requests(run, setup)
    return RolloutBatchSource(
        setup.engine(jsonl_path=jsonl_path, seed=run.seed, max_failed_share=rollouts.max_failed_share),
        requests_fn=requests,
        curriculum=curriculum,
        strategy=strategy,
        algorithm=algorithm,
        max_steps=run.max_steps,
        concurrency=rollouts.concurrency or setup.concurrency,
        sample_filter=make_filter(run),
        dynamic_sampling=DynamicSampling(max_rounds=rollouts.dynamic_sampling, by_component=algorithm.name == "gdpo")
        if rollouts.dynamic_sampling
        else None,
        stragglers=_stragglers(run),
        policy=None if league is None else _CURRENT,
        followers=() if league is None else (league,),
    )


def _stragglers(run: ResolvedRun) -> Stragglers | None:
    """A group is carried into as many batches as make `max_lag` versions."""
    close_at = run.config.rollouts.close_batch_at
    carries = run.max_lag // run.trainer.steps_per_batch
    return Stragglers(close_at=close_at, max_carries=carries) if close_at < 1 else None


def _requests_of_several(run: ResolvedRun, setup: EpisodeSetup) -> WeightedRequests:
    """Groups of all envs in proportion to their shares; each request says which env it is of."""
    parts = []
    for index, (env, own) in enumerate(zip(run.envs, (setup, *setup.beside), strict=True)):
        seed = derive_seed(run.seed, _ENV_SEEDS, index)
        facts = {"domain": env.name} | ({"objective": env.name} if run.has_own_algorithms else {})
        requests_fn = train_requests(env.run, own, seed, num_groups=1)
        parts.append(
            WeightedPart(
                requests_fn=requests_fn, weight=env.share, strategy=request_strategy(env.run, seed), facts=facts
            )
        )
    return WeightedRequests(parts, num_episodes=run.config.rollouts.rollouts_per_update)


def with_recorded(run: ResolvedRun, source: BatchSource, tokenizer: Any) -> BatchSource:
    """The source, and the recorded rollouts of the settings beside it."""
    if not run.config.recorded:
        return source
    parts = [MixedPart(name=PLAYED, source=source, share=1.0)]
    for index, entry in enumerate(run.config.recorded):
        algorithm = recorded_algorithm(entry)
        offline = OfflineBatchSource(
            entry.files,
            make_chat_template_step_to_item(tokenizer, with_spans=algorithm.needs_message_spans)
            if entry.render
            else None,
            algorithm=algorithm,
            seed=derive_seed(run.seed, _RECORDED_SEEDS, index),
            spans_by=HFChatTemplate(tokenizer) if algorithm.needs_message_spans else None,
        )
        parts.append(MixedPart(name=entry.name, source=offline, share=entry.share, objective=entry.name))
    return MixedBatchSource(parts)


def with_replay(run: ResolvedRun, source: BatchSource) -> BatchSource:
    """The source, and samples of its earlier batches beside the new ones, if the settings ask for them."""
    settings = run.config.replay
    if not settings.replay:
        return source
    return ReplayBatchSource(
        source,
        capacity=settings.replay_capacity,
        num_replayed=settings.replay,
        max_lag=settings.replay_max_lag,
        half_life=settings.replay_half_life,
        fresh_every=settings.replay_fresh_every,
        seed=derive_seed(run.seed, _REPLAY_SEEDS),
    )


def check_source(run: ResolvedRun) -> None:
    """ConfigError for rewards, filters, a curriculum or a reference that cannot work, before weights are loaded."""
    make_rewards(run.config.reward, run.config.agent, run.parts)
    run.config.reward.check_siblings(run.group_size, "--group-size")
    algorithm = make_algorithm(run)
    make_filter(run)
    make_curriculum(run, algorithm)
    _check_stored(run)
    for entry in run.config.recorded:
        entry.files  # noqa: B018 - raises
    if run.envs and isinstance(algorithm.credit_assigner, FollowsDrift):
        raise ConfigError(
            f"algo = {run.config.algo.algo!r} tracks single prompts, which only one env can number. Take grpo."
        )
    if run.config.league.league_every:
        _roles(run)
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
        "close_batch_at": rollouts.close_batch_at < 1,
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
    takes = inspect.signature(factory).parameters
    takes_stream = "stream" in takes
    if takes_stream:
        arguments |= {"stream": _required_stream(run, settings.curriculum), "build": partial(_task, run)}
    else:
        arguments["tasks"] = _tasks(run, arguments.pop("num_tasks", None))
    arguments |= {"batch_size": run.num_groups, "seed": derive_seed(run.seed, _TASK_SEEDS)}
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
    if not callable(getattr(made, "next_requests", None)) or not callable(getattr(made, "observe", None)):
        raise ConfigError(
            f"curriculum = {settings.curriculum!r} makes a {type(made).__name__}; it must have next_requests() and "
            "observe(rollouts), as the classes of ludic.batch_gen.requests.curriculum have."
        )
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
        env_seed=derive_seed(run.seed, _TASK_SEEDS, index),
        meta={"sample_index": index},
    )


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


# --- leagues ---------------------------------------------------------------------------------------------------

_CURRENT, _LEAGUE = "policy", "league"
_MEMBER_SEQUENCES = 64
"""Sequences of full length that fit a member's cache."""


def make_league(run: ResolvedRun, engine: LocalEngine) -> League | None:
    """Snapshots of the engine's weights, if the settings ask for a league."""
    from ludic.inference.local.snapshot import League

    settings = run.config.league
    if not settings.league_every:
        return None
    kv_tokens = _MEMBER_SEQUENCES * run.trainer.max_seq_len
    return League(engine, every=settings.league_every, max_size=settings.league_size, kv_tokens=kv_tokens)


def with_league(run: ResolvedRun, setup: EpisodeSetup, league: League, template: ChatTemplate) -> EpisodeSetup:
    """The setup, whose requests may seat members of the league."""

    def make_agent(client: ChatClient, name: str) -> Agent:
        return agent_factory(run.config.agent, template, name, run.parts)(client)

    return replace(setup, policies=Policies({_CURRENT: setup.client, _LEAGUE: league}, make_agent))


def _league_seatings(run: ResolvedRun) -> list[dict[str, str]]:
    """In the league's share of the groups the policy has one role, in turn, and a member has the others; in the rest it has all."""
    roles = _roles(run)
    share = Fraction(run.config.league.league_share).limit_denominator(100)
    against = [{role: _CURRENT if role == own else _LEAGUE for role in roles} for own in roles]
    alone = [dict.fromkeys(roles, _CURRENT)] * len(roles)
    return against * share.numerator + alone * (share.denominator - share.numerator)


def seated_requests(run: ResolvedRun, setup: EpisodeSetup, seatings: Sequence[Mapping[str, str]]) -> AssignedRequests:
    """The tasks of one update, each with one of the seatings; of several policies each that learns has at least one."""
    assert setup.policies is not None, "the setup has the policies that the seatings name"
    requests = train_requests(run, setup)
    if train_samples(run) is None and train_stream(run) is None:  # roles are drawn by a request's seed, so it needs one
        requests = SeededRequests(run, setup)
    return AssignedRequests(requests, seatings, setup.policies, seed=run.seed, always=run.trained_names)


class SeededRequests:
    """The tasks of one update, each with the next seed."""

    def __init__(self, run: ResolvedRun, setup: EpisodeSetup) -> None:
        self._run, self._setup = run, setup
        self._inference = train_inference(run)
        self._num_drawn = 0

    def __call__(self) -> list[RolloutRequest]:
        first, self._num_drawn = self._num_drawn, self._num_drawn + self._run.num_groups
        seeds = (derive_seed(self._run.seed, _TASK_SEEDS, number) for number in range(first, self._num_drawn))
        return [self._setup.request(self._inference, env_seed=seed) for seed in seeds]

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self._num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_drawn = state["num_drawn"]


def _roles(run: ResolvedRun) -> tuple[str, ...]:
    roles = tuple(first_env(run).agent_ids)
    if len(roles) < 2:
        raise ConfigError(
            f"league_every is for envs with several players; {run.config.env.id!r} has one. Leave [league] out."
        )
    return roles
