"""The tasks of an update, as requests to the rollout engine, and how many episodes each of them has."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import fmean
from typing import Any

from ludic.batch_gen import (
    GRPORequestStrategy,
    IdentityStrategy,
    RequestsFn,
    RequestStrategy,
    make_dataset_sequence_requests_fn,
)
from ludic.batch_gen.requests.dataset import RequestBuilder
from ludic.batch_gen.requests.groups import AssignedRequests, assign_roles
from ludic.batch_gen.requests.streams import SampleStream, StreamRequests
from ludic.eval import EngineEvaluator, Grading, PolicyEvaluator
from ludic.run.parts.episodes import EpisodeSetup
from ludic.run.parts.samples import env_arguments, eval_samples, train_samples, train_stream
from ludic.run.resolve import ResolvedRun
from ludic.seeds import BatchSeeds
from ludic.types import InferenceSpec, ReturnSpec, Rollout, RolloutRequest, derive_seed


def train_inference(run: ResolvedRun) -> InferenceSpec:
    """The sampling of the policy that is trained."""
    algo = run.config.algo
    return InferenceSpec(
        sampling=run.sampling,
        return_=ReturnSpec.for_rl(),
        message_spans=bool(algo.train_on or algo.algo_set.get("train_on")),
    )


def train_requests(
    run: ResolvedRun, setup: EpisodeSetup, seed: int | None = None, num_groups: int | None = None
) -> RequestsFn:
    """The tasks of one update: the next samples of the data, or new seeds (which strategy and engine give out)."""
    num_groups = run.num_groups if num_groups is None else num_groups
    inference = train_inference(run)
    seed = run.seed if seed is None else seed
    samples, stream = train_samples(run), train_stream(run)
    if stream is not None:
        builder = RequestBuilder(
            env_kind=run.config.env.id,
            protocol_kind=setup.protocol,
            inference=inference,
            env_kwargs_fn=partial(env_arguments, run.config.env),
        )
        return StreamRequests(SampleStream(stream, seed=seed), builder, batch_size=num_groups, rng_seed=seed)
    if samples is None:
        return lambda: [setup.request(inference)] * num_groups
    return make_dataset_sequence_requests_fn(
        samples,
        batch_size=num_groups,
        env_kind=run.config.env.id,
        protocol_kind=setup.protocol,
        inference=inference,
        env_kwargs_fn=partial(env_arguments, run.config.env),
        shuffle=True,
        rng_seed=seed,
    )


def request_strategy(run: ResolvedRun, seed: int) -> RequestStrategy:
    return GRPORequestStrategy(run.group_size, seed=seed) if run.group_size > 1 else IdentityStrategy()


def seated_requests(run: ResolvedRun, setup: EpisodeSetup, seatings: Sequence[Mapping[str, str]]) -> AssignedRequests:
    """The tasks of one update, each with one of the seatings; of several policies each that learns has at least one."""
    assert setup.policies is not None, "the setup has the policies that the seatings name"
    requests = train_requests(run, setup)
    if train_samples(run) is None and train_stream(run) is None:  # roles are drawn by a request's seed, so it needs one
        requests = _SeededRequests(run, setup)
    return AssignedRequests(requests, seatings, setup.policies, seed=run.seed, always=run.trained_names)


class _SeededRequests:
    """The tasks of one update, each with the next seed."""

    def __init__(self, run: ResolvedRun, setup: EpisodeSetup) -> None:
        self._run, self._setup = run, setup
        self._inference = train_inference(run)
        self._num_drawn = 0

    def __call__(self) -> list[RolloutRequest]:
        first, self._num_drawn = self._num_drawn, self._num_drawn + self._run.num_groups
        seeds = (derive_seed(self._run.seed, BatchSeeds.TASKS, number) for number in range(first, self._num_drawn))
        return [self._setup.request(self._inference, env_seed=seed) for seed in seeds]

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self._num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_drawn = state["num_drawn"]


def fixed_requests(
    setup: EpisodeSetup,
    num_episodes: int,
    inference: InferenceSpec,
    *,
    samples: Sequence[Any] | None = None,
    seed: int = 0,
) -> list[RolloutRequest]:
    """The same tasks every time: the first samples, or seeds that training does not use."""
    tasks = [None] * num_episodes if samples is None else samples[:num_episodes]
    return [
        setup.request(
            inference,
            sample,
            env_seed=derive_seed(seed, BatchSeeds.EVAL_ENV, index),
            sampling_seed=derive_seed(seed, BatchSeeds.EVAL_SAMPLING, index),
            meta={"sample_index": index},
        )
        for index, sample in enumerate(tasks)
    ]


def eval_requests(run: ResolvedRun, setup: EpisodeSetup) -> list[RolloutRequest]:
    """The tasks of an evaluation, the same at every one; those of several policies with their seats in turn."""
    inference, settings = InferenceSpec(sampling=run.eval_sampling, return_=ReturnSpec.for_eval()), run.config.eval
    requests = fixed_requests(setup, settings.eval_episodes, inference, samples=eval_samples(run), seed=run.seed)
    requests = [replace(request, num_episodes=settings.eval_pass_k) for request in requests]
    return [assign_roles(*task) for task in zip(requests, cycle(run.seatings))] if run.seatings else requests


async def play(run: ResolvedRun, setup: EpisodeSetup) -> list[Rollout]:
    """Play the tasks of an evaluation."""
    engine = setup.engine(seed=run.seed, max_failed_share=run.config.rollouts.max_failed_share)
    concurrency = run.trainer.eval_concurrency or setup.concurrency
    return await engine.generate_rollouts(eval_requests(run, setup), max_steps=run.max_steps, concurrency=concurrency)


class EnvsEvaluator:
    """Evaluates the envs of a run one after the other; metrics are under their names, and the mean over envs."""

    def __init__(self, evaluators: Mapping[str, EngineEvaluator]) -> None:
        self._evaluators = evaluators

    async def eval(self, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        records: list[dict[str, Any]] = []
        found: dict[str, dict[str, float]] = {}
        for name, evaluator in self._evaluators.items():
            more, metrics = await evaluator.eval(**settings)
            records += more
            found[name] = {key.removeprefix("eval/"): value for key, value in metrics.items()}
        named = {f"{name}/{key}": value for name, own in found.items() for key, value in own.items()}
        shared = [key for key in ("mean_reward", "accuracy") if all(own.get(key) is not None for own in found.values())]
        return records, named | {key: fmean(own[key] for own in found.values()) for key in shared}


def make_evaluator(run: ResolvedRun, setup: EpisodeSetup) -> EngineEvaluator:
    """Evaluates one env; several policies by policy and by role."""
    samples, requests = eval_samples(run), eval_requests(run, setup)
    env = run.env.make(env_arguments(run.config.env, None if samples is None else samples[0]))
    limit = run.config.rollouts.max_failed_share
    return (PolicyEvaluator if run.policies else EngineEvaluator)(
        setup.engine(seed=run.seed, max_failed_share=limit, max_unscored_share=limit, purpose="evaluating"),
        requests_fn=lambda: requests,
        max_steps=run.max_steps,
        timeout_s=run.trainer.eval_timeout_s,
        concurrency=run.trainer.eval_concurrency or setup.concurrency,
        grading=Grading(success_reward=env.full_reward),
    )
