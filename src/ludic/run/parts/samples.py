"""The samples that the envs of a run are made with: of training and of evaluation, and the first one."""

import inspect
from collections.abc import Sequence
from typing import Any

from ludic.batch_gen.requests.samples import read_samples
from ludic.batch_gen.requests.streams import (
    SampleStream,
    StreamFunction,
    first_samples,
    held_out,
    is_stream,
    load_stream,
    read_or_generate,
)
from ludic.interaction.base import AnyEnv
from ludic.run.config.env_and_agent import EnvSettings
from ludic.run.given import Parts
from ludic.run.resolve import ResolvedRun


def env_arguments(env: EnvSettings, sample: Any = None) -> dict[str, Any]:
    return dict(env.set) if sample is None else {"sample": sample, **env.set}


def train_stream(run: ResolvedRun) -> StreamFunction | None:
    """The function that generates the samples; None where they are in a file or a list, or where there are none."""
    return _stream_of(run.config.env, run.parts)


def _stream_of(env: EnvSettings, parts: Parts) -> StreamFunction | None:
    if parts.samples is not None:
        return parts.samples if callable(parts.samples) else None
    return load_stream(env.data) if env.data is not None and is_stream(env.data) else None


def train_samples(run: ResolvedRun) -> Sequence[Any] | None:
    """All samples; None where there are none, or where a stream generates them."""
    given, data = run.parts.samples, run.config.env.data
    if given is not None:
        return None if callable(given) else given
    return None if data is None or is_stream(data) else read_samples(data)


def eval_samples(run: ResolvedRun) -> Sequence[Any] | None:
    data, given, num = run.config.eval.eval_data, run.parts.eval_samples, run.config.eval.eval_episodes
    seed = held_out(run.seed)
    if callable(given):
        return first_samples(given, num, seed=seed)
    return given if given is not None or data is None else read_or_generate(data, "--eval-data", num=num, seed=seed)


def first_sample(env: EnvSettings, parts: Parts) -> Any:
    """One sample, to make an env with; None if there are none."""
    stream = _stream_of(env, parts)
    if stream is not None:
        takes_difficulty = "difficulty" in inspect.signature(stream).parameters
        return SampleStream(stream, seed=0, difficulty=1 if takes_difficulty else None).next_sample()
    given = parts.samples or (None if env.data is None else read_samples(env.data))
    return None if given is None or callable(given) else given[0]


def first_env(run: ResolvedRun) -> AnyEnv:
    """One env of the run, about the first sample: mistakes in it, or in the data, are named here."""
    return run.env.make(env_arguments(run.config.env, first_sample(run.config.env, run.parts)))
