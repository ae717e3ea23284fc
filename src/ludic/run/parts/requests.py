"""The tasks of an update, as requests to the rollout engine, and how many episodes each of them has."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ludic.batch_gen import (
    GRPORequestStrategy,
    IdentityStrategy,
    RequestsFn,
    RequestStrategy,
    make_dataset_sequence_requests_fn,
)
from ludic.batch_gen.requests.dataset import RequestBuilder
from ludic.batch_gen.requests.groups import AssignedRequests
from ludic.batch_gen.requests.streams import SampleStream, StreamRequests
from ludic.run.parts.episodes import EpisodeSetup
from ludic.run.parts.samples import env_arguments, train_samples, train_stream
from ludic.run.resolve import ResolvedRun
from ludic.types import InferenceSpec, ReturnSpec, RolloutRequest, derive_seed

TASK_SEEDS = 103
"""Stream of the seeds of single tasks."""


def train_inference(run: ResolvedRun) -> InferenceSpec:
    """How the policy that is trained is sampled from."""
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
        seeds = (derive_seed(self._run.seed, TASK_SEEDS, number) for number in range(first, self._num_drawn))
        return [self._setup.request(self._inference, env_seed=seed) for seed in seeds]

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self._num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_drawn = state["num_drawn"]
