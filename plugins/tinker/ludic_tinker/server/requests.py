"""Training requests: a `Task` for the scheduler from the body that a client sent.

The body is what the store keeps, so a request that is carried out again after a restart takes the same way. What is wrong with
a request becomes its result and not an HTTP error: the SDK has used its number up, and the run waits for every number.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from ludic.inference.local import LocalEngine
from ludic.types import ConfigError, LudicError
from ludic_tinker.server.bodies import AdamSettings, LoadWeights, OptimStep, SaveExternal, SaveWeights, read_json
from ludic_tinker.server.futures import Failure, Result
from ludic_tinker.server.messages import config_of, read_pass, rows_of, write_pass
from ludic_tinker.server.records import Checkpoint, CheckpointPath, RequestKind, Run, Sampler, TenantLimits
from ludic_tinker.server.runs import TrainingBase, TrainingRun
from ludic_tinker.server.scheduler import PassTask, Task, UnreadPass, as_failure
from ludic_tinker.server.storage.store import DiskStore

Done = Callable[[Result], None]
_SAVES: set[RequestKind] = {"save_weights", "save_weights_for_sampler", "save_weights_external"}


@dataclass(slots=True, eq=False)
class OpenRun:
    """A training run that takes requests."""

    record: Run
    training: TrainingRun | None = None
    """None until the worker has made it."""
    unnamed: list[CheckpointPath] = field(default_factory=list)
    """Sampler weights without a name, the oldest first."""
    is_closed: bool = False
    is_incomplete: bool = False
    """True if a pass failed after some of its rows were added to the gradient."""

    def trained(self) -> TrainingRun:
        if self.training is None:
            raise ConfigError(f"{self.record.id} could not be created; the server's log says more.")
        return self.training

    def mark_incomplete(self) -> None:
        self.is_incomplete = True


def sampler_id(session_id: str, number: int) -> str:
    """The id of a sampling session; the client counts them."""
    return f"{session_id}:sample:{number}"


class TrainingRequests:
    """Makes the tasks of all runs. Their work is done in the scheduler's thread."""

    def __init__(
        self,
        base: TrainingBase,
        engine: LocalEngine,
        store: DiskStore,
        limits: TenantLimits,
        *,
        on_sampler: Callable[[OpenRun, Sampler], None],
    ) -> None:
        """`on_sampler` is told of sampler weights without a name, which the engine holds already."""
        self._base, self._engine, self._store, self._limits = base, engine, store, limits
        self._on_sampler = on_sampler

    def task(self, run: OpenRun, number: int, kind: RequestKind, payload: bytes, done: Done) -> Task:
        """Carries out one request. `done` takes the result, in the scheduler's thread."""
        make = {
            "create_model": self._create_model,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
            "refused": self._refused,
        }
        if kind != "forward_backward":
            return _simple_task(run, number, lambda: make[kind](run, number, payload), done)
        read = functools.partial(self._pass, run, number, payload, done)
        return UnreadPass(run=run.record.id, tenant=run.record.tenant, number=number, done=done, read=read)

    def repeated(
        self, run: OpenRun, number: int, kind: RequestKind, payload: bytes, result: Result, done: Done
    ) -> Task:
        """Carries out again, after a restart, a request that has its result: for its effect on the run alone."""
        if isinstance(result, Failure):
            work = (
                functools.partial(self._failed_step, run, payload, result) if kind == "optim_step" else lambda: result
            )
            return _simple_task(run, number, work, done)
        is_forward = kind == "forward_backward" and read_pass(payload).forward_only
        if is_forward or kind in _SAVES:
            return _simple_task(run, number, lambda: result, done)
        return self.task(run, number, kind, payload, done)

    # --- in the scheduler's thread ---

    def _pass(self, run: OpenRun, number: int, payload: bytes, done: Done) -> Task:
        try:
            request = read_pass(payload)
            rows, config = rows_of(request), config_of(request)
            self._base.check(request.loss_fn, rows, config)
        except Exception as error:  # noqa: BLE001 - the worker must live; the request hears of it
            failure = as_failure(error)
            return _simple_task(run, number, lambda: failure, done)
        return PassTask(
            run=run.record.id,
            tenant=run.record.tenant,
            number=number,
            done=done,
            training=run.trained,
            rows=rows,
            loss=request.loss_fn,
            config=config,
            forward_only=request.forward_only,
            finish=write_pass,
            broken=run.mark_incomplete,
        )

    def _refused(self, run: OpenRun, number: int, payload: bytes) -> Result:
        raise ConfigError(payload.decode())

    def _create_model(self, run: OpenRun, number: int, payload: bytes) -> Result:
        run.trained()
        return {"type": "create_model", "model_id": run.record.id}

    def _failed_step(self, run: OpenRun, payload: bytes, result: Result) -> Result:
        """A step that failed for its gradient has cleared it; one with wrong settings has not."""
        try:
            _adam_settings(read_json(payload, OptimStep))
        except LudicError:
            return result
        run.trained().gradient = None
        return result

    def _optim_step(self, run: OpenRun, number: int, payload: bytes) -> Result:
        settings, training = _adam_settings(read_json(payload, OptimStep)), run.trained()
        if run.is_incomplete:
            run.is_incomplete, training.gradient = False, None
            raise ConfigError(
                "A forward_backward since the last step failed half way, so the gradient was incomplete. It is cleared and the "
                "weights are as they were: send the data of this step again."
            )
        metrics = training.step(settings)
        return {"metrics": {name: value for name, value in metrics.items() if math.isfinite(value)}}

    def _save_weights(self, run: OpenRun, number: int, payload: bytes) -> Result:
        body = read_json(payload, SaveWeights)
        path = CheckpointPath.named(run.record.id, "training", body.path or f"{number:06d}")
        self._save(run, number, path, body, run.trained().state())
        return {"type": "save_weights", "path": str(path)}

    def _save_for_sampler(self, run: OpenRun, number: int, payload: bytes) -> Result:
        body, adapter = read_json(payload, SaveWeights), run.trained().adapter.copy()
        if body.path is not None:
            path = CheckpointPath.named(run.record.id, "sampler", body.path)
            self._save(run, number, path, body, adapter.named())
            return {"path": str(path)}
        path = CheckpointPath.named(run.record.id, "sampler", f"unnamed-{number:06d}")
        self._save(run, number, path, body, adapter.named())
        if str(path) not in (self._engine.adapters or ()):  # it is there if the request is repeated after a restart
            self._engine.add_adapter(str(path), adapter)
        asked = body.sampling_session_seq_id
        sampler = Sampler(
            id=sampler_id(run.record.session, asked if asked is not None else number),
            session=run.record.session,
            tenant=run.record.tenant,
            path=str(path),
            created=time.time(),
        )
        self._store.samplers.put(sampler)
        self._on_sampler(run, sampler)
        return {"sampling_session_id": sampler.id}

    def _save_external(self, run: OpenRun, number: int, payload: bytes) -> Result:
        """Weights to download. They have peft's format, as all checkpoints here."""
        body = read_json(payload, SaveExternal)
        if body.age_encryption_recipients:
            raise ConfigError("This server does not encrypt weights; leave age_encryption_recipients out.")
        path = CheckpointPath.named(run.record.id, "external", body.path)
        saved = SaveWeights(model_id=body.model_id, seq_id=body.seq_id, path=body.path, ttl_seconds=body.ttl_seconds)
        self._save(run, number, path, saved, run.trained().adapter.named())
        return {"type": "save_weights_external", "path": str(path)}

    def _save(
        self, run: OpenRun, number: int, path: CheckpointPath, body: SaveWeights, tensors: Mapping[str, Tensor]
    ) -> None:
        self._limits.check_metadata(body.user_metadata)
        now, is_unnamed = time.time(), path.kind == "sampler" and body.path is None
        checkpoint = Checkpoint(
            path=path,
            tenant=run.record.tenant,
            base_model=run.record.base_model,
            spec=run.record.spec,
            created=now,
            number=number,
            expires=None if body.ttl_seconds is None else now + body.ttl_seconds,
            user_metadata=body.user_metadata or {},
            is_unnamed=is_unnamed,
        )
        self._store.checkpoints.save(checkpoint, tensors, overwrite=body.overwrite or is_unnamed)

    def _load_weights(self, run: OpenRun, number: int, payload: bytes) -> Result:
        body, training = read_json(payload, LoadWeights), run.trained()
        path = CheckpointPath.parse(body.path)
        checkpoint = self._store.checkpoints.get(path, run.record.tenant)
        if path.kind != "training":
            raise ConfigError(f"{path} holds sampler weights; only a state of save_state can be trained on.")
        mine, its = (replace(spec, seed=None) for spec in (run.record.spec, checkpoint.spec))
        if mine != its:
            raise ConfigError(f"{path} was saved by a run of {its}, and this run has {mine}.")
        _, tensors = self._store.checkpoints.load(path)
        training.load(tensors, optimizer=body.optimizer)
        run.is_incomplete = False
        return {"type": "load_weights", "path": str(path), "model_id": run.record.id}


def _adam_settings(body: OptimStep) -> AdamSettings:
    if body.adam_params is None:
        kind = (body.optimizer_params or {}).get("type")
        raise ConfigError(f"The optimizer {kind!r:.80} is not here; this server has AdamW (AdamParams).")
    return body.adam_params.checked()


def _simple_task(run: OpenRun, number: int, work: Callable[[], Result], done: Done) -> Task:
    """The task of a request other than a pass."""
    return Task(run=run.record.id, tenant=run.record.tenant, number=number, work=work, done=done)
