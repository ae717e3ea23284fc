"""Hybrids: the embedded engine beside transformers' `generate` and beside itself on transformers' own cache; training steps.

Random weights in bf16 (fp32 on a CPU). `--requests` prompts of 100 to 600 tokens arrive together; each is answered with
`--new-tokens` tokens at temperature 1. `generate` pads the prompts on the left and runs them as one batch. On transformers' own
cache only sequences of one length share a pass, so that way answers with `--few` tokens. A training step is forward and backward
of `--samples` samples of 200 to 1,000 tokens, packed and padded. Where flash-linear-attention is installed, the layers use it.

    PYTHONPATH=src python benchmarks/hybrid_engine.py --only lfm2
    PYTHONPATH=src python benchmarks/hybrid_engine.py --requests 4 --new-tokens 16 --small      # to try it on a CPU
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
import tyro
from machine import ON_GPU, commit, hardware

from ludic.inference.local import LocalEngine
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import ReturnSpec, SamplingParams, SAWItem, TokenCompletionRequest
from ludic_gpu.hybrids import runners
from ludic_gpu.hybrids.states import Mixers

VOCAB = 65_536
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # short convolutions and attention, as LFM2-1.2B
    "lfm2": ("Lfm2", {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }),
    # gated delta nets and attention, three to one, as a dense Qwen3.5 of 0.8B
    "delta": ("Qwen3_5Text", {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "intermediate_size": 3584, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }),
    # Mamba-2 beside attention in every layer, as Falcon-H1-0.5B
    "falcon_h1": ("FalconH1", {
        "hidden_size": 1024, "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 2048, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1,
    }),
}  # fmt: skip
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512}


@dataclass(frozen=True, kw_only=True)
class Settings:
    only: tuple[str, ...] = tuple(SHAPES)
    requests: int = 128
    new_tokens: int = 256
    few: int = 3
    """New tokens on transformers' own cache; 0 leaves it out."""
    samples: int = 16
    """Of one training step; 0 leaves training out."""
    small: bool = False


def make_model(name: str, *, small: bool) -> Any:
    kind, sizes = SHAPES[name]
    if small:
        sizes = sizes | SMALL | ({"full_attn_idxs": [2]} if name == "lfm2" else {})
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, max_position_embeddings=4096, **sizes)
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    return model.eval()


def make_prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(10, VOCAB, size=rng.integers(100, 600)).tolist() for _ in range(count)]


def engine_speed(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, str]:
    """Tokens per second of the second run, and how the model runs."""
    engine = LocalEngine(model, max_model_len=1024, max_sequences=len(prompts))
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True)

    async def ask(seed: int) -> None:
        asked = [
            TokenCompletionRequest(
                model="", prompt_token_ids=p, sampling=params, return_=ReturnSpec.for_rl(), seed=seed
            )  # type: ignore[arg-type]
            for p in prompts
        ]
        await asyncio.gather(*map(engine.complete_tokens, asked))

    try:
        asyncio.run(ask(0))  # captures
        seconds, count = timed(lambda: asyncio.run(ask(1))), len(prompts) * new_tokens
        runner = engine._worker.runner
        is_graphed = getattr(runner, "_is_capturable", False)
        return count / seconds, f"{type(runner).__name__}{', CUDA graphs' if is_graphed else ''}"
    finally:
        engine.close()


def generate_speed(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    run = lambda count: model.generate(  # noqa: E731
        ids, attention_mask=mask, do_sample=True, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
    )
    run(4)
    return len(prompts) * new_tokens / timed(lambda: run(new_tokens))


def training_speed(model: Any, num_samples: int, *, packed: bool) -> float:
    """Tokens per second of the second step."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(200, 1000, size=num_samples)
    items = [
        SAWItem(rng.integers(10, VOCAB, size=n).astype(np.int32), None, np.arange(n) >= n // 4, 1.0, {})
        for n in lengths
    ]
    policy = TrainedPolicy(model, packed=packed)

    def step() -> None:
        logps, _ = policy.logps(policy.batch(items))
        logps.sum().backward()
        model.zero_grad(set_to_none=True)

    step()
    return float(lengths.sum()) / timed(step)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(settings: Settings) -> None:
    fla = "with" if find_spec("fla") else "without"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {fla} flash-linear-attention"
    print(f"{hardware()}, {versions}, commit {commit()}")
    prompts = make_prompts(settings.requests)
    for name in settings.only:
        model = make_model(name, small=settings.small)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        ours, way = engine_speed(model, prompts, settings.new_tokens)
        print(f"{name} ({millions:.0f}M): engine {ours:,.0f} tok/s ({way})", flush=True)
        theirs = generate_speed(model, prompts, settings.new_tokens)
        print(f"  generate {theirs:,.0f} tok/s: {ours / theirs:.2f} times", flush=True)
        if settings.few:
            with ExitStack() as patched:
                patched.enter_context(patch.object(runners, "probe_mixers", lambda model: Mixers(False, False, False)))
                cached, way = engine_speed(model, prompts, settings.few)
            print(f"  {way}: {cached:,.0f} tok/s: {ours / cached:.1f} times", flush=True)
        if settings.samples:
            packed, padded = (training_speed(model, settings.samples, packed=way) for way in (True, False))
            print(
                f"  training: packed {packed:,.0f} tok/s, padded {padded:,.0f}: {packed / padded:.2f} times", flush=True
            )
        del model


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
