"""Tiny random models of real families, what transformers itself says they answer, and engines to ask them.

The weights are large (initializer_range 0.3), so that attention matters and greedy texts do not end in a loop of one
token: with the usual 0.02 a broken cache would hardly show.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

from ludic.inference.local import LocalEngine
from ludic.types import ChatResponse, ReturnSpec, SamplingParams, TokenCompletionRequest

VOCAB = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 6,
                        "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "mistral-sliding": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "gemma2-softcap": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0,
                                  "query_pre_attn_scalar": 8, "tie_word_embeddings": False, "layer_types": _MIXED_LAYERS}),
    "gemma3-sliding": ("Gemma3", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "tie_word_embeddings": False,
                                  "layer_types": _MIXED_LAYERS}),
    "phi-output-bias": ("Phi", {"tie_word_embeddings": False}),
}  # fmt: skip
_CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig"}


def new_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A model for one test alone."""
    kind, own = FAMILIES[family]
    config = getattr(transformers, _CONFIG_NAMES.get(kind, f"{kind}Config"))(**{**_SIZES, **own, **overrides})
    config._attn_implementation = "eager"  # the only one of transformers' own that knows soft-capping
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() == 1:  # biases and norms begin as zeros or ones; make them count
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@cache
def shared_model(family: str = "llama") -> Any:
    """For tests that leave the weights alone. The engine may have it; `reference_model` is for transformers."""
    return new_model(family)


@cache
def reference_model(family: str = "llama") -> Any:
    return new_model(family)


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers' own generate answers."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@cache
def family_greedy(family: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return greedy(reference_model(family), prompt, num_tokens)


@torch.no_grad()
def plain_logprobs(
    model: Any, prompt: Iterable[int], completion: Iterable[int], temperature: float = 1.0
) -> np.ndarray[Any, Any]:
    """Log-probability of each completion token, from one ordinary forward pass."""
    prompt, completion = list(prompt), list(completion)
    logits_TV = model(input_ids=torch.tensor([prompt + completion])).logits[0].double() / temperature
    logps_NV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
    return logps_NV.gather(-1, torch.tensor(completion)[:, None])[:, 0].numpy()


def copy_of(model: Any) -> Any:
    """The same weights in a separate model with transformers' attention."""
    copied = deepcopy(model)
    copied.set_attn_implementation("eager")
    return copied


def some_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(VOCAB, size=length).tolist())


# --- asking --------------------------------------------------------------------------------------------------------


def make_engine(model: Any = None, tokenizer: Any = None, **settings: Any) -> LocalEngine:
    return LocalEngine(
        shared_model() if model is None else model, tokenizer, **{"kv_tokens": 2048, "block_size": 4, **settings}
    )


def request(prompt: Sequence[int], *, seed: int | None = None, **sampling: Any) -> TokenCompletionRequest:
    """Greedy and 16 tokens, unless told otherwise."""
    return TokenCompletionRequest(
        model="tiny",
        prompt_token_ids=list(prompt),  # type: ignore[arg-type]
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **sampling}),
        return_=ReturnSpec.for_rl(),
        seed=seed,
    )


async def ask(engine: LocalEngine, prompt: Sequence[int], **settings: Any) -> ChatResponse:
    async with asyncio.timeout(30):
        response, _ = await engine.complete_tokens(request(prompt, **settings))
    return response


async def ask_all(engine: LocalEngine, requests: Iterable[TokenCompletionRequest]) -> list[ChatResponse]:
    """Together: all of them are there before the first step begins, so that every run is the same."""
    engine.pause()
    asked = [asyncio.ensure_future(engine.complete_tokens(r)) for r in requests]
    await asyncio.sleep(0)
    engine.resume()
    async with asyncio.timeout(60):
        return [response for response, _ in await asyncio.gather(*asked)]


def tokens(response: ChatResponse) -> list[int]:
    return response.completion_token_ids.tolist()


async def eventually(condition: Callable[[], bool], what: str = "") -> None:
    """Wait for the worker thread to get there."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"it never happened: {what}")


async def in_time(awaitable: Awaitable[Any]) -> Any:
    """Nothing may hang."""
    async with asyncio.timeout(30):
        return await awaitable


class Gate:
    """Holds the worker inside a chosen forward pass of the model, so that a test can act at that moment."""

    def __init__(self, model: Any, *, at_call: int) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        self._calls_left = at_call
        self._handle = model.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, *_: Any) -> None:
        self._calls_left -= 1
        if self._calls_left == 0:
            self._reached.set()
            assert self._opened.wait(30), "the test never opened the gate"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 30), "the model was not called often enough"

    def open(self) -> None:
        self._handle.remove()
        self._opened.set()


def extreme_settings(vocab_size: int, length: int) -> list[dict[str, Any]]:
    """Sampling parameters at their limits, for completions of `length` tokens."""
    return [
        {"temperature": 1e-3},
        {"temperature": 1e6},
        {"top_p": 1e-50},
        {"top_p": 5e-324},
        {"top_k": 2**31 - 1},
        {"top_k": 1, "top_p": 1e-300, "min_p": 0.999},
        {"min_p": 5e-324},
        {"min_p": 1 - 1e-16},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {
            "repetition_penalty": 0.01,
            "temperature": 1e-3,
            "frequency_penalty": -2,
            "presence_penalty": -2,
            "top_p": 1e-50,
        },
        {"repetition_penalty": 100, "temperature": 1e-3, "frequency_penalty": 2, "presence_penalty": 2, "min_p": 0.999},
        {"min_tokens": length},
        {"stop_token_ids": tuple(range(vocab_size))},
        {"stop_token_ids": tuple(range(1, vocab_size)), "min_tokens": 3},
    ]
