"""The thread that steps the model: it plans, launches, reads tokens and delivers finished sequences.

Requests come from any thread. Between two steps the worker can be paused, so that weights change while nothing computes with
them. What was launched with the old weights is read before a pause begins.
"""

import asyncio
import atexit
import gc
import logging
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ludic.inference.local.runner import Backend, Read, RecordsExperts, Runner, RunnerSettings
from ludic.inference.local.sampling import Scoring, ScoringQueue
from ludic.inference.local.scheduler import Scheduler
from ludic.inference.local.sequence import Answers, LogitsNotFinite, RequestAborted, Sampled, Sequence, StopRule
from ludic.models.kinds import adapts_experts, part
from ludic.models.weights import FiniteCheck, WeightsWatch, not_finite, shared_view
from ludic.tasks import exempt_from_collection
from ludic.types import EngineClosed, NotFinite, QueueFull

logger = logging.getLogger(__name__)

_SCORED_LOGITS = 1 << 26
"""Logits in memory at a time while texts are scored: a quarter of a gigabyte in fp32."""


class Worker:
    """Steps one model for the requests of one engine."""

    def __init__(
        self,
        model: Any,
        backend: Backend,
        scheduler: Scheduler,
        settings: RunnerSettings,
        stop_rule: StopRule,
        *,
        max_queue: int,
        records_experts: bool,
    ) -> None:
        self._model, self.backend, self.scheduler, self._settings = model, backend, scheduler, settings
        self._stop_rule = stop_rule
        self._max_queue = max_queue
        self._records_experts = records_experts
        embedding = model.get_input_embeddings().weight
        self._on_gpu = embedding.device.type == "cuda"
        self._max_logits = _SCORED_LOGITS // embedding.shape[0]
        """Positions that are scored at a time."""
        self._watch = WeightsWatch(model)
        self.runner: Runner | None = None
        self._merged: list[Any] = []
        """Copies of experts with their LoRA adapter added, to be renewed with every version."""
        self._launched: list[Read] = []
        """Computations whose tokens the worker has not read."""
        self._unread: FiniteCheck | None = None
        """Check of this version's initial weights; the worker reads it before it computes with them."""
        self._not_finite: list[str] = []
        """Weights of this version that are not finite."""
        # Everything below is shared with other threads; the condition guards it.
        self._changed = threading.Condition()
        self._incoming: list[Sequence] = []
        self._scoring = ScoringQueue(self._changed)
        self._open: set[Sequence] = set()
        """All unanswered requests; they fail when the engine ends."""
        self.answers = Answers()
        self._waking: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        """Event loops that will wake the worker in their next iteration."""
        self.num_pauses = 0
        self._is_stepping = False
        self.is_closed = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="ludic-engine", daemon=True)
        self._thread.start()
        self._at_exit = self._close_at_exit()

    # --- requests (any thread, any event loop) ---

    def submit(self, sequence: Sequence) -> None:
        """Compute it; its `deliver` is called once. QueueFull if too many are open."""
        with self._changed:
            self._require_alive()
            if len(self._open) >= self._max_queue:
                raise QueueFull(
                    f"{len(self._open)} requests are already open (max_queue={self._max_queue}). Send fewer at once."
                )
            self._open.add(sequence)
            self._incoming.append(sequence)
        # After all tasks that are ready: the requests of a group arrive in one step, and the worker does not take Python's lock
        # between two of them.
        loop = asyncio.get_running_loop()
        if loop not in self._waking:
            self._waking.add(loop)
            loop.call_soon(self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waking.discard(loop)
        with self._changed:
            self._changed.notify_all()

    def score(self, scoring: Scoring) -> None:
        """Set its `answer` when its text is scored."""
        with self._changed:
            self._require_alive()
            self._scoring.add(scoring)

    def cancel(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.is_cancelled = True
            self._changed.notify_all()

    def abort(self) -> int:
        """Remove every open request; each fails with `RequestAborted`. Returns their number."""
        with self._changed:
            open_ones = list(self._open)
            for sequence in open_ones:
                sequence.abort_reason = RequestAborted("The request was aborted.")
                sequence.is_cancelled = True
            self._changed.notify_all()
        return len(open_ones)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._incoming)

    def refusal(self) -> EngineClosed | None:
        """Why no request is answered; a new exception for each request, since tracebacks of different tasks must not mix."""
        if self._death is not None:
            return _died(self._death)
        return EngineClosed("The engine has been shut down.") if self.is_closed else None

    def _require_alive(self) -> None:
        if (refusal := self.refusal()) is not None:
            raise refusal

    # --- pausing, and other weights ---

    def pause(self) -> None:
        """Returns when the worker has stopped between two steps; requests wait."""
        with self._changed:
            self._require_alive()
            self.num_pauses += 1
            self._changed.wait_for(lambda: not self._is_stepping)

    def resume(self) -> None:
        with self._changed:
            self.num_pauses -= 1
            self._changed.notify_all()

    def begin_version(self, version: int | None) -> None:
        """Drop what was computed with the weights so far; None is the next number. Call it while the worker is paused."""
        if version != self.scheduler.version or self._watch.has_changed():
            self._unread = FiniteCheck(self._watch.changed(self._model))
        restarted = self.scheduler.new_version(self.scheduler.version + 1 if version is None else version)
        if self.runner is not None:
            for sequence in restarted:
                self.runner.leave(sequence)
        if self._watch.is_replaced(self._model):
            self.runner = None
        elif self.runner is not None:
            for experts in self._merged:
                experts.refresh()
            self.runner.weights_changed()
        self._watch = WeightsWatch(self._model)

    def release_cache(self) -> None:
        """Free the KV memory until the next request; running sequences are recomputed."""
        self.pause()
        try:
            self.begin_version(self.scheduler.version)
            self.runner = None
        finally:
            self.resume()

    # --- the end ---

    def close(self) -> None:
        """Stop the thread; open requests fail."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout=60)
        if self._on_gpu:
            gc.unfreeze()
        atexit.unregister(self._at_exit)

    def _close_at_exit(self) -> Callable[[], None]:
        """A thread that still computes while the interpreter shuts down crashes the process."""
        this = weakref.ref(self)

        def close_if_alive() -> None:
            if (worker := this()) is not None:
                worker.close()

        return atexit.register(close_if_alive)

    # --- the thread ---

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._step()
                finally:
                    self.answers.send()
                    with self._changed:
                        self._is_stepping = bool(self._launched)
                        self._changed.notify_all()
        except BaseException as error:
            logger.exception("the engine's worker died")
            self._death = error
        with self._changed:
            self._launched, self._is_stepping = [], False
            self._changed.notify_all()
        self._fail_everything()
        self.answers.send()

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; False if the engine is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.is_closed
                    or self._launched
                    or (self.num_pauses == 0 and (self._incoming or self._scoring or self.scheduler.has_work))
                )
            )
            if self.is_closed:
                return False
            self._is_stepping = True
            self.scheduler.waiting.extend(self._incoming)
            self._incoming = []
            return True

    def _step(self) -> None:
        if self.num_pauses:  # what was launched belongs to the old weights
            self._read(self._launched)
            return
        if self._watch.has_changed():
            self._read(self._launched)
            logger.warning(
                "the weights changed without notice; version %d begins. Use `with engine.updating():` "
                "around the optimizer step, or call new_version() after it.",
                self.scheduler.version + 1,
            )
            self.begin_version(None)
        for sequence in self.scheduler.sequences():
            if sequence.is_cancelled:
                self._finish(sequence, sequence.abort_reason)
        # Read here, not where a version begins: on a GPU this waits for the update, as the next token does anyway.
        if self._unread is not None:
            self._not_finite, self._unread = self._unread.names(), None
        if self._not_finite:
            self._refuse_everything()
            return
        self._score()
        plan = self.scheduler.plan()
        if plan.needs_reading:
            self._read(self._launched)
            plan = self.scheduler.plan()
        runner = self._ready_runner()
        for sequence in plan.preempted:
            runner.leave(sequence)
        before, self._launched = self._launched, []
        if plan.decode:
            self._launched.append(runner.decode(plan.decode, plan.num_rounds))
        if plan.prefill:
            self._launched.append(runner.prefill(plan.prefill))
        self.scheduler.launched(plan)
        self._read(before)  # while the device computes the next tokens
        if not (runner.runs_ahead and plan.is_plain):
            self._read(self._launched)

    def _read(self, launched: list[Read]) -> None:
        while launched:
            self._absorb(launched.pop(0)())

    def _refuse_everything(self) -> None:
        """Fail all requests instead of sampling from non-finite weights. The engine keeps running for the next version."""

        def error() -> NotFinite:
            what = f"The weights of version {self.scheduler.version} are not finite"
            return not_finite(
                what, self._not_finite, "Publish other weights: those of an earlier checkpoint, at a lower lr."
            )

        self._scoring.fail(error)
        for sequence in self.scheduler.sequences():
            self._finish(sequence, error())

    def _absorb(self, sampled: list[Sampled]) -> None:
        """Append new tokens; deliver finished sequences."""
        version, running, absorb = self.scheduler.version, self.scheduler.running, self._stop_rule.absorb
        for sequence, tokens, logprobs in sampled:
            if sequence.number not in running:  # it has ended since the launch
                continue
            num_good, num_sampled = _num_finite(logprobs), len(tokens)
            if num_good < num_sampled:
                tokens, logprobs = tokens[:num_good], logprobs[:num_good]
            try:
                absorb(sequence, tokens, logprobs, version)
            except Exception as error:  # noqa: BLE001 - from the tokenizer, which may not know a sampled token
                self._finish(sequence, error)
                continue
            if num_good < num_sampled and sequence.finish_reason is None:  # rounds after its end do not count
                self._finish(sequence, LogitsNotFinite(version, len(sequence.tokens)))
                continue
            if sequence.on_token is not None:
                sequence.on_token(sequence)
            if sequence.finish_reason is not None:
                self._finish(sequence, None)
        self.answers.send()

    def _score(self) -> None:
        """Score as many texts as fit one pass; the rest wait for later steps, so that generation continues in between."""
        batch = self._scoring.take(max_tokens=self.scheduler.limits.max_prefill_tokens, max_logits=self._max_logits)
        if not batch:
            return
        try:
            scores = self._ready_runner().score(batch)
        except BaseException as error:
            for scoring in batch:
                scoring.answer.set_exception(_died(error))
            raise
        for scoring, own in zip(batch, scores, strict=True):
            if np.isnan(own.logprobs).any():
                scoring.answer.set_exception(LogitsNotFinite(self.scheduler.version, len(scoring.tokens)))
            else:
                scoring.answer.set_result(own)

    def _finish(self, sequence: Sequence, error: BaseException | None) -> None:
        if self.runner is not None:
            if self._records_experts and error is None and isinstance(self.runner, RecordsExperts):
                sequence.experts = self.runner.experts(sequence)
            self.runner.keep(sequence)
            self.runner.leave(sequence)
        self.scheduler.remove(sequence)
        with self._changed:
            self._open.discard(sequence)
        sequence.deliver(sequence, error)

    def _fail_everything(self) -> None:
        with self._changed:
            open_ones, self._open = sorted(self._open, key=lambda sequence: sequence.number), set()
            self._incoming = []
        for sequence in open_ones:
            sequence.deliver(sequence, self.refusal())
        self._scoring.fail(self.refusal)
        if self._death is None:  # after a crash the scheduler's state may be invalid
            for sequence in open_ones:
                self.scheduler.remove(sequence)

    def _ready_runner(self) -> Runner:
        self.runner = self.runner or self._make_runner()
        return self.runner

    def _make_runner(self) -> Runner:
        view = shared_view(self._model)  # separate modules over the same parameters
        has_adapted_experts = any(map(adapts_experts, view.modules()))
        self._merged = part("experts").merge_experts(view) if has_adapted_experts else []
        runner = self.backend.runner(view, self._settings)
        if self._on_gpu:
            # A pass of the garbage collector over torch, transformers and a model stops this thread for 0.2 s. `close` undoes it.
            exempt_from_collection()
        return runner


def _num_finite(logprobs: list[float]) -> int:
    """Number of log-probs before the first NaN, by which samplers report non-finite logits."""
    if math.isfinite(sum(logprobs)):
        return len(logprobs)
    return next(i for i, logprob in enumerate(logprobs) if not math.isfinite(logprob))


def _died(error: BaseException) -> EngineClosed:
    return EngineClosed(f"The engine has died: {type(error).__name__}: {error}. Make a new one.")
