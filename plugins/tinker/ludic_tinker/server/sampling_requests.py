"""Requests of sampling clients: sampling sessions, and samples whose results wait as futures.

A request is known by its sampling session and number: a repeated one is given the future of the first. Samples are not written
down; after a restart of the server the SDK asks for them again.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from ludic_tinker.server.futures import Failure, Future, Futures, Result, request_id
from ludic_tinker.server.records import CheckpointPath, Refused, Sampler, TenantLimits, Usage
from ludic_tinker.server.requests import sampler_id
from ludic_tinker.server.sampling import Samplers
from ludic_tinker.server.scheduler import as_failure
from ludic_tinker.server.storage.store import DiskStore
from ludic_tinker.server.wire import bodies


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What clients are told about the base model."""

    names: tuple[str, ...]
    """The names by which they may ask for it, its own first."""
    max_context: int
    """Tokens of a prompt and its completion, or of a row."""
    architecture: str = ""
    tokenizer_id: str | None = None
    """What `get_tokenizer` of the SDK loads: a hub id or a folder."""

    def check(self, name: str) -> None:
        """Refused(400) for another model than the one that is served."""
        if name not in self.names:
            raise Refused(400, f"There is no base model {name!r:.200} here. This server has {', '.join(self.names)}.")


class SamplingRequests:
    """Accepts the requests of all tenants. It belongs to the event loop."""

    def __init__(
        self,
        samplers: Samplers,
        futures: Futures,
        usage: Usage,
        store: DiskStore,
        offer: Offer,
        *,
        limits: TenantLimits,
        clock: Callable[[], float],
    ) -> None:
        self._samplers, self._futures, self._usage = samplers, futures, usage
        self._store, self._offer, self._limits, self._clock = store, offer, limits, clock
        self.running: dict[str, asyncio.Task[None]] = {}
        """Tasks of the requests in the engine, by id."""

    def create_session(self, tenant: str, body: bodies.CreateSamplingSession) -> Sampler:
        """A sampling session of weights or of the base model; a repeated request finds the first one's."""
        name = sampler_id(body.session_id, body.sampling_session_seq_id)
        try:
            return self._samplers.find(name, tenant)
        except Refused:
            sampler = self._new_sampler(tenant, name, body.session_id, body.model_path, body.base_model)
        if len(self._samplers.of_session(body.session_id)) >= self._limits.max_session_samplers:
            raise Refused(
                403,
                f"This session has {self._limits.max_session_samplers} sampling sessions, as many as this server allows. End it "
                "(ServiceClient.close) and use a new ServiceClient.",
            )
        self._store.samplers.put(sampler)
        self._samplers.add(sampler)
        return sampler

    def _new_sampler(
        self, tenant: str, name: str, session: str, model_path: str | None, base_model: str | None
    ) -> Sampler:
        if model_path is None:
            if base_model is None:
                raise Refused(400, "A sampling session needs a model_path or a base_model.")
            self._offer.check(base_model)
            path = None
        else:
            path = str(self._store.checkpoints.get(CheckpointPath.parse(model_path), tenant).path)
        return Sampler(id=name, session=session, tenant=tenant, path=path, created=self._clock())

    def sample(self, tenant: str, body: bodies.SampleBody) -> Future:
        """Accept a sampling request, once."""
        if body.sampling_session_id is not None:
            if body.seq_id is None:
                raise Refused(400, "A request of a sampling session needs a seq_id.")
            sampler = self._samplers.find(body.sampling_session_id, tenant)
            name = request_id(sampler.id, body.seq_id)
            channel = f"{sampler.id}/{body.seq_id // 1_000_000_000}"
            if (known := self._futures.get(name, tenant)) is not None:
                return known
        else:
            name, channel = f"sample-{secrets.token_hex(12)}", None
            sampler = self._new_sampler(tenant, name, "", body.model_path, body.base_model)
        tokens = body.prompt.tokens
        sampling = self._samplers.check(body, tokens)
        self._usage.check(tenant)
        future = self._futures.begin(name, tenant, channel=channel)
        future.num_sequences = body.num_samples
        num_tokens = len(tokens) + body.num_samples * sampling.max_tokens

        async def run() -> None:
            self._usage.add(tenant, num_tokens)
            result: Result = Failure("The request was cancelled.")
            try:
                result = await self._samplers.sample(sampler, body, tokens, sampling)
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
