"""`LocalEngine`: a policy server inside your process.

Requests come from asyncio; one worker thread steps the model. It serves a transformers model on that model's own parameters:
after a trainer has changed them, `new_version` publishes them. Between two steps the worker can be paused, its weights
replaced and its cache freed; running sequences continue under the new weights, and their traces record which version sampled
which token.
"""

import asyncio
import atexit
import contextlib
import gc
import itertools
import logging
import math
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ludic.inference.local.bitwise import check_sampling
from ludic.inference.local.blocks import BlockPool
from ludic.inference.local.kv import eos_ids, num_blocks
from ludic.inference.local.runner import (
    Read,
    RecordsExperts,
    Runner,
    RunnerSettings,
    choose_backend,
)
from ludic.inference.local.sampling import PromptScores, Scoring, ScoringQueue
from ludic.inference.local.scheduler import Limits, Scheduler
from ludic.inference.local.sequence import Sampled, Sequence, StopRule
from ludic.inference.templates.conversation import decode_reply
from ludic.models.adapters.adapter import LoraAdapter
from ludic.models.adapters.forward import AdapterNames, PackedAdapter
from ludic.models.bitwise.decoder import BitwiseDecoder
from ludic.models.experts.adapters import MergedExperts, merge_experts
from ludic.models.head import plain_model
from ludic.models.loading import load_model
from ludic.models.vision.inputs import image_processor_of, is_vision_model
from ludic.models.weights import FiniteCheck, WeightsWatch, not_finite, shared_view
from ludic.types import (
    ChatResponse,
    ConfigError,
    EngineClosed,
    Info,
    LudicError,
    NotFinite,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    TokenChunk,
    TokenCompletionRequest,
    TokenIds,
    derive_seed,
    token_array,
)

logger = logging.getLogger(__name__)

_SCORED_LOGITS = 1 << 26
"""Logits in memory at a time while texts are scored: a quarter of a gigabyte in fp32."""


class RequestAborted(LudicError, RuntimeError):
    """`abort` removed the request from the batch."""


class LogitsNotFinite(NotFinite):
    """The model's logits for one request allow no sampling: they hold NaN or +inf, or are all -inf."""

    def __init__(self, version: int, num_tokens: int) -> None:
        super().__init__(
            f"The model's logits after {num_tokens} tokens are not finite (policy version {version}). The weights have "
            "diverged (lower the learning rate and start from an earlier checkpoint), the loaded weights are damaged, or the "
            "numbers are too large for the model's dtype (load it in bfloat16 or float32)."
        )


class LocalEngine:
    """Continuous batching, prefix sharing and live weights, in one object."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_sequences: int | None = None,
        max_model_len: int | None = None,
        max_prefill_tokens: int | None = None,
        block_size: int | None = None,
        kv_memory_fraction: float | None = None,
        kv_tokens: int | None = None,
        max_queue: int = 100_000,
        compile_layers: bool = True,
        pack_weights: bool | None = None,
        keep_room: bool = False,
        bitwise: bool = False,
        record_experts: bool = False,
        adapters: bool = False,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """`bitwise`: log-probabilities equal those of a bitwise trainer bit for bit, at some cost (docs/importance_sampling.md).
        `record_experts`: responses of a mixture say to which experts each token went (docs/mixtures.md).
        `adapters`: requests may name a LoRA adapter that `add_adapter` has added (docs/engine.md).
        `pack_weights`: keep copies of matrices in the order that the hardware reads them; False saves their memory.
        `compile_layers`: False runs every model through its own layers as they are.
        `keep_room`: admit a request only if the cache has room for the usual length of a reply; fewer are preempted."""
        if adapters and (bitwise or record_experts):
            raise ConfigError("An engine with adapters=True has neither bitwise nor record_experts. Leave these out.")
        loaded = load_model(model, tokenizer, dtype=dtype, device=device)
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        if names := FiniteCheck(self.model.named_parameters()).names():
            raise not_finite(f"{self.name} cannot be served", names, "Load other weights.")
        if bitwise:
            BitwiseDecoder(self.model)  # refuses here what could not hold, not at the first request
        self._backend = choose_backend(
            self.model,
            max_model_len,
            is_bitwise=bitwise,
            images=image_processor_of(self.tokenizer),
            records_experts=record_experts,
            has_adapters=adapters,
        )
        self._watch = WeightsWatch(self.model)
        self.max_model_len = self._backend.max_length
        embedding = self.model.get_input_embeddings().weight
        self.vocab_size: int = embedding.shape[0]
        self._eos_ids = frozenset(i for i in eos_ids(self.model, self.tokenizer) if 0 <= i < self.vocab_size)
        self._device: torch.device = embedding.device
        on_gpu = self._device.type == "cuda"
        # Every member of a group computes what follows the last full block itself. On a GPU a kernel reads whole blocks.
        block_size = block_size if block_size is not None else (16 if on_gpu else 4)
        self.max_sequences = max_sequences = max_sequences or (512 if on_gpu else 64)
        """Requests that are computed at a time; others wait."""
        max_prefill_tokens = max_prefill_tokens or (16_384 if on_gpu else 2048)
        # On a CPU the dense rows of the decoding sequences take about as much again as the pool.
        fraction = kv_memory_fraction or (0.6 if on_gpu else 0.15)
        room = max_sequences * self.max_model_len
        pool_blocks = num_blocks(
            self._backend.bytes_per_token, self._device, block_size, fraction=fraction, kv_tokens=kv_tokens, most=room
        )
        # A pool that holds every sequence at full length needs no estimates.
        keeps_room = keep_room and pool_blocks * block_size < room
        limits = Limits(
            max_sequences,
            max_prefill_tokens,
            max_rounds=self._backend.max_rounds,
            keeps_room=keeps_room,
            shares_prefixes=self._backend.shares_prefixes,
        )
        self._scheduler = Scheduler(BlockPool(pool_blocks, block_size), limits)
        self._scheduler.version = version
        self._runner: Runner | None = None
        self._merged: list[MergedExperts] = []
        """Of a LoRA adapter on experts."""
        self._launched: list[Read] = []
        """Computations whose tokens the worker has not read."""
        self._unread: FiniteCheck | None = None
        """Check of this version's initial weights; the worker reads it before it computes with them."""
        self._not_finite: list[str] = []
        """Weights of this version that are not finite."""
        self._stop_rule = StopRule(self._decode, self.max_model_len)
        self._max_queue = max_queue
        self._compile_layers = compile_layers
        self._pack_weights = pack_weights
        self.is_bitwise = bitwise
        self.records_experts = record_experts
        self.adapters = AdapterNames(self.model) if adapters else None
        """The adapters that requests may name; None for an engine without."""
        self._seed = seed
        self._numbers = itertools.count()
        # Everything below is shared with the worker; the condition guards it.
        self._changed = threading.Condition()
        self._incoming: list[Sequence] = []
        self._scoring = ScoringQueue(self._changed)
        self._open: set[Sequence] = set()
        """All unanswered requests; they fail when the engine ends."""
        self._answers = _Answers()
        self._waking: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        """Event loops that will wake the worker in their next iteration."""
        self._num_pauses = 0
        self._is_stepping = False
        self._is_closed = False
        self._death: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="ludic-engine", daemon=True)
        self._worker.start()
        # A thread that still computes while the interpreter shuts down crashes the process.
        this = weakref.ref(self)

        def close_if_alive() -> None:
            if (engine := this()) is not None:
                engine.close()

        self._at_exit = atexit.register(close_if_alive)

    # --- requests (any thread, any event loop) ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion. Cancelling the awaiting task removes the request from the batch."""
        loop = asyncio.get_running_loop()
        # Cheaper for many short requests than a stream of one chunk.
        answer: asyncio.Future[None] = loop.create_future()
        sequence = self._submit(request, lambda _, error: self._answers.add(loop, answer, error))
        try:
            await answer
        except asyncio.CancelledError:
            self._cancel(sequence)
            raise
        response = sequence.response(self._decode)
        if not request.return_.return_chosen_logprobs:
            response.completion_logprobs = None
        return response, {}

    async def stream_tokens(self, request: TokenCompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same completion in chunks as they are sampled; the last chunk also holds the whole.

        Closing the generator early removes the request from the batch: iterate within `contextlib.aclosing`.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[list[int], list[float], bool, BaseException | None]] = asyncio.Queue()
        num_sent = 0

        def post(sequence: Sequence, is_last: bool, error: BaseException | None) -> None:  # in the worker thread
            nonlocal num_sent
            logprobs = sequence.logprobs[num_sent:]
            ids = sequence.tokens[sequence.num_prompt + num_sent :]
            num_sent += len(logprobs)
            with contextlib.suppress(RuntimeError):  # the loop and its waiting task are gone
                loop.call_soon_threadsafe(arrived.put_nowait, (ids, logprobs, is_last, error))

        def on_token(sequence: Sequence) -> None:
            if sequence.finish_reason is None:  # the last token comes with the response
                post(sequence, False, None)

        sequence = self._submit(request, lambda sequence, error: post(sequence, True, error), on_token)
        is_last = False
        try:
            while not is_last:
                ids, logprobs, is_last, error = await arrived.get()
                if error is not None:
                    raise error
                response = sequence.response(self._decode) if is_last else None
                yield TokenChunk(token_ids=ids, logprobs=logprobs, response=response)
        finally:
            if not is_last:
                self._cancel(sequence)

    async def score_tokens(
        self,
        prompt_token_ids: TokenIds,
        completion_token_ids: TokenIds,
        *,
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> np.ndarray[Any, Any]:
        """Log-probability of each completion token after the prompt under this model, for teachers and references."""
        prompt, completion = token_array(prompt_token_ids), token_array(completion_token_ids)
        tokens = np.concatenate([prompt, completion])
        if not len(prompt):
            raise ConfigError("score_tokens needs at least one prompt token: the first token has no log-probability.")
        if temperature <= 0:
            raise ConfigError(f"score_tokens(temperature={temperature}): greedy choices have no log-probability.")
        if not len(completion):
            return np.zeros(0, dtype=np.float32)
        return (await self._scores(Scoring(tokens, len(prompt), temperature, adapter=self._find(adapter)))).logprobs

    async def score_prompt(
        self, tokens: TokenIds, *, top_k: int = 0, targets: Any = None, adapter: str | None = None
    ) -> PromptScores:
        """What the model says of each token after the first: its log-probability, the `top_k` most probable tokens in its place,
        and the log-probabilities of `targets` [len(tokens) - 1, K] in its place (-1 is none)."""
        ids = token_array(tokens)
        num_scored = len(ids) - 1
        wanted = None if targets is None else np.asarray(targets, dtype=np.int64)
        if not 0 <= top_k <= self.vocab_size:
            raise ConfigError(f"score_prompt(top_k={top_k}): the vocabulary has {self.vocab_size} tokens.")
        if wanted is not None and (wanted.ndim != 2 or len(wanted) != max(num_scored, 0)):
            raise ConfigError(
                f"score_prompt got {len(ids)} tokens and targets of shape {wanted.shape}; it takes ({num_scored}, K), one row for "
                "each token after the first."
            )
        if wanted is not None and wanted.size and not -1 <= wanted.min() <= wanted.max() < self.vocab_size:
            raise ConfigError(
                f"score_prompt got targets from {wanted.min()} to {wanted.max()}; the model knows 0 to {self.vocab_size - 1}, "
                "and -1 is none."
            )
        if num_scored < 1:
            raise ConfigError("score_prompt needs two tokens at least: the first token has no log-probability.")
        return await self._scores(Scoring(ids, 1, 1.0, top_k, wanted, self._find(adapter)))

    async def _scores(self, scoring: Scoring) -> PromptScores:
        self._check_ids(scoring.tokens)
        if len(scoring.tokens) > self.max_model_len:
            raise PromptTooLong(len(scoring.tokens), self.max_model_len)
        with self._changed:
            self._require_alive()
            self._scoring.add(scoring)
        return await asyncio.wrap_future(scoring.answer)

    async def get_policy_version(self) -> int:
        return self.version

    @property
    def version(self) -> int:
        return self._scheduler.version

    @property
    def stats(self) -> dict[str, int]:
        """Counters for logs and /metrics."""
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(self._incoming),
            "kv_blocks_used": scheduler.pool.num_used,
            "kv_blocks": scheduler.pool.num_blocks,
            "preemptions": scheduler.num_preemptions,
            "prefix_tokens_reused": scheduler.num_prefix_tokens,
            "policy_version": scheduler.version,
        }

    @property
    def failure(self) -> str | None:
        """Why the engine no longer answers; None while it does."""
        refusal = self._refusal()
        return None if refusal is None else str(refusal)

    @property
    def max_total_tokens(self) -> int:
        """Maximum tokens of one request, prompt and completion: the model's limit or the cache's, whichever is less."""
        pool = self._scheduler.pool
        return min(self.max_model_len, pool.num_blocks * pool.block_size)

    def _submit(
        self, request: TokenCompletionRequest, deliver: Any, on_token: Callable[[Sequence], None] | None = None
    ) -> Sequence:
        self._check(request)
        number = next(self._numbers)
        seed = request.seed if request.seed is not None else derive_seed(self._seed, number)
        # 63 bits: a GPU holds seeds as signed 64-bit integers, and a larger seed would crash the worker.
        seed &= (1 << 63) - 1
        stop_ids = self._stop_ids(request.sampling)
        adapter = self._find(request.adapter)
        sequence = Sequence(number, request, deliver, seed, stop_ids, on_token=on_token, adapter=adapter)
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
        return sequence

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waking.discard(loop)
        with self._changed:
            self._changed.notify_all()

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._eos_ids

    def abort(self) -> int:
        """Remove every open request; each fails with `RequestAborted`. Returns their number."""
        with self._changed:
            open_ones = list(self._open)
            for sequence in open_ones:
                sequence.abort_reason = RequestAborted("The request was aborted.")
                sequence.is_cancelled = True
            self._changed.notify_all()
        return len(open_ones)

    def _check(self, request: TokenCompletionRequest) -> None:
        ids, params = request.prompt_token_ids, request.sampling
        if not len(ids):
            raise ConfigError("The prompt is empty; a model needs at least one token to continue.")
        self._check_ids(ids)
        if request.images and not is_vision_model(plain_model(self.model)):
            raise ConfigError(f"The prompt holds {len(request.images)} pictures, but {self.name} takes text only.")
        if self.is_bitwise:
            check_sampling(params)
        if unknown := [i for i in params.stop_token_ids if not 0 <= i < self.vocab_size]:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise ConfigError(
                f"stop_token_ids {unknown[:3]}{more} are not in the vocabulary of {self.vocab_size} tokens."
            )
        if params.min_tokens and len(self._stop_ids(params)) == self.vocab_size:
            raise ConfigError(
                f"min_tokens={params.min_tokens} forbids stop tokens at first, but all {self.vocab_size} tokens of the "
                "vocabulary are stop tokens; drop min_tokens, or some of stop_token_ids."
            )
        if params.stop and self.tokenizer is None:
            raise ConfigError(f"stop={params.stop!r} needs a tokenizer; give LocalEngine one, or use stop_token_ids.")
        wanted, room = len(ids) + params.max_tokens, self.max_total_tokens
        if wanted > self.max_model_len:
            raise PromptTooLong(
                wanted, self.max_model_len, f"That is {len(ids)} of the prompt and max_tokens={params.max_tokens}."
            )
        if wanted > room:
            raise PromptTooLong(wanted, room, "The KV cache holds no more; raise kv_tokens or kv_memory_fraction.")

    def _check_ids(self, ids: np.ndarray[Any, Any]) -> None:
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ConfigError(
                f"The prompt has token ids from {ids.min()} to {ids.max()}, but the model knows 0 to {self.vocab_size - 1}. "
                "Check that the tokenizer belongs to this model."
            )

    def _cancel(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.is_cancelled = True
            self._changed.notify_all()

    def _refusal(self) -> EngineClosed | None:
        """Why no request is answered; a new exception for each request, since tracebacks of different tasks must not mix."""
        if self._death is not None:
            return _died(self._death)
        return EngineClosed("The engine has been shut down.") if self._is_closed else None

    def _require_alive(self) -> None:
        if (refusal := self._refusal()) is not None:
            raise refusal

    # --- adapters ---

    def add_adapter(self, name: str, adapter: LoraAdapter) -> None:
        """Requests may name this adapter from now on. One that can be trained is copied; its later changes do not count."""
        self._require_adapters().add(name, adapter)

    def remove_adapter(self, name: str) -> None:
        """New requests may not name it; those that are open finish with it."""
        self._require_adapters().remove(name)

    def _require_adapters(self) -> AdapterNames:
        if self.adapters is None:
            raise ConfigError(f"This engine serves {self.name} without adapters. Make it with adapters=True.")
        return self.adapters

    def _find(self, name: str | None) -> PackedAdapter | None:
        return None if name is None else self._require_adapters().find(name)

    # --- weights ---

    @contextlib.contextmanager
    def updating(self, version: int | None = None) -> Iterator[None]:
        """Pause between two tokens while the weights change; a new version begins at the end.

        For a trainer that shares the parameters: `with engine.updating(): optimizer.step()`.
        """
        self.pause()
        try:
            yield
        finally:
            try:
                # Also after a failure half way: the cache was computed with other weights than these.
                self._begin_version(version)
            finally:
                self.resume()

    def new_version(self, version: int | None = None) -> int:
        """Call after the shared parameters have changed: the engine drops everything computed so far."""
        with self.updating(version):
            pass
        return self.version

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        """Copy new values into the model, all or none, and begin a new version."""
        own = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        unknown = sorted(set(params) - set(own))
        try:
            values = {name: torch.as_tensor(params[name]) for name in params}
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"Some weights are not tensors ({sorted(params)[:3]} …): {error}") from error
        wrong = sorted(n for n, t in values.items() if n in own and t.shape != own[n].shape)
        if unknown or wrong:
            raise ConfigError(
                f"The weights do not fit {self.name}: unknown names {unknown[:3]}, wrong shapes {wrong[:3]}. Nothing was changed."
            )
        if names := FiniteCheck(values.items()).names():
            raise not_finite(f"The weights for {self.name} are not finite", names, "Nothing was changed.")
        with self.updating(None if version is None else int(version)), torch.no_grad():
            for name, tensor in values.items():
                own[name].copy_(tensor)
        return str(self.version)

    def _begin_version(self, version: int | None) -> None:
        if version != self.version or self._watch.has_changed():
            self._unread = FiniteCheck(self._watch.changed(self.model))
        restarted = self._scheduler.new_version(self.version + 1 if version is None else version)
        if self._runner is not None:
            for sequence in restarted:
                self._runner.leave(sequence)
        if self._watch.is_replaced(self.model):
            self._runner = None
        elif self._runner is not None:
            for experts in self._merged:
                experts.refresh()
            self._runner.weights_changed()
        self._watch = WeightsWatch(self.model)

    # --- pausing ---

    def pause(self) -> None:
        """Returns when the worker has stopped between two steps; requests wait."""
        with self._changed:
            self._require_alive()
            self._num_pauses += 1
            self._changed.wait_for(lambda: not self._is_stepping)

    def resume(self) -> None:
        with self._changed:
            self._num_pauses -= 1
            self._changed.notify_all()

    def release_cache(self) -> None:
        """Free the KV memory until the next request; running sequences are recomputed."""
        self.pause()
        try:
            self._begin_version(self.version)
            self._runner = None
        finally:
            self.resume()

    def close(self) -> None:
        """Stop the worker; open requests fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._worker.join(timeout=60)
        if self._device.type == "cuda":
            gc.unfreeze()
        atexit.unregister(self._at_exit)

    async def __aenter__(self) -> "LocalEngine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    # --- the worker ---

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._step()
                finally:
                    self._answers.send()
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
        self._answers.send()

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; False if the engine is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or self._launched
                    or (self._num_pauses == 0 and (self._incoming or self._scoring or self._scheduler.has_work))
                )
            )
            if self._is_closed:
                return False
            self._is_stepping = True
            self._scheduler.waiting.extend(self._incoming)
            self._incoming = []
            return True

    def _step(self) -> None:
        if self._num_pauses:  # what was launched belongs to the old weights
            self._read(self._launched)
            return
        if self._watch.has_changed():
            self._read(self._launched)
            logger.warning(
                "the weights changed without notice; version %d begins. Use `with engine.updating():` "
                "around the optimizer step, or call new_version() after it.",
                self.version + 1,
            )
            self._begin_version(None)
        for sequence in self._scheduler.sequences():
            if sequence.is_cancelled:
                self._finish(sequence, sequence.abort_reason)
        # Read here, not where a version begins: on a GPU this waits for the update, as the next token does anyway.
        if self._unread is not None:
            self._not_finite, self._unread = self._unread.names(), None
        if self._not_finite:
            self._refuse_everything()
            return
        self._score()
        plan = self._scheduler.plan()
        if plan.needs_reading:
            self._read(self._launched)
            plan = self._scheduler.plan()
        runner = self._ready_runner()
        for sequence in plan.preempted:
            runner.leave(sequence)
        before, self._launched = self._launched, []
        if plan.decode:
            self._launched.append(runner.decode(plan.decode, plan.num_rounds))
        if plan.prefill:
            self._launched.append(runner.prefill(plan.prefill))
        self._scheduler.launched(plan)
        self._read(before)  # while the device computes the next tokens
        if not (runner.runs_ahead and plan.is_plain):
            self._read(self._launched)

    def _read(self, launched: list[Read]) -> None:
        while launched:
            self._absorb(launched.pop(0)())

    def _refuse_everything(self) -> None:
        """Fail all requests instead of sampling from non-finite weights. The engine keeps running for the next version."""

        def error() -> NotFinite:
            what = f"The weights of version {self.version} are not finite"
            return not_finite(
                what, self._not_finite, "Publish other weights: those of an earlier checkpoint, at a lower lr."
            )

        self._scoring.fail(error)
        for sequence in self._scheduler.sequences():
            self._finish(sequence, error())

    def _absorb(self, sampled: list[Sampled]) -> None:
        """Append new tokens; deliver finished sequences."""
        version, running, absorb = self._scheduler.version, self._scheduler.running, self._stop_rule.absorb
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
        self._answers.send()

    def _score(self) -> None:
        """Score as many texts as fit one pass; the rest wait for later steps, so that generation continues in between."""
        batch = self._scoring.take(
            max_tokens=self._scheduler.limits.max_prefill_tokens, max_logits=_SCORED_LOGITS // self.vocab_size
        )
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
                scoring.answer.set_exception(LogitsNotFinite(self.version, len(scoring.tokens)))
            else:
                scoring.answer.set_result(own)

    def _finish(self, sequence: Sequence, error: BaseException | None) -> None:
        if self._runner is not None:
            if self.records_experts and error is None and isinstance(self._runner, RecordsExperts):
                sequence.experts = self._runner.experts(sequence)
            self._runner.keep(sequence)
            self._runner.leave(sequence)
        self._scheduler.remove(sequence)
        with self._changed:
            self._open.discard(sequence)
        sequence.deliver(sequence, error)

    def _fail_everything(self) -> None:
        with self._changed:
            open_ones, self._open = sorted(self._open, key=lambda sequence: sequence.number), set()
            self._incoming = []
        for sequence in open_ones:
            sequence.deliver(sequence, self._refusal())
        self._scoring.fail(self._refusal)
        if self._death is None:  # after a crash the scheduler's state may be invalid
            for sequence in open_ones:
                self._scheduler.remove(sequence)

    def _ready_runner(self) -> Runner:
        self._runner = self._runner or self._make_runner()
        return self._runner

    def _make_runner(self) -> Runner:
        pool, limits = self._scheduler.pool, self._scheduler.limits
        settings = RunnerSettings(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_sequences=limits.max_sequences,
            max_length=self.max_model_len,
            compile_layers=self._compile_layers,
            pack_weights=self._pack_weights,
            adapters=self.adapters is not None,
        )
        view = shared_view(self.model)  # separate modules over the same parameters
        self._merged = merge_experts(view)
        runner = self._backend.runner(view, settings)
        if self._device.type == "cuda":
            # A pass of the garbage collector over torch, transformers and a model stops this thread for 0.2 s. `close` undoes it.
            gc.collect()
            gc.freeze()
        return runner

    def _decode(self, ids: list[int]) -> str:
        return "" if self.tokenizer is None else decode_reply(self.tokenizer, ids)


class _Answers:
    """Finished requests whose event loops the worker has not woken. To wake one takes a system call during which a busy loop
    takes Python's lock for milliseconds, so each loop is woken once for all sequences that finish together."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], BaseException | None]]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[None]", error: BaseException | None) -> None:
        self._by_loop.setdefault(loop, []).append((answer, error))

    def send(self) -> None:
        ready, self._by_loop = self._by_loop, {}
        for loop, answers in ready.items():
            with contextlib.suppress(RuntimeError):  # the loop and its waiting tasks are gone
                loop.call_soon_threadsafe(self._settle, answers)

    @staticmethod
    def _settle(answers: "list[tuple[asyncio.Future[None], BaseException | None]]") -> None:
        for answer, error in answers:
            if not answer.done():
                answer.set_exception(error) if error is not None else answer.set_result(None)


def _num_finite(logprobs: list[float]) -> int:
    """Number of log-probs before the first NaN, by which samplers report non-finite logits."""
    if math.isfinite(sum(logprobs)):
        return len(logprobs)
    return next(i for i, logprob in enumerate(logprobs) if not math.isfinite(logprob))


def _died(error: BaseException) -> EngineClosed:
    return EngineClosed(f"The engine has died: {type(error).__name__}: {error}. Make a new one.")
