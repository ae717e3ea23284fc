"""Request functions: each call returns the requests of the next batch.

They read a queue (each sample once) or a sequence (endless epochs, optionally shuffled). `DatasetRequests`, which reads a
sequence, saves its position in checkpoints.
"""

import asyncio
import contextlib
import inspect
import queue
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from ludic.batch_gen.requests.groups import GRPORequestStrategy, IdentityStrategy, RequestsFn, RequestStrategy
from ludic.types import (
    ConfigError,
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    RequestsExhausted,
    RolloutRequest,
    derive_seed,
)
from ludic.types.interfaces import load_into, state_of


class EpochOrder:
    """Endless sampler over dataset indices, shuffled per epoch by a derived seed; its position is checkpointed."""

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        if num_samples < 1:
            raise ConfigError("There are no samples to draw from.")
        self.num_drawn = 0
        self._num_samples, self._shuffle, self._seed = num_samples, shuffle, seed
        self._order_of: tuple[int, list[int]] = (-1, [])

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self.num_drawn // self._num_samples

    def next_index(self) -> int:
        epoch, position = divmod(self.num_drawn, self._num_samples)
        self.num_drawn += 1
        return self._order(epoch)[position]

    def _order(self, epoch: int) -> list[int]:
        if self._order_of[0] != epoch:
            order = list(range(self._num_samples))
            if self._shuffle:
                random.Random(derive_seed(self._seed, epoch)).shuffle(order)
            self._order_of = (epoch, order)
        return self._order_of[1]

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn, "num_samples": self._num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_samples"] != self._num_samples:
            raise ConfigError(
                f"The saved position is in a dataset of {state['num_samples']} samples, this one has {self._num_samples}. "
                "Resume with the data that the run was started with."
            )
        self.num_drawn = state["num_drawn"]


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
OnEmpty: TypeAlias = Literal["raise", "return_empty"]
Sample: TypeAlias = Any


class _TakesItems(Protocol[T_co]):
    """Non-blocking side of `queue.Queue` and `asyncio.Queue`."""

    def get_nowait(self) -> T_co: ...


def make_requests_fn_from_queue(
    q: _TakesItems[T],
    *,
    batch_size: int,
    build_request: Callable[[T], RolloutRequest],
    strategy: RequestStrategy | None = None,
    on_empty: OnEmpty = "raise",
) -> RequestsFn:
    """Requests for up to `batch_size` items per call, without waiting; the last batch may be smaller."""
    _check_batch_size(batch_size)
    if on_empty not in ("raise", "return_empty"):
        raise ConfigError(f"on_empty={on_empty!r}; it must be 'raise' or 'return_empty'.")
    expand = (strategy or IdentityStrategy()).expand

    def next_requests() -> list[RolloutRequest]:
        items: list[T] = []
        with contextlib.suppress(queue.Empty, asyncio.QueueEmpty):
            while len(items) < batch_size:
                items.append(q.get_nowait())
        if not items and on_empty == "raise":
            raise RequestsExhausted("The queue of samples is empty.")
        return expand([build_request(item) for item in items])

    return next_requests


def _as_sample(sample: Sample) -> Mapping[str, Any]:
    return {"sample": sample}


def _no_meta(index: int, sample: Sample) -> Mapping[str, Any]:
    return {}


def _index(index: int, sample: Sample = None) -> int:
    return index


SeedFn: TypeAlias = Callable[[int, Sample], int] | Callable[[int], int]
"""(index, sample) -> seed, or (index) -> seed."""


def _seed(seed_fn: Callable[..., int], index: int, sample: Sample) -> int:
    try:
        parameters = inspect.signature(seed_fn).parameters.values()
    except (TypeError, ValueError):  # a builtin, such as hash
        return seed_fn(index)
    needed = [p for p in parameters if p.kind is not p.KEYWORD_ONLY and (p.default is p.empty)]
    takes_both = len(needed) > 1 or any(p.kind is p.VAR_POSITIONAL for p in needed)
    return seed_fn(index, sample) if takes_both else seed_fn(index)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestBuilder:
    """Builds the request of a dataset sample."""

    env_kind: str
    protocol_kind: str
    inference: InferenceSpec | None = None
    env_kwargs_fn: Callable[[Sample], Mapping[str, Any]] = _as_sample
    protocol_kwargs: Mapping[str, Any] = field(default_factory=dict)
    request_meta_fn: Callable[[int, Sample], Mapping[str, Any]] = _no_meta
    """(index, sample) -> facts for the rollout's meta, in addition to `sample_index`."""
    env_seed_fn: SeedFn = _index
    sampling_seed_fn: SeedFn | None = None
    """None: a new seed each time the sample is drawn, so that the second epoch differs from the first."""

    def build(self, index: int, sample: Sample, *, fresh_seed: int) -> RolloutRequest:
        return RolloutRequest(
            env=EnvSpec(self.env_kind, self.env_kwargs_fn(sample)),
            protocol=ProtocolSpec(self.protocol_kind, self.protocol_kwargs),
            env_seed=_seed(self.env_seed_fn, index, sample),
            sampling_seed=fresh_seed if self.sampling_seed_fn is None else _seed(self.sampling_seed_fn, index, sample),
            inference=self.inference,
            meta={"sample_index": index, **self.request_meta_fn(index, sample)},
        )


def make_dataset_queue_requests_fn(
    samples_q: _TakesItems[tuple[int, Sample]],
    *,
    batch_size: int,
    env_kind: str,
    protocol_kind: str,
    inference: InferenceSpec | None = None,
    env_kwargs_fn: Callable[[Sample], Mapping[str, Any]] = _as_sample,
    protocol_kwargs: Mapping[str, Any] | None = None,
    request_meta_fn: Callable[[int, Sample], Mapping[str, Any]] = _no_meta,
    env_seed_fn: SeedFn = _index,
    sampling_seed_fn: SeedFn = _index,
    group_size: int = 1,
    on_empty: OnEmpty = "raise",
) -> RequestsFn:
    """Requests from a queue of (index, sample); a group size above 1 expands each into a group."""
    builder = RequestBuilder(
        env_kind=env_kind, protocol_kind=protocol_kind, inference=inference, env_kwargs_fn=env_kwargs_fn,
        protocol_kwargs=protocol_kwargs or {}, request_meta_fn=request_meta_fn, env_seed_fn=env_seed_fn,
        sampling_seed_fn=sampling_seed_fn,
    )  # fmt: skip
    return make_requests_fn_from_queue(
        samples_q,
        batch_size=batch_size,
        build_request=lambda pair: builder.build(pair[0], pair[1], fresh_seed=0),
        strategy=_strategy_for(group_size),
        on_empty=on_empty,
    )


def make_dataset_sequence_requests_fn(
    samples: Sequence[Sample],
    *,
    batch_size: int,
    env_kind: str,
    protocol_kind: str,
    inference: InferenceSpec | None = None,
    env_kwargs_fn: Callable[[Sample], Mapping[str, Any]] = _as_sample,
    protocol_kwargs: Mapping[str, Any] | None = None,
    request_meta_fn: Callable[[int, Sample], Mapping[str, Any]] = _no_meta,
    env_seed_fn: SeedFn = _index,
    sampling_seed_fn: SeedFn | None = None,
    group_size: int = 1,
    shuffle: bool = False,
    rng_seed: int = 0,
) -> "DatasetRequests":
    """Endless requests from a sequence; `shuffle` draws a new order each epoch."""
    builder = RequestBuilder(
        env_kind=env_kind, protocol_kind=protocol_kind, inference=inference, env_kwargs_fn=env_kwargs_fn,
        protocol_kwargs=protocol_kwargs or {}, request_meta_fn=request_meta_fn, env_seed_fn=env_seed_fn,
        sampling_seed_fn=sampling_seed_fn,
    )  # fmt: skip
    return DatasetRequests(
        samples,
        builder,
        batch_size=batch_size,
        strategy=_strategy_for(group_size),
        shuffle=shuffle,
        rng_seed=rng_seed,
    )


class DatasetRequests:
    """Endless requests over a sequence of samples; its position is checkpointed."""

    def __init__(
        self,
        samples: Sequence[Sample],
        builder: RequestBuilder,
        *,
        batch_size: int,
        strategy: RequestStrategy,
        shuffle: bool,
        rng_seed: int,
    ) -> None:
        _check_batch_size(batch_size)
        self._samples = samples
        self._builder = builder
        self._batch_size = batch_size
        self._strategy = strategy
        self._rng_seed = rng_seed
        self._order = EpochOrder(len(samples), shuffle=shuffle, seed=rng_seed)

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self._order.epoch

    def __call__(self) -> list[RolloutRequest]:
        return self._strategy.expand([self._next() for _ in range(self._batch_size)])

    def _next(self) -> RolloutRequest:
        fresh_seed = derive_seed(self._rng_seed, self._order.num_drawn)
        index = self._order.next_index()
        return self._builder.build(index, self._samples[index], fresh_seed=fresh_seed)

    def state_dict(self) -> dict[str, Any]:
        return {**self._order.state_dict(), "strategy": state_of(self._strategy)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state)
        load_into(self._strategy, state["strategy"])


class MixedRequests:
    """Concatenates several request functions, so that one batch can mix envs."""

    def __init__(self, *parts: RequestsFn) -> None:
        if not parts:
            raise ConfigError("MixedRequests needs at least one request function.")
        self._parts = parts

    def __call__(self) -> list[RolloutRequest]:
        return [request for part in self._parts for request in part()]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [state_of(part) for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, own in zip(self._parts, state["parts"], strict=True):
            load_into(part, own)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedPart:
    """One part of `WeightedRequests`."""

    requests_fn: RequestsFn
    """One task per call."""
    weight: float
    strategy: RequestStrategy = field(default_factory=IdentityStrategy)
    """Expands the task into a group."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Added to the meta of its requests: a domain, an objective."""


class WeightedRequests:
    """Groups of several request functions, their episodes in proportion to the weights, counted over the whole run."""

    def __init__(self, parts: Sequence[WeightedPart], *, num_episodes: int) -> None:
        """`num_episodes` per call; where groups have different sizes, on average."""
        if not parts or any(not part.weight > 0 for part in parts):
            raise ConfigError("WeightedRequests needs at least one part, and weights above 0.")
        self._parts = list(parts)
        total = sum(part.weight for part in parts)
        self._shares = [part.weight / total for part in parts]
        self._num_episodes = num_episodes
        self._num_due = 0
        self._num_given = [0] * len(parts)

    def __call__(self) -> list[RolloutRequest]:
        self._num_due += self._num_episodes
        requests: list[RolloutRequest] = []
        while (total := sum(self._num_given)) < self._num_due:
            # The part that is furthest behind its share; of equal ones the first.
            behind = [share * (total + 1) - given for share, given in zip(self._shares, self._num_given, strict=True)]
            number = behind.index(max(behind))
            part = self._parts[number]
            group = part.strategy.expand([replace(r, meta={**r.meta, **part.facts}) for r in part.requests_fn()])
            self._num_given[number] += sum(request.num_episodes for request in group)
            requests += group
        return requests

    def state_dict(self) -> dict[str, Any]:
        parts = [{"requests": state_of(part.requests_fn), "strategy": state_of(part.strategy)} for part in self._parts]
        return {"num_due": self._num_due, "num_given": list(self._num_given), "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_due, self._num_given = state["num_due"], list(state["num_given"])
        for part, own in zip(self._parts, state["parts"], strict=True):
            load_into(part.requests_fn, own["requests"])
            load_into(part.strategy, own["strategy"])


def _strategy_for(group_size: int) -> RequestStrategy:
    return IdentityStrategy() if group_size == 1 else GRPORequestStrategy(group_size)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}; a batch needs at least one request.")
