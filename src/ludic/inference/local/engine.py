"""`LocalEngine`: the policy server that lives in your process.

Requests come from asyncio; one worker thread steps the model. It serves a transformers model with that model's own
parameters: when a trainer has changed them, `new_version` is all there is to publishing. Between two steps the worker
can be paused, its weights replaced, its cache given back; sequences that were running go on under the new weights, and
their traces say which version sampled which token.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future as ThreadFuture
from typing import Any

import numpy as np
import torch

from ludic.inference.local.blocks import BlockPool
from ludic.inference.local.kv import KVShape
from ludic.inference.local.memory import free_memory
from ludic.inference.local.runner import CPURunner
from ludic.inference.local.sampling import sample
from ludic.inference.local.scheduler import Limits, Plan, Scheduler
from ludic.inference.local.sequence import Sequence
from ludic.inference.local.stopping import StopRule
from ludic.models.attention import route_attention
from ludic.models.loading import load_model
from ludic.types import (
    ChatResponse,
    ConfigError,
    Info,
    LudicError,
    PromptTooLong,
    TokenCompletionRequest,
    TokenIds,
    derive_seed,
    token_array,
)

logger = logging.getLogger(__name__)


class EngineClosed(LudicError, RuntimeError):
    """The engine was shut down, or has died; the message says which."""


class QueueFull(LudicError, RuntimeError):
    """More requests than the engine keeps waiting."""


class LocalEngine:
    """Continuous batching, prefix sharing and live weights, in one object."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_sequences: int = 64,
        max_model_len: int | None = None,
        max_prefill_tokens: int = 2048,
        block_size: int = 16,
        kv_memory_fraction: float = 0.3,
        kv_tokens: int | None = None,
        max_queue: int = 100_000,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        loaded = load_model(model, tokenizer, dtype=dtype, device=device)
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        config = self.model.config.get_text_config()
        route_attention(self.model)
        self.max_model_len = max_model_len or config.max_position_embeddings
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]
        self._eos_ids = _eos_ids(self.model, self.tokenizer)
        self._shape = _kv_shape(self.model)
        num_blocks = _num_blocks(
            self._shape, block_size, kv_memory_fraction, kv_tokens, max_sequences, self.max_model_len
        )
        self._scheduler = Scheduler(
            BlockPool(num_blocks, block_size),
            Limits(max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens),
        )
        self._scheduler.version = version
        self._runner: CPURunner | None = None
        self._stop_rule = StopRule(self._decode, self.max_model_len)
        self._max_queue = max_queue
        self._seed = seed
        self._numbers = itertools.count()
        # Everything below is shared with the worker and guarded by the condition.
        self._changed = threading.Condition()
        self._incoming: list[Sequence] = []
        self._scoring: list[tuple[np.ndarray[Any, Any], float, ThreadFuture[np.ndarray[Any, Any]]]] = []
        self._num_open = 0
        self._num_pauses = 0
        self._is_stepping = False
        self._is_closed = False
        self._death: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="ludic-engine", daemon=True)
        self._worker.start()

    # --- requests (any thread, any event loop) ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion. Cancelling the awaiting task takes the request out of the batch."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def deliver(sequence: Sequence, error: BaseException | None) -> None:
            def settle() -> None:
                if not answer.done():
                    answer.set_exception(error) if error is not None else answer.set_result(None)

            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                loop.call_soon_threadsafe(settle)

        sequence = self._submit(request, deliver)
        try:
            await answer
        except asyncio.CancelledError:
            self._cancel(sequence)
            raise
        response = sequence.response(self._decode)
        if not request.return_.return_chosen_logprobs:
            response.completion_logprobs = None
        return response, {}

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> np.ndarray[Any, Any]:
        """Log-probability of each completion token after the prompt, under this model: teachers and references."""
        prompt, completion = token_array(prompt_token_ids), token_array(completion_token_ids)
        tokens = np.concatenate([prompt, completion])
        if not len(prompt):
            raise ConfigError("score_tokens needs at least one prompt token: the first token has no log-probability.")
        self._check_ids(tokens)
        if len(tokens) > self.max_model_len:
            raise PromptTooLong(len(tokens), self.max_model_len)
        answer: ThreadFuture[np.ndarray[Any, Any]] = ThreadFuture()
        with self._changed:
            self._require_alive()
            self._scoring.append((tokens, temperature, answer))
            self._changed.notify_all()
        scores = await asyncio.wrap_future(answer)
        return scores[len(prompt) - 1 :]

    async def get_policy_version(self) -> int:
        return self.version

    @property
    def version(self) -> int:
        return self._scheduler.version

    @property
    def stats(self) -> dict[str, int]:
        """What the engine is doing, for logs and /metrics."""
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

    def _submit(self, request: TokenCompletionRequest, deliver: Any) -> Sequence:
        self._check(request)
        number = next(self._numbers)
        stop_ids = frozenset(request.sampling.stop_token_ids)
        sequence = Sequence(
            number=number,
            request=request,
            deliver=deliver,
            seed=request.seed if request.seed is not None else derive_seed(self._seed, number),
            stop_ids=stop_ids if request.sampling.ignore_eos else stop_ids | self._eos_ids,
        )
        with self._changed:
            self._require_alive()
            if self._num_open >= self._max_queue:
                raise QueueFull(
                    f"{self._num_open} requests are open already (max_queue={self._max_queue}). Send fewer at once."
                )
            self._num_open += 1
            self._incoming.append(sequence)
            self._changed.notify_all()
        return sequence

    def _cancel(self, sequence: Sequence) -> None:
        sequence.is_cancelled = True
        with self._changed:
            self._changed.notify_all()

    def _check(self, request: TokenCompletionRequest) -> None:
        ids, params = request.prompt_token_ids, request.sampling
        if not len(ids):
            raise ConfigError("The prompt is empty; a model needs at least one token to continue.")
        self._check_ids(ids)
        unknown = [i for i in params.stop_token_ids if not 0 <= i < self.vocab_size]
        if unknown:
            raise ConfigError(f"stop_token_ids {unknown} are not in the vocabulary of {self.vocab_size} tokens.")
        wanted = len(ids) + params.max_tokens
        if wanted > self.max_model_len:
            raise PromptTooLong(
                wanted, self.max_model_len, f"That is {len(ids)} of the prompt and max_tokens={params.max_tokens}."
            )
        room = self._scheduler.pool.num_blocks * self._scheduler.pool.block_size
        if wanted > room:
            raise PromptTooLong(wanted, room, "The KV cache holds no more; raise kv_tokens or kv_memory_fraction.")

    def _check_ids(self, ids: np.ndarray[Any, Any]) -> None:
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ConfigError(
                f"The prompt has token ids from {ids.min()} to {ids.max()}, but the model knows 0 to {self.vocab_size - 1}. "
                "Does the tokenizer belong to this model?"
            )

    def _require_alive(self) -> None:
        if self._death is not None:
            raise EngineClosed(f"The engine has died: {type(self._death).__name__}: {self._death}. Make a new one.")
        if self._is_closed:
            raise EngineClosed("The engine has been shut down.")

    # --- weights ---

    @contextlib.contextmanager
    def updating(self, version: int | None = None) -> Iterator[None]:
        """Stand still between two tokens while the weights are changed; a new version begins at the end.

        For a trainer that shares the parameters: `with engine.updating(): optimizer.step()`.
        """
        self.pause()
        try:
            yield
            self._begin_version(version)
        finally:
            self.resume()

    def new_version(self, version: int | None = None) -> int:
        """The shared parameters have changed: nothing computed so far is used again."""
        with self.updating(version):
            pass
        return self.version

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        """Copy new values into the model, all or nothing, and begin a new version."""
        own = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        unknown = sorted(set(params) - set(own))
        wrong = sorted(n for n, t in params.items() if n in own and tuple(t.shape) != tuple(own[n].shape))
        if unknown or wrong:
            raise ConfigError(
                f"These weights do not fit {self.name}: unknown names {unknown[:3]}, wrong shapes {wrong[:3]}. Nothing was changed."
            )
        with self.updating(None if version is None else int(version)), torch.no_grad():
            for name, tensor in params.items():
                own[name].copy_(tensor)
        return str(self.version)

    def _begin_version(self, version: int | None) -> None:
        restarted = self._scheduler.new_version(self.version + 1 if version is None else version)
        if self._runner is not None:
            for sequence in restarted:
                self._runner.leave(sequence)

    # --- standing still ---

    def pause(self) -> None:
        """Return when the worker stands still between two steps; requests wait."""
        with self._changed:
            self._require_alive()
            self._num_pauses += 1
            self._changed.wait_for(lambda: not self._is_stepping)

    def resume(self) -> None:
        with self._changed:
            self._num_pauses -= 1
            self._changed.notify_all()

    def release_cache(self) -> None:
        """Give the KV memory back until the next request; running sequences are computed again."""
        self.pause()
        try:
            self._begin_version(self.version)
            self._runner = None
        finally:
            self.resume()

    def close(self) -> None:
        """Stop the worker; requests that are still open fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._worker.join(timeout=60)

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
                    with self._changed:
                        self._is_stepping = False
                        self._changed.notify_all()
        except BaseException as error:
            logger.exception("the engine's worker died")
            with self._changed:
                self._death = error
                self._changed.notify_all()
        self._fail_everything()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when it is time to go."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or (self._num_pauses == 0 and (self._incoming or self._scoring or self._scheduler.has_work))
                )
            )
            if self._is_closed:
                return False
            self._is_stepping = True
            for sequence in self._incoming:
                self._scheduler.add(sequence)
            self._incoming = []
            return True

    def _step(self) -> None:
        self._drop_cancelled()
        self._score()
        plan = self._scheduler.plan()
        runner = self._ready_runner()
        for sequence in plan.preempted:
            runner.leave(sequence)
        if plan.prefill:
            self._prefill(runner, plan)
        if plan.decode:
            logits_NV, sequences = runner.decode(plan.decode)
            self._sample(logits_NV, sequences)

    def _prefill(self, runner: CPURunner, plan: Plan) -> None:
        logits_NV = runner.prefill(plan.prefill)
        for chunk in plan.prefill:
            self._scheduler.computed(chunk)
        self._sample(logits_NV, [chunk.sequence for chunk in plan.prefill if chunk.reaches_the_end])

    def _sample(self, logits_NV: torch.Tensor, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        tokens, logprobs = sample(logits_NV, sequences)
        version = self._scheduler.version
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.append(token, logprob, version)
            self._scheduler.decoded(sequence)
            self._stop_rule.apply(sequence)
            if sequence.on_token is not None:
                sequence.on_token(sequence)
            if sequence.finish_reason is not None:
                self._finish(sequence, None)

    def _score(self) -> None:
        with self._changed:
            jobs, self._scoring = self._scoring, []
        for tokens, temperature, answer in jobs:
            if answer.set_running_or_notify_cancel():
                answer.set_result(self._ready_runner().score([tokens], temperature)[0])

    def _drop_cancelled(self) -> None:
        for sequence in [*self._scheduler.waiting, *self._scheduler.running.values()]:
            if sequence.is_cancelled:
                self._finish(sequence, None)

    def _finish(self, sequence: Sequence, error: BaseException | None) -> None:
        self._scheduler.remove(sequence)
        if self._runner is not None:
            self._runner.leave(sequence)
        with self._changed:
            self._num_open -= 1
        sequence.deliver(sequence, error)

    def _fail_everything(self) -> None:
        with self._changed:
            open_ones = [*self._incoming, *self._scheduler.waiting, *self._scheduler.running.values()]
            scoring, self._scoring = self._scoring, []
            self._incoming = []
        try:
            self._require_alive()
        except EngineClosed as error:
            for sequence in open_ones:
                self._finish(sequence, error)
            for _, _, answer in scoring:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error)

    def _ready_runner(self) -> CPURunner:
        if self._runner is None:
            pool = self._scheduler.pool
            self._runner = CPURunner(self.model, self._shape, pool.num_blocks, pool.block_size)
        return self._runner

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


# --- facts about a model -----------------------------------------------------------------------------------------


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that the model or its tokenizer ends a sequence with."""
    found: set[int] = set()
    configured = getattr(model, "generation_config", None) or model.config
    eos = configured.eos_token_id
    found |= set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def _kv_shape(model: Any) -> KVShape:
    config = model.config.get_text_config()
    heads = config.num_key_value_heads or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weight = model.get_input_embeddings().weight
    return KVShape(heads=((heads, size),) * config.num_hidden_layers, dtype=weight.dtype, device=weight.device)


def _num_blocks(
    shape: KVShape, block_size: int, fraction: float, kv_tokens: int | None, max_sequences: int, max_length: int
) -> int:
    """As many as the given number of tokens, or the given fraction of free memory, or all that could ever be used."""
    if kv_tokens is None:
        # Half of it: the dense rows of the decoding sequences take about as much again.
        affordable = int(free_memory(shape.device) * fraction / 2) // shape.bytes_per_token
        kv_tokens = min(affordable, max_sequences * max_length)
    if kv_tokens < block_size:
        raise ConfigError(f"The KV cache would hold {kv_tokens} tokens; raise kv_tokens or kv_memory_fraction.")
    return -(-kv_tokens // block_size)
