"""`RolloutBatchSource`: generates the next batch on demand."""

import time
from typing import Any, TypeVar

from ludic.batch_gen.build_batch import BatchBuilder, HasCreditAssigner, credit_of
from ludic.batch_gen.engine import DEFAULT_MAX_STEPS, RolloutEngine
from ludic.batch_gen.episodes import Episode, EpisodeLimits
from ludic.batch_gen.requests.curriculum import Curriculum
from ludic.batch_gen.requests.dataset import RequestsFn
from ludic.batch_gen.requests.strategies import RequestStrategy
from ludic.batch_gen.requests.stream import RequestGroup, RequestStream
from ludic.batch_gen.sources.dynamic_sampling import DynamicSampling, refill
from ludic.types import ConfigError, CreditAssigner, SampleFilter, SAWBatch, Stateful

T = TypeVar("T")


class RolloutBatchSource:
    """Runs the episodes of the next requests and builds a batch from them.

    Requests come from `requests_fn` (alias `request_fn`) or from a `curriculum`, which observes the rollouts. `strategy`
    expands them. With `dynamic_sampling`, groups with equal rewards are replaced.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        *,
        orchestrator: RolloutEngine | None = None,
        requests_fn: RequestsFn | None = None,
        request_fn: RequestsFn | None = None,
        curriculum: Curriculum | None = None,
        credit_assigner: CreditAssigner | None = None,
        algorithm: HasCreditAssigner | None = None,
        max_steps: int = DEFAULT_MAX_STEPS,
        timeout_s: float | None = None,
        concurrency: int = 8,
        sample_filter: SampleFilter | None = None,
        strategy: RequestStrategy | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        per_turn: bool = False,
    ) -> None:
        EpisodeLimits(max_steps=max_steps, timeout_s=timeout_s)  # checks the limits before the first batch
        self._engine = _exactly_one(engine=engine, orchestrator=orchestrator)
        self._curriculum = curriculum
        next_requests = None if curriculum is None else curriculum.next_requests
        requests_fn = _exactly_one(requests_fn=requests_fn, request_fn=request_fn, curriculum=next_requests)
        parts: dict[str, object] = {"requests": requests_fn} if curriculum is None else {"curriculum": curriculum}
        self._requests = RequestStream(requests_fn, strategy, parts)
        credit = credit_of(credit_assigner, algorithm)
        self._builder = BatchBuilder(credit_assigner=credit, sample_filter=sample_filter, per_turn=per_turn)
        self._stateful_credit = credit if isinstance(credit, Stateful) else None
        self._max_steps = max_steps
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._dynamic_sampling = dynamic_sampling
        self._num_batches = 0
        self._num_episodes = 0
        self._groups_per_batch = 0

    async def next_batch(self) -> SAWBatch:
        started = time.perf_counter()
        if self._dynamic_sampling is None:
            batch = self._builder.batch(await self._run_episodes(self._requests.take_draw()))
        else:
            batch = await self._refilled_batch(self._dynamic_sampling)
        self._num_batches += 1
        generation_s = time.perf_counter() - started
        batch.meta["rollout_metrics"]["generation_s"] = generation_s
        batch.meta |= {"source": "rollout", "batch_index": self._num_batches - 1, "generation_s": generation_s}
        return batch

    get_next_batch = next_batch

    async def _refilled_batch(self, settings: DynamicSampling) -> SAWBatch:
        if not self._groups_per_batch:  # the first draw may be empty
            self._groups_per_batch = self._requests.num_next()
        take, run = self._requests.take, self._run_episodes
        refilled = await refill(self._groups_per_batch, take=take, run=run, settings=settings)
        batch = self._builder.batch([*refilled.episodes, *refilled.failed])
        counts = {"num_sampling_rounds": refilled.num_rounds, "num_zero_variance_groups": refilled.num_zero_variance}
        batch.meta |= counts
        batch.meta["rollout_metrics"] |= {name: float(value) for name, value in counts.items()}
        return batch

    async def _run_episodes(self, groups: list[RequestGroup]) -> list[Episode]:
        requests = [request for group in groups for request in group]
        first_index = self._num_episodes
        self._num_episodes += sum(request.num_episodes for request in requests)
        episodes = await self._engine.run_episodes(
            requests,
            max_steps=self._max_steps,
            timeout_s=self._timeout_s,
            concurrency=self._concurrency,
            first_index=first_index,
        )
        if self._curriculum is not None:
            self._curriculum.observe([r for e in episodes for r in e.rollouts if r.failure is None])
        return episodes

    def state_dict(self) -> dict[str, Any]:
        """Position of all stateful parts; call it between batches."""
        state = {
            "num_batches": self._num_batches,
            "num_episodes": self._num_episodes,
            "groups_per_batch": self._groups_per_batch,
            "requests": self._requests.state_dict(),
        }
        # A resumed run generates unsaved batches again, so the credit rule must forget what it counted for them.
        return state if self._stateful_credit is None else {**state, "credit": self._stateful_credit.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_batches = state["num_batches"]
        self._num_episodes = state["num_episodes"]
        self._groups_per_batch = state["groups_per_batch"]
        if self._stateful_credit is not None and "credit" in state:
            self._stateful_credit.load_state_dict(state["credit"])
        self._requests.load_state_dict(state["requests"])


def _exactly_one(**spellings: T | None) -> T:
    """The argument that was passed under one of several names."""
    given = [name for name, value in spellings.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"RolloutBatchSource needs exactly one of {', '.join(f'{name}=…' for name in spellings)}; "
            f"it was given {' and '.join(given) or 'none of them'}."
        )
    found = spellings[given[0]]
    assert found is not None, "only names with a value are in `given`"
    return found
