"""`Service`: sessions and training runs, and what their requests do.

The event loop accepts requests; the scheduler's worker thread carries out those of training runs. A request is known by its
run and number: a repeated one is given the future of the first.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from ludic.inference.local import LocalEngine
from ludic.models.adapters import AdapterSpec
from ludic_tinker.server import bodies
from ludic_tinker.server.futures import Failure, Future, Futures, Result, request_id
from ludic_tinker.server.records import (
    CheckpointPath,
    Refused,
    RequestKind,
    Run,
    Sampler,
    Session,
    TenantLimits,
    Usage,
)
from ludic_tinker.server.requests import OpenRun, TrainingRequests
from ludic_tinker.server.runs import TrainingBase
from ludic_tinker.server.sampling import Offer, Sampling
from ludic_tinker.server.scheduler import Scheduler, Task
from ludic_tinker.server.storage.journal import Recovered
from ludic_tinker.server.storage.store import DiskStore

logger = logging.getLogger(__name__)

_LORA_ALPHA = 32.0
"""Tinker's, whatever the rank."""
_BYTES_PER_TOKEN = 16
"""Bytes of training data per token, roughly: id, target, weight."""
_MAX_REASON = 1000
"""Longest reason kept for a session's end, in characters."""


class Service:
    """Everything behind the HTTP endpoints of training; `sampling` is everything behind those of sampling."""

    def __init__(
        self,
        base: TrainingBase,
        engine: LocalEngine,
        store: DiskStore,
        offer: Offer,
        *,
        token_budget: int,
        limits: TenantLimits | None = None,
        max_adapters: int = 32,
        max_idle_s: float = 3600.0,
    ) -> None:
        """`max_adapters`: held by the engine at a time. `max_idle_s`: a session ends when its client has been silent for this
        time. Call it in the running event loop."""
        self.offer, self.limits = offer, limits or TenantLimits()
        self.futures = Futures()
        self._base, self.store, self._max_idle_s = base, store, max_idle_s
        self._last_seen: dict[str, float] = {}
        """When the client of each open session was heard last."""
        self._runs: dict[str, OpenRun] = {}
        self._usage = Usage(self.limits)
        self.sampling = Sampling(
            engine,
            store,
            offer,
            self.futures,
            self._usage,
            limits=self.limits,
            max_adapters=max_adapters,
        )
        self._loop = asyncio.get_running_loop()
        self._scheduler = Scheduler(base.compute, token_budget=token_budget)
        self._requests = TrainingRequests(
            base,
            engine,
            store,
            self.limits,
            on_sampler=lambda run, sampler: self._post(self._add_unnamed, run, sampler),
        )

    async def close(self) -> None:
        """End the worker; open requests are not answered."""
        self.sampling.close()
        await asyncio.to_thread(self._scheduler.close)

    # --- sessions ---

    def create_session(self, tenant: str, body: bodies.CreateSession) -> Session:
        self.limits.check_metadata(body.tags, body.user_metadata, body.sdk_version, body.display_name)
        self._make_room(tenant)
        session = Session(
            id=f"session-{secrets.token_hex(12)}",
            tenant=tenant,
            created=time.time(),
            tags=tuple(body.tags),
            user_metadata=body.user_metadata or {},
            sdk_version=body.sdk_version,
            display_name=body.display_name,
        )
        self.store.sessions.put(session)
        self._last_seen[session.id] = time.time()
        return session

    def _make_room(self, tenant: str) -> None:
        """Forget the tenant's oldest sessions that have ended, until one more is allowed."""
        own = self.store.sessions.listed(tenant)
        ended = [session.id for session in own if session.finished is not None]
        if len(own) - len(ended) >= self.limits.max_sessions:
            raise Refused(
                403,
                f"You have {len(own) - len(ended)} sessions open, and this server allows {self.limits.max_sessions}. End some "
                "(ServiceClient.close), or wait until abandoned ones have ended.",
            )
        num_over = max(0, len(own) + 1 - self.limits.max_sessions)
        for session_id in ended[len(ended) - num_over :]:
            self.store.forget_session(session_id)

    def heard(self, tenant: str, session_id: str) -> Session:
        """The client of this session lives. Refused(404) if it is none of the tenant's, Refused(410) if it has ended."""
        session = self.store.sessions.get(session_id, tenant)
        if session.finished is not None:
            raise Refused(410, f"The session {session_id} has ended.")
        self._last_seen[session_id] = time.time()
        return session

    def finish_session(self, tenant: str, session_id: str, reason: str = "success", detail: str | None = None) -> None:
        """End its runs and samplers; named checkpoints stay."""
        if self.store.sessions.get(session_id, tenant).finished is None:
            self._end_session(session_id, reason[:_MAX_REASON], detail and detail[:_MAX_REASON])

    def _end_session(self, session_id: str, reason: str, detail: str | None) -> None:
        for run in [run for run in self._runs.values() if run.record.session == session_id]:
            self._end_run(run)
        for sampler in self.sampling.of_session(session_id):
            self.store.samplers.remove(sampler.id)
        session = self.store.sessions.get(session_id)
        self.store.sessions.put(dataclasses.replace(session, finished=reason, detail=detail))
        self._last_seen.pop(session_id, None)

    def sweep(self) -> None:
        """End sessions whose clients are gone, and drop results that were not retrieved. Call it now and then."""
        now = time.time()
        for session_id, last_seen in list(self._last_seen.items()):
            if now - last_seen > self._max_idle_s:
                logger.warning("session %s was silent for %.0f s; it ends", session_id, now - last_seen)
                self._end_session(session_id, "interrupted", "its client was silent")
        self.futures.sweep()

    # --- runs ---

    def create_model(self, tenant: str, body: bodies.CreateModel) -> Future:
        """A new run; its id follows from the session and the number that the client gives."""
        self.heard(tenant, body.session_id)
        run_id = _run_id(body.session_id, body.model_seq_id)
        if (known := self._known(tenant, run_id, {"type": "create_model", "model_id": run_id})) is not None:
            return known
        _check_optimizer(body.optimizer_config)
        lora = body.lora_config
        spec = AdapterSpec(
            rank=lora.rank,
            alpha=_LORA_ALPHA,
            seed=lora.seed if lora.seed is not None else secrets.randbits(31),
            attention=lora.train_attn,
            mlp=lora.train_mlp,
            head=lora.train_unembed,
        )
        record = self._new_record(tenant, run_id, body.session_id, body.base_model, spec, body.user_metadata)
        return self._create(record, "create_model", b"")

    def create_from_weights(self, tenant: str, body: bodies.LoadWeights, payload: bytes) -> Future:
        """A new run with the weights of a checkpoint, and its optimizer if that is asked for."""
        assert body.session_id is not None and body.model_seq_id is not None, "checked by the caller"
        self.heard(tenant, body.session_id)
        run_id = _run_id(body.session_id, body.model_seq_id)
        if (known := self._known(tenant, run_id, {"type": "load_weights", "model_id": run_id})) is not None:
            return known
        checkpoint = self.store.checkpoints.get(CheckpointPath.parse(body.path), tenant)
        _check_optimizer(body.optimizer_config)
        base_model = body.base_model or checkpoint.base_model
        record = self._new_record(tenant, run_id, body.session_id, base_model, checkpoint.spec, body.user_metadata)
        return self._create(record, "load_weights", payload)

    def _known(self, tenant: str, run_id: str, result: Result) -> Future | None:
        """The future of a run's creation, if it was created; the result may have been dropped since."""
        found = self.futures.get(request_id(run_id, 0), tenant)
        if found is None and run_id in self._runs:
            found = self.futures.begin(request_id(run_id, 0), tenant)
            self.futures.resolve(found, result)
        return found

    def _create(self, record: Run, kind: RequestKind, payload: bytes) -> Future:
        """A run begins with its request 0."""
        self.store.forget_ended_runs(record.tenant, keep=self.limits.max_ended_runs)
        self.store.add_run(record, kind, payload)
        return self._submit(self._open(record, next_number=0), 0, kind, payload)

    def _new_record(
        self, tenant: str, run_id: str, session_id: str, base_model: str, spec: AdapterSpec, metadata: Any
    ) -> Run:
        self.offer.check(base_model)
        self.limits.check_metadata(metadata)
        if spec.rank > self.limits.max_rank:
            raise Refused(400, f"lora_config.rank={spec.rank}; this server allows {self.limits.max_rank}.")
        num_runs = sum(run.record.tenant == tenant for run in self._runs.values())
        if num_runs >= self.limits.max_runs:
            raise Refused(
                403,
                f"You have {num_runs} training runs open, and this server allows {self.limits.max_runs}. End a session "
                "(ServiceClient.close), or wait until an abandoned one has ended.",
            )
        return Run(
            id=run_id,
            session=session_id,
            tenant=tenant,
            base_model=base_model,
            spec=spec,
            created=time.time(),
            user_metadata=metadata or {},
        )

    def _open(self, record: Run, *, next_number: int, state: Mapping[str, Tensor] | None = None) -> OpenRun:
        """The worker makes the run, before its first request."""
        run = self._runs[record.id] = OpenRun(record)

        def make() -> None:
            run.training = self._base.new_run(record.spec)
            if state is not None:
                run.training.load(state, optimizer=True)

        self._scheduler.open(record.id, record.tenant, next_number=next_number, make=make)
        return run

    def run(self, tenant: str, run_id: str) -> Run:
        """Refused(404) if there is none, or it is another tenant's."""
        return self._find(tenant, run_id).record

    def _find(self, tenant: str, run_id: str) -> OpenRun:
        run = self._runs.get(run_id)
        if run is None or run.record.tenant != tenant:
            raise Refused(404, f"There is no training run {run_id!r:.200}. Runs end with their session.")
        return run

    def unload(self, tenant: str, run_id: str) -> Future:
        """End a run; named checkpoints stay."""
        request_id = f"{run_id}#unload"
        if (known := self.futures.get(request_id, tenant)) is not None:
            return known
        self._end_run(self._find(tenant, run_id))
        future = self.futures.begin(request_id, tenant)
        self.futures.resolve(future, {"type": "unload_model", "model_id": run_id})
        return future

    def _end_run(self, run: OpenRun) -> None:
        run.is_closed = True
        del self._runs[run.record.id]
        self._scheduler.close_run(run.record.id)
        self._forget_unnamed(run, keep=0)
        self.store.end_run(run.record.id)

    # --- restart ---

    def recover(self) -> None:
        """Take over from the server before this one, which may have been killed at any moment. Call it once, before listening.

        Runs are computed up to where they were in the background. The SDK (0.36) continues as if nothing had happened:

        - Requests that were not answered come again with the same numbers (`execute_with_retries`, for 5 minutes), and meet the
          runs, sessions and results that are here: nothing is carried out twice.
        - Requests that were answered are only asked for their results (`_APIFuture`, without an end while the server is away; 404
          would end the client's program), and every one of a training run is in the journal.
        - Sampling requests are not kept. Their ids are answered with 410, after which `SamplingClient` samples again.
        - Heartbeats continue; a session that its client has not finished is open, and its client has time again to be heard.
        """
        sessions = self.store.sessions.listed()
        over = {session.id for session in sessions if session.finished is not None}
        self._last_seen = {session.id: time.time() for session in sessions if session.id not in over}
        for run, found in self.store.recover():
            if run.session in over:
                self.store.end_run(run.id)
                continue
            try:
                self._restore_run(run, found)
            except Exception as error:
                logger.exception("run %s cannot be continued; its checkpoints can still be loaded", run.id)
                self.store.damaged[run.id] = f"{type(error).__name__}: {error}"
                self._abandon(run.id)
        for sampler in self.store.samplers.listed():
            if sampler.session in over:
                self.store.samplers.remove(sampler.id)

    def _abandon(self, run_id: str) -> None:
        """Take no requests of a run that cannot be restored; its files stay as they are."""
        if (run := self._runs.pop(run_id, None)) is not None:
            run.is_closed = True
            self._scheduler.close_run(run_id)

    def _restore_run(self, record: Run, found: Recovered) -> None:
        """A run as it was before a restart: its requests are carried out again. One that has a result keeps it; if it now fails,
        the run does not have the weights that its client was told of, and takes no more requests."""
        logger.info("run %s continues; %d requests are carried out again", record.id, len(found.requests))
        run = self._open(record, next_number=found.next_number, state=found.state)
        run.unnamed.extend(checkpoint.path for checkpoint in reversed(self.store.checkpoints.unnamed(record.id)))
        for number, result in found.results.items():
            self.futures.resolve(self.futures.begin(request_id(record.id, number), record.tenant), result)
        for request in found.requests:
            number, kind, payload = request.seq, cast(RequestKind, request.kind), request.payload
            if number not in found.results:
                self._submit(run, number, kind, payload)
                continue
            _, done = self._begin(run, number, payload)
            done = functools.partial(_kept, run, number, found.results[number], done)
            self._enqueue(self._requests.repeated(run, number, kind, payload, found.results[number], done), payload)

    # --- training requests ---

    def request(self, tenant: str, run_id: str, number: int, kind: RequestKind, payload: bytes) -> Future:
        """Accept a request of a run, once."""
        run = self._find(tenant, run_id)
        self._last_seen[run.record.session] = time.time()
        known = self.futures.get(request_id(run_id, number), tenant)
        if known is not None:
            return known
        if self._scheduler.is_over(run_id, number):
            raise Refused(410, f"Request {number} of {run_id} was carried out, and its result is no longer kept.")
        return self._accept(run, number, kind, payload)

    def _accept(self, run: OpenRun, number: int, kind: RequestKind, payload: bytes) -> Future:
        # The request that a run waits for is always accepted: the SDK sends the parts of a large one in any order.
        if not self._scheduler.is_next(run.record.id, number):
            self._usage.check(run.record.tenant)
        self.store.journal.accept(run.record.id, number, kind, payload)
        return self._submit(run, number, kind, payload)

    def _submit(self, run: OpenRun, number: int, kind: RequestKind, payload: bytes) -> Future:
        future, done = self._begin(run, number, payload)
        self._enqueue(self._requests.task(run, number, kind, payload, done), payload)
        return future

    def _enqueue(self, task: Task, payload: bytes) -> None:
        self._usage.add(task.tenant, len(payload) // _BYTES_PER_TOKEN)
        self._scheduler.submit(task)

    def _begin(self, run: OpenRun, number: int, payload: bytes) -> tuple[Future, Callable[[Result], None]]:
        """A future, and what the worker calls with its result."""
        name, tenant = request_id(run.record.id, number), run.record.tenant
        # A request of before a restart may have its result already.
        future = self.futures.get(name, tenant) or self.futures.begin(name, tenant)

        def resolve(result: Result) -> None:
            self._usage.remove(tenant, len(payload) // _BYTES_PER_TOKEN)
            self.futures.resolve(future, result)

        def done(result: Result) -> None:
            if not run.is_closed and (training := run.training) is not None:
                try:
                    self.store.journal.executed(run.record.id, number, result, lambda: training.state(gradient=True))
                except OSError as error:
                    logger.error("request %d of %s could not be written down: %s", number, run.record.id, error)
                    result = Failure(f"The server could not write the result down: {error}", is_users=False)
            self._post(resolve, result)

        return future, done

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        """Have the event loop call it; calls keep their order."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop has ended
            logger.debug("a result came after the end")

    def _add_unnamed(self, run: OpenRun, sampler: Sampler) -> None:
        assert sampler.path is not None, "it has weights"
        path = CheckpointPath.parse(sampler.path)
        self.sampling.held(path)
        if path not in run.unnamed:
            run.unnamed.append(path)
        self._forget_unnamed(run, keep=self.limits.max_samplers)

    def _forget_unnamed(self, run: OpenRun, *, keep: int) -> None:
        while len(run.unnamed) > keep:
            path = run.unnamed.pop(0)
            self.sampling.drop(path)
            for sampler in self.sampling.of_session(run.record.session):
                if sampler.path == str(path):
                    self.store.samplers.remove(sampler.id)
            with contextlib.suppress(Refused):  # the tenant has deleted it
                self.store.checkpoints.delete(path)

    def create_sampling_session(self, tenant: str, body: bodies.CreateSamplingSession) -> Sampler:
        """A sampler of the session; a repeated request finds the first one's."""
        self.heard(tenant, body.session_id)
        return self.sampling.create_session(tenant, body)

    def why_waiting(self, request_id: str) -> str | None:
        """The reason in words, if a run waits for a request that has not arrived."""
        run_id, _, number = request_id.rpartition("#")
        missing = self._scheduler.missing(run_id)
        return None if missing is None or not number.isdecimal() else f"request {missing} of {run_id} has not arrived"


def _run_id(session_id: str, number: int) -> str:
    """The SDK derives the same."""
    return f"{session_id}:train:{number}"


def _kept(run: OpenRun, number: int, before: Result, done: Callable[[Result], None], result: Result) -> None:
    """The end of a request that was carried out again after a restart."""
    if isinstance(result, Failure) and not isinstance(before, Failure):
        logger.error("request %d of %s succeeded before the restart, now: %s", number, run.record.id, result.message)
        run.training = None
    done(before)


def _check_optimizer(asked: bodies.OptimizerSettings | None) -> None:
    if asked is not None and asked.type != "adamw":
        raise Refused(400, f"The optimizer {asked.type!r:.80} is not here; this server has adamw.")
