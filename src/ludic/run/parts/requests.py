"""The tasks of an update, as requests to the rollout engine, and how many episodes each of them has."""

from functools import partial

from ludic.batch_gen import (
    GRPORequestStrategy,
    IdentityStrategy,
    RequestsFn,
    RequestStrategy,
    make_dataset_sequence_requests_fn,
)
from ludic.batch_gen.requests.dataset import RequestBuilder
from ludic.batch_gen.requests.streams import SampleStream, StreamRequests
from ludic.run.parts.episodes import EpisodeSetup
from ludic.run.parts.samples import env_arguments, train_samples, train_stream
from ludic.run.resolve import ResolvedRun
from ludic.types import InferenceSpec, ReturnSpec


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
