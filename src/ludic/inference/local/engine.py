"""`LocalEngine`: a policy server inside your process.

Requests come from asyncio; one worker thread steps the model. It serves a transformers model on that model's own parameters:
after a trainer has changed them, `new_version` publishes them. Between two steps the worker can be paused, its weights
replaced and its cache freed; running sequences continue under the new weights, and their traces record which version sampled
which token.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from ludic.inference.local.backends import choose_backend
from ludic.inference.local.blocks import BlockPool
from ludic.inference.local.kv import eos_ids, free_memory, num_blocks
from ludic.inference.local.runner import Backend, RunnerSettings
from ludic.inference.local.sampling import PromptScores, Scoring
from ludic.inference.local.scheduler import Limits, Scheduler
from ludic.inference.local.sequence import RequestLimits, Sequence, StopRule, TokenStream
from ludic.inference.local.worker import Worker
from ludic.inference.templates.conversation import decode_reply
from ludic.models.adapters.adapter import LoraAdapter
from ludic.models.adapters.forward import AdapterNames, PackedAdapter
from ludic.models.head import plain_model
from ludic.models.kinds import image_processor_of, is_vision_model
from ludic.models.loading import load_model
from ludic.models.weights import FiniteCheck, not_finite
from ludic.types import (
    ChatResponse,
    ConfigError,
    Info,
    TokenChunk,
    TokenCompletionRequest,
    TokenIds,
    derive_seed,
    token_array,
)


class CacheSettings(TypedDict, total=False):
    """The size of an engine's cache and of its steps; what is left out suits the device."""

    max_sequences: int | None
    """Requests that are computed at a time; others wait."""
    max_prefill_tokens: int | None
    block_size: int | None
    kv_memory_fraction: float | None
    kv_tokens: int | None
    keep_room: bool
    """Admit a request only if the cache has room for the usual length of a reply; fewer are preempted."""


class LocalEngine:
    """Continuous batching, prefix sharing and live weights, in one object."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        max_queue: int = 100_000,
        compile_layers: bool = True,
        pack_weights: bool | None = None,
        record_experts: bool = False,
        adapters: bool = False,
        seed: int = 0,
        version: int = 0,
        **cache: Unpack[CacheSettings],
    ) -> None:
        """`record_experts`: responses of a mixture say to which experts each token went (docs/mixtures.md).
        `adapters`: requests may name a LoRA adapter that `add_adapter` has added (docs/engine.md).
        `pack_weights`: keep copies of matrices in the order that the hardware reads them; False saves their memory.
        `compile_layers`: False runs every model through its own layers as they are."""
        if unknown := sorted(cache.keys() - CacheSettings.__annotations__.keys()):  # before the model is loaded
            raise TypeError(f"LocalEngine() got an unexpected keyword argument {unknown[0]!r}")
        if adapters and record_experts:
            raise ConfigError("An engine with adapters=True has no record_experts. Leave one out.")
        loaded = load_model(model, tokenizer, dtype=dtype, device=device)
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        if names := FiniteCheck(self.model.named_parameters()).names():
            raise not_finite(f"{self.name} cannot be served", names, "Load other weights.")
        self.records_experts = record_experts
        images = image_processor_of(self.tokenizer)
        backend = choose_backend(
            self.model, max_model_len, images=images, records_experts=record_experts, has_adapters=adapters
        )
        embedding = self.model.get_input_embeddings().weight
        self.max_model_len, self.vocab_size = backend.max_length, int(embedding.shape[0])
        scheduler = _make_scheduler(backend, embedding.device, **cache)
        scheduler.version = version
        self.max_sequences = scheduler.limits.max_sequences
        """Requests that are computed at a time; others wait."""
        self.adapters = AdapterNames(self.model) if adapters else None
        """The adapters that requests may name; None for an engine without."""
        self._limits = self._request_limits(scheduler.pool)
        self._seed = seed
        self._numbers = itertools.count()
        settings = RunnerSettings(
            num_blocks=scheduler.pool.num_blocks,
            block_size=scheduler.pool.block_size,
            max_sequences=self.max_sequences,
            max_length=self.max_model_len,
            compile_layers=compile_layers,
            pack_weights=pack_weights,
            adapters=adapters,
        )
        stop_rule = StopRule(self._decode, self.max_model_len)
        self._worker = Worker(
            self.model, backend, scheduler, settings, stop_rule, max_queue=max_queue, records_experts=record_experts
        )

    def _request_limits(self, pool: BlockPool) -> RequestLimits:
        return RequestLimits(
            name=self.name,
            vocab_size=self.vocab_size,
            eos_ids=frozenset(i for i in eos_ids(self.model, self.tokenizer) if 0 <= i < self.vocab_size),
            max_model_len=self.max_model_len,
            max_total_tokens=min(self.max_model_len, pool.num_blocks * pool.block_size),
            takes_images=is_vision_model(plain_model(self.model)),
            has_tokenizer=self.tokenizer is not None,
        )

    # --- requests (any thread, any event loop) ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion. Cancelling the awaiting task removes the request from the batch."""
        loop = asyncio.get_running_loop()
        # Cheaper for many short requests than a stream of one chunk.
        answer: asyncio.Future[None] = loop.create_future()
        sequence = self._submit(request, lambda _, error: self._worker.answers.add(loop, answer, error))
        try:
            await answer
        except asyncio.CancelledError:
            self._worker.cancel(sequence)
            raise
        response = sequence.response(self._decode)
        if not request.return_.return_chosen_logprobs:
            response.completion_logprobs = None
        return response, {}

    async def stream_tokens(self, request: TokenCompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same completion in chunks as they are sampled; the last chunk also holds the whole.

        Closing the generator early removes the request from the batch: iterate within `contextlib.aclosing`.
        """
        stream = TokenStream()
        sequence = self._submit(request, stream.deliver, stream.on_token)
        is_last = False
        try:
            while not is_last:
                ids, logprobs, is_last = await stream.next()
                response = sequence.response(self._decode) if is_last else None
                yield TokenChunk(token_ids=ids, logprobs=logprobs, response=response)
        finally:
            if not is_last:
                self._worker.cancel(sequence)

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
        """Scores of each token after the first: its log-probability, the `top_k` most probable tokens in its place,
        and the log-probabilities of `targets` [len(tokens) - 1, K] in its place (-1 is none)."""
        ids = token_array(tokens)
        wanted = None if targets is None else np.asarray(targets, dtype=np.int64)
        self._limits.check_targets(len(ids), top_k, wanted)
        return await self._scores(Scoring(ids, 1, 1.0, top_k, wanted, self._find(adapter)))

    async def _scores(self, scoring: Scoring) -> PromptScores:
        self._limits.check_text(scoring.tokens)
        self._worker.score(scoring)
        return await asyncio.wrap_future(scoring.answer)

    async def get_policy_version(self) -> int:
        return self.version

    @property
    def version(self) -> int:
        return self._worker.scheduler.version

    @property
    def stats(self) -> dict[str, int]:
        """Counters for logs and /metrics."""
        scheduler = self._worker.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": self._worker.num_waiting,
            "kv_blocks_used": scheduler.pool.num_used,
            "kv_blocks": scheduler.pool.num_blocks,
            "preemptions": scheduler.num_preemptions,
            "prefix_tokens_reused": scheduler.num_prefix_tokens,
            "policy_version": scheduler.version,
        }

    @property
    def failure(self) -> str | None:
        """Why the engine no longer answers; None while it does."""
        refusal = self._worker.refusal()
        return None if refusal is None else str(refusal)

    @property
    def max_total_tokens(self) -> int:
        """Maximum tokens of one request, prompt and completion: the model's limit or the cache's, whichever is less."""
        return self._limits.max_total_tokens

    def _submit(
        self, request: TokenCompletionRequest, deliver: Any, on_token: Callable[[Sequence], None] | None = None
    ) -> Sequence:
        self._limits.check(request)
        number = next(self._numbers)
        seed = request.seed if request.seed is not None else derive_seed(self._seed, number)
        # 63 bits: a GPU holds seeds as signed 64-bit integers, and a larger seed would crash the worker.
        seed &= (1 << 63) - 1
        stop_ids = self._limits.stop_ids(request.sampling)
        adapter = self._find(request.adapter)
        sequence = Sequence(number, request, deliver, seed, stop_ids, on_token=on_token, adapter=adapter)
        self._worker.submit(sequence)
        return sequence

    def abort(self) -> int:
        """Remove every open request; each fails with `RequestAborted`. Returns their number."""
        return self._worker.abort()

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
                self._worker.begin_version(version)
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

    # --- pausing ---

    def pause(self) -> None:
        """Returns when the worker has stopped between two steps; requests wait."""
        self._worker.pause()

    def resume(self) -> None:
        self._worker.resume()

    def release_cache(self) -> None:
        """Free the KV memory until the next request; running sequences are recomputed."""
        self._worker.release_cache()

    def close(self) -> None:
        """Stop the worker; open requests fail."""
        self._worker.close()

    async def __aenter__(self) -> "LocalEngine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def _decode(self, ids: list[int]) -> str:
        return "" if self.tokenizer is None else decode_reply(self.tokenizer, ids)


_STATES_SHARE = 0.3
"""Share of free memory for the recurrent states of all sequences, where `max_sequences` is not given."""


def _make_scheduler(
    backend: Backend,
    device: torch.device,
    *,
    max_sequences: int | None = None,
    max_prefill_tokens: int | None = None,
    block_size: int | None = None,
    kv_memory_fraction: float | None = None,
    kv_tokens: int | None = None,
    keep_room: bool = False,
) -> Scheduler:
    """A scheduler over a pool of blocks; a setting that is None gets what suits the device."""
    on_gpu = device.type == "cuda"
    # Every member of a group computes what follows the last full block itself. On a GPU a kernel reads whole blocks.
    block_size = block_size if block_size is not None else (16 if on_gpu else 4)
    states = backend.bytes_per_sequence
    if max_sequences is None:
        usual = 512 if on_gpu else 64
        max_sequences = usual if states == 0 else max(1, min(usual, int(_STATES_SHARE * free_memory(device)) // states))
    # On a CPU the dense rows of the decoding sequences take about as much again as the pool.
    fraction = kv_memory_fraction or (0.6 if on_gpu else 0.15)
    room = max_sequences * backend.max_length
    pool_blocks = num_blocks(
        backend.bytes_per_token, device, block_size, fraction=fraction, kv_tokens=kv_tokens, most=room,
        reserved=max_sequences * 5 // 4 * states,  # with rows that pad a round
    )  # fmt: skip
    limits = Limits(
        max_sequences,
        max_prefill_tokens or (16_384 if on_gpu else 2048),
        max_rounds=backend.max_rounds,
        # A pool that holds every sequence at full length needs no estimates.
        keeps_room=keep_room and pool_blocks * block_size < room,
        shares_prefixes=backend.shares_prefixes,
    )
    return Scheduler(BlockPool(pool_blocks, block_size), limits)
