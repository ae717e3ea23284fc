"""Sampling requests: whose weights, whose turn, and what the embedded engine is asked.

Sampler weights are kept by the store. The engine holds the adapters that were used last; others are loaded again when a
request needs them. Requests wait here until the engine has room and are taken from the tenant that has had the fewest tokens,
so that a tenant with a thousand requests does not delay one with two.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ludic.http.turns import Turns
from ludic.inference.local import LocalEngine
from ludic.models.adapters import LoraAdapter
from ludic.tasks import all_or_none, cancel_all
from ludic.types import ConfigError, ReturnSpec, SamplingParams, TokenCompletionRequest, derive_seed
from ludic_tinker.server.bodies import CreateSamplingSession, SampleBody, check_sparse
from ludic_tinker.server.futures import Failure, Future, Futures, Result, request_id
from ludic_tinker.server.messages import SampledTokens, ScoredPrompt, TopTokens, write_sample
from ludic_tinker.server.records import Checkpoint, CheckpointPath, Refused, Sampler, TenantLimits, Usage
from ludic_tinker.server.requests import sampler_id
from ludic_tinker.server.scheduler import FairShares, as_failure
from ludic_tinker.server.storage.store import DiskStore

_AHEAD = 1.5
"""Sequences given to the engine for each that it computes at a time, so that it does not wait for this loop."""


def _sampling_of(body: SampleBody, room: int) -> SamplingParams:
    """The engine's parameters; `room`: tokens that the context leaves for a completion."""
    asked = body.sampling_params
    stop = asked.stop
    if isinstance(stop, str):
        stop = [stop]
    texts = [part for part in stop or () if isinstance(part, str)]
    return SamplingParams(
        temperature=asked.temperature,
        max_tokens=asked.max_tokens if asked.max_tokens is not None else max(1, room),
        top_p=asked.top_p,
        top_k=max(0, asked.top_k),
        stop=texts or None,
        stop_token_ids=tuple(part for part in stop or () if isinstance(part, int)),
        # What is given replaces the model's own end-of-sequence token; an empty list leaves max_tokens alone.
        ignore_eos=stop is not None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Facts about the base model that clients are told."""

    names: tuple[str, ...]
    """The names by which they may ask for it, its own first."""
    max_context: int
    """Tokens of a prompt and its completion, or of a row."""
    architecture: str = ""
    tokenizer_id: str | None = None
    """The hub id or folder that `get_tokenizer` of the SDK loads."""

    def check(self, name: str) -> None:
        """Refused(400) for another model than the one that is served."""
        if name not in self.names:
            raise Refused(400, f"There is no base model {name!r:.200} here. This server has {', '.join(self.names)}.")


class Sampling:
    """The sampling sessions of all tenants, their requests, and the adapters that the engine holds for them. It belongs to the
    event loop.

    A request is known by its sampling session and number: a repeated one is given the future of the first. Samples are not
    written down; after a restart of the server the SDK asks for them again.
    """

    def __init__(
        self,
        engine: LocalEngine,
        store: DiskStore,
        offer: Offer,
        futures: Futures,
        usage: Usage,
        *,
        limits: TenantLimits,
        max_adapters: int,
    ) -> None:
        """`max_adapters`: held by the engine at a time; more only while requests that run need them."""
        self.engine, self.offer, self._store = engine, offer, store
        self._futures, self._usage, self._limits = futures, usage, limits
        self._max_adapters = max_adapters
        self.running: dict[str, asyncio.Task[None]] = {}
        """Tasks of the requests in the engine, by id."""
        self._held: OrderedDict[str, int] = OrderedDict()
        """Adapters of the engine by path, the least recently used first, and the requests that use each now."""
        self._deleted: set[str] = set()
        """Held paths whose weights are deleted; the requests that use them finish."""
        self._loading: dict[str, asyncio.Lock] = {}
        shares = FairShares()
        self._turns = Turns(int(engine.max_sequences * _AHEAD), choose=shares.choose, charge=shares.charge)

    # --- sessions ---

    def create_session(self, tenant: str, body: CreateSamplingSession) -> Sampler:
        """A sampling session of weights or of the base model; a repeated request finds the first one's."""
        name = sampler_id(body.session_id, body.sampling_session_seq_id)
        try:
            return self._store.samplers.get(name, tenant)
        except Refused:
            sampler = self._new_sampler(tenant, name, body.session_id, body.model_path, body.base_model)
        if len(self.of_session(body.session_id)) >= self._limits.max_session_samplers:
            raise Refused(
                403,
                f"This session has {self._limits.max_session_samplers} sampling sessions, as many as this server allows. End it "
                "(ServiceClient.close) and use a new ServiceClient.",
            )
        self._store.samplers.put(sampler)
        return sampler

    def _new_sampler(
        self, tenant: str, name: str, session: str, model_path: str | None, base_model: str | None
    ) -> Sampler:
        if model_path is None:
            if base_model is None:
                raise Refused(400, "A sampling session needs a model_path or a base_model.")
            self.offer.check(base_model)
            path = None
        else:
            path = str(self._store.checkpoints.get(CheckpointPath.parse(model_path), tenant).path)
        return Sampler(id=name, session=session, tenant=tenant, path=path, created=time.time())

    def of_session(self, session_id: str) -> list[Sampler]:
        return [sampler for sampler in self._store.samplers if sampler.session == session_id]

    # --- adapters ---

    def held(self, path: CheckpointPath) -> None:
        """The engine was given these weights."""
        self._held[str(path)] = 0

    def drop(self, path: CheckpointPath) -> None:
        """The weights are deleted. Requests that use them finish."""
        if str(path) in self._held:
            self._deleted.add(str(path))
            self._make_room()

    @contextlib.asynccontextmanager
    async def _adapter(self, path: str | None) -> AsyncIterator[str | None]:
        """The engine's name of these weights, which it holds until the end of the block."""
        if path is None:
            yield None
            return
        async with self._loading.setdefault(path, asyncio.Lock()):
            if path not in self._held:
                await asyncio.to_thread(self._load, path)
                self._held[path] = 0
        self._held[path] += 1
        self._held.move_to_end(path)
        self._make_room()
        try:
            yield path
        finally:
            self._held[path] -= 1
            self._make_room()

    def _load(self, path: str) -> None:
        checkpoint, tensors = self._store.checkpoints.load(CheckpointPath.parse(path))
        self.engine.add_adapter(path, adapter_of(self.engine, checkpoint, tensors))

    def _make_room(self) -> None:
        for path in [path for path, num_users in self._held.items() if not num_users]:
            if path in self._deleted or len(self._held) > self._max_adapters:
                del self._held[path]
                self._deleted.discard(path)
                self._loading.pop(path, None)
                self.engine.remove_adapter(path)

    # --- requests ---

    def sample(self, tenant: str, body: SampleBody) -> Future:
        """Accept a sampling request, once."""
        if body.sampling_session_id is not None:
            if body.seq_id is None:
                raise Refused(400, "A request of a sampling session needs a seq_id.")
            sampler = self._store.samplers.get(body.sampling_session_id, tenant)
            name = request_id(sampler.id, body.seq_id)
            if (known := self._futures.get(name, tenant)) is not None:
                return known
        else:
            name = f"sample-{secrets.token_hex(12)}"
            sampler = self._new_sampler(tenant, name, "", body.model_path, body.base_model)
        tokens = body.prompt.tokens
        sampling = self._check(body, tokens)
        self._usage.check(tenant)
        future = self._futures.begin(name, tenant)
        future.num_sequences = body.num_samples
        num_tokens = len(tokens) + body.num_samples * sampling.max_tokens

        async def run() -> None:
            self._usage.add(tenant, num_tokens)
            result: Result = Failure("The request was cancelled.")
            try:
                result = await self._draw(sampler, body, tokens, sampling)
            except Exception as error:  # noqa: BLE001 - the client hears of it when it asks for the result
                result = as_failure(error)
            finally:
                self._usage.remove(tenant, num_tokens)
                self.running.pop(name, None)
                self._futures.resolve(future, result)

        self.running[name] = asyncio.get_running_loop().create_task(run())
        return future

    def cancel(self, tenant: str, name: str) -> None:
        """Take a request out of the engine; others are left alone."""
        if self._futures.get(name, tenant) is not None and (task := self.running.get(name)) is not None:
            task.cancel()

    def close(self) -> None:
        """Take all requests out of the engine."""
        for task in list(self.running.values()):
            task.cancel()

    def _check(self, body: SampleBody, tokens: list[int]) -> SamplingParams:
        """ConfigError for what the engine would refuse, before the request is accepted."""
        if not tokens:
            raise ConfigError("The prompt is empty; a model needs at least one token to continue.")
        room = self.engine.max_total_tokens - len(tokens)
        sampling = _sampling_of(body, room)
        if sampling.max_tokens > room:
            raise ConfigError(
                f"The prompt has {len(tokens)} tokens and max_tokens={sampling.max_tokens}; together they may be "
                f"{self.engine.max_total_tokens}."
            )
        if body.prompt_logprobs_last_n is not None and not 1 <= body.prompt_logprobs_last_n < len(tokens):
            raise ConfigError(
                f"prompt_logprobs_last_n={body.prompt_logprobs_last_n}; it must be from 1 to {len(tokens) - 1}, the tokens of "
                "the prompt but the first."
            )
        return sampling

    async def _draw(self, sampler: Sampler, body: SampleBody, tokens: list[int], sampling: SamplingParams) -> bytes:
        """A `SampleResponse`. Cancelling the task takes the sequences out of the engine."""
        num_tokens = len(tokens) + body.num_samples * sampling.max_tokens
        async with (
            self._turns.turn(sampler.tenant, size=body.num_samples, cost=num_tokens),
            self._adapter(sampler.path) as adapter,
        ):
            scoring = asyncio.ensure_future(self._score(body, tokens, adapter))
            try:
                sequences = await all_or_none(
                    self._sequence(body, request, adapter)
                    for request in self._requests(body, tokens, sampling, adapter)
                )
                scored = await scoring
            finally:
                await cancel_all([scoring])
        return write_sample(sequences, scored)

    def _requests(
        self, body: SampleBody, tokens: list[int], sampling: SamplingParams, adapter: str | None
    ) -> list[TokenCompletionRequest]:
        seed = body.sampling_params.seed
        first = TokenCompletionRequest(
            model=self.engine.name,
            prompt_token_ids=np.asarray(tokens, np.int32),
            sampling=sampling,
            return_=dataclasses.replace(ReturnSpec.for_rl(), return_candidates=False),
            adapter=adapter,
        )
        seeds = [secrets.randbits(63) for _ in range(body.num_samples)]
        if seed is not None:
            seeds = [seed, *(derive_seed(seed, index) for index in range(1, body.num_samples))]
        return [dataclasses.replace(first, seed=own) for own in seeds]

    async def _sequence(self, body: SampleBody, request: TokenCompletionRequest, adapter: str | None) -> SampledTokens:
        response, _ = await self.engine.complete_tokens(request)
        tokens, logprobs = response.completion_token_ids, response.completion_logprobs
        assert logprobs is not None, "the request asks for log-probs"
        top = None
        if body.topk_sample_logprobs:
            whole = np.concatenate([request.prompt_token_ids, tokens])
            scores = await self.engine.score_prompt(whole, top_k=body.topk_sample_logprobs, adapter=adapter)
            top = TopTokens(scores.top_ids[-len(tokens) :], scores.top_logprobs[-len(tokens) :])
        return SampledTokens(tokens.tolist(), list(logprobs), response.finish_reason == "stop", top)

    async def _score(self, body: SampleBody, tokens: list[int], adapter: str | None) -> ScoredPrompt:
        asked = body.target_prompt_logprobs
        if not (body.prompt_logprobs or body.topk_prompt_logprobs or asked is not None):
            return ScoredPrompt()
        if asked is not None and asked.sparse_crow_indices is not None:
            check_sparse("target_prompt_logprobs", asked.shape or (), len(tokens) - 1)
        targets = None if asked is None else asked.dense(-1)
        if targets is not None:
            _check_targets(targets.shape, bool((targets >= 0).any()), len(tokens))
        if len(tokens) == 1:  # the first token has no log-probability
            return ScoredPrompt(logprobs=np.full(1, np.nan, np.float32) if body.prompt_logprobs else None)
        scores = await self.engine.score_prompt(
            np.asarray(tokens, np.int32), top_k=body.topk_prompt_logprobs, targets=targets, adapter=adapter
        )
        num_left_out = 1 if body.prompt_logprobs_last_n is None else len(tokens) - body.prompt_logprobs_last_n
        logprobs = np.full(len(tokens), np.nan, np.float32)
        logprobs[num_left_out:] = scores.logprobs[num_left_out - 1 :]
        top = None
        if body.topk_prompt_logprobs:
            top = TopTokens(scores.top_ids[num_left_out - 1 :], scores.top_logprobs[num_left_out - 1 :])
        return ScoredPrompt(
            logprobs=logprobs if body.prompt_logprobs else None,
            top=None if top is None else top.after(num_left_out),
            targets=None if targets is None else np.where(targets < 0, 0.0, scores.target_logprobs).astype(np.float32),
            target_layout=asked if asked is not None and asked.sparse_crow_indices is not None else None,
        )


def _check_targets(shape: tuple[int, ...], is_any: bool, num_tokens: int) -> None:
    if len(shape) != 2 or shape[0] != num_tokens - 1 or not is_any:
        raise ConfigError(
            f"target_prompt_logprobs has the shape {list(shape)}; for a prompt of {num_tokens} tokens it needs "
            f"[{num_tokens - 1}, K] and at least one token id."
        )


def adapter_of(engine: LocalEngine, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> LoraAdapter:
    """The adapter of sampler weights, or of a training state."""
    prefix = "weights/" if checkpoint.path.kind == "training" else ""
    adapter = LoraAdapter.create(engine.model, checkpoint.spec)
    adapter.load({name: tensors[f"{prefix}{name}"] for name in adapter.named()})
    return adapter
