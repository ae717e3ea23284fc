"""The embedded engine against `transformers.generate` (CPU), vLLM (GPU) and the hardware's own limit, in one run.

End to end through `complete_tokens`: asyncio, scheduler and sampling included. On a CPU: SmolLM2-135M's shape, a group with a
shared prompt, and a tiny model dominated by Python overhead (in bf16: Qwen2.5-1.5B's shape). On a CUDA GPU: the workloads of
engine_gpu.py. The limit is the minimum time of one decoding step: multiplying all weights on a CPU (at the speed of a product of
1,024 rows), reading all weights and keys on a GPU (measured copy speed).

On a CPU the engine and `generate` alternate; the ratio is the median of `--repeat` pairs, with the lowest and the highest.
With one thread times are CPU time, which other programs on the machine change little; else wall-clock time.

    .venv/bin/python benchmarks/engine.py            # what this machine has
    .venv/bin/python benchmarks/engine.py --threads 1 --repeat 3
    .venv/bin/python benchmarks/engine.py --shape 1.5b --only fixed128 ragged --vllm --json engine.jsonl   # on a GPU
    .venv/bin/python benchmarks/engine.py --hybrids --threads 1   # states beside the block cache, against transformers' cache
    .venv/bin/python benchmarks/engine.py --sampler   # drawing alone, per step, against torch.softmax and torch.multinomial
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import described
from torch import Tensor
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from ludic.inference.local import LocalEngine
from ludic.inference.local.cached import CachedBackend
from ludic.inference.local.runner import EngineNeeds
from ludic.inference.local.sampling import sample
from ludic.inference.local.sequence import Sequence
from ludic.models.weights import shared_view
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest


def smollm2() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
        )
    )  # fmt: skip


def qwen() -> Any:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        )
    )  # fmt: skip


def qwen_7b() -> Any:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=False,
        )
    )  # fmt: skip


def tiny() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=2048,
        )
    )  # fmt: skip


def tiny_falcon_h1() -> Any:
    return FalconH1ForCausalLM(
        FalconH1Config(
            vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2048, mamba_n_heads=8, mamba_d_head=32, mamba_d_ssm=256,
            mamba_d_state=16, mamba_chunk_size=64,
        )
    )  # fmt: skip


def tiny_qwen3_next() -> Any:
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, num_experts=0, linear_key_head_dim=32,
            linear_value_head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8,
        )
    )  # fmt: skip


def make(build: Callable[[], Any], device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = build().eval()
    torch.set_default_dtype(torch.float32)
    return model


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def run_generate(model: Any, prompts: list[list[int]], num_new: int) -> float:
    ids = torch.tensor(prompts)
    started = clock()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=True,
            top_k=0, pad_token_id=0,
        )  # fmt: skip
    return clock() - started


def run_engine(engine: LocalEngine, prompts: list[list[int]], num_new: int) -> float:
    sampling = SamplingParams(temperature=1.0, max_tokens=num_new, ignore_eos=True)

    async def all_at_once() -> None:
        requests = [
            TokenCompletionRequest(
                model="", prompt_token_ids=prompt, sampling=sampling, return_=ReturnSpec.for_rl(), seed=number
            )
            for number, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(engine.complete_tokens(request) for request in requests))

    started = clock()
    asyncio.run(all_at_once())
    return clock() - started


def limit_s(model: Any, batch: int, context: int) -> float:
    """Minimum time of one decoding step."""
    num_params = sum(p.numel() for p in model.parameters())
    if model.device.type == "cpu":
        return 2 * num_params * batch / _cpu_flops(model.dtype)
    config = model.config
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return (num_params + kv * batch * context) * 2 / _gpu_bandwidth()


def _cpu_flops(dtype: torch.dtype) -> float:
    a, b = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
    seconds = []
    for _ in range(10):
        started = clock()
        a @ b
        seconds.append(clock() - started)
    return 2 * 1024**3 / median(seconds[1:])


def _gpu_bandwidth() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() / (time.perf_counter() - started)


def compare(name: str, model: Any, prompts: list[list[int]], num_new: int, repeat: int) -> None:
    """One row."""
    batch, prompt_length = len(prompts), len(prompts[0])
    engine = LocalEngine(model, max_sequences=batch, max_model_len=prompt_length + num_new)
    begun = [prompt[:8] for prompt in prompts]
    run_engine(engine, begun, 4), run_generate(model, begun, 4)  # the first use packs weights and starts threads
    generate, ours = [], []
    for _ in range(repeat):
        generate.append(run_generate(model, prompts, num_new))
        engine.new_version()  # drop every cached prefix
        ours.append(run_engine(engine, prompts, num_new))
    engine.close()
    ratios = [theirs_s / ours_s for theirs_s, ours_s in zip(generate, ours, strict=True)]
    ours_s, total = median(ours), batch * num_new
    bound = limit_s(model, batch, prompt_length + num_new // 2) * num_new
    print(
        f"{name:38} {batch:5d} {total / median(generate):9,.0f} {total / ours_s:9,.0f} {median(ratios):6.2f}x "
        f"{min(ratios):6.2f}–{max(ratios):.2f} {ours_s / num_new * 1e3:9.2f} {bound / num_new * 1e3:9.2f} {bound / ours_s:8.1%}",
        flush=True,
    )


def on_cpu(repeat: int, dtype: torch.dtype) -> None:
    print(described())
    print(
        f"{'':38} {'batch':>5} {'generate':>9} {'ours':>9} {'ratio':>7} {'of pairs':>11} {'ms/step':>9} {'limit ms':>9} "
        f"{'of limit':>8}\n(tokens per second, medians; ms/step includes the prompts)"
    )
    rng = np.random.default_rng(0)
    bits = "fp32" if dtype is torch.float32 else "bf16"
    model = make(smollm2, "cpu", dtype)
    compare(f"SmolLM2-135M {bits}, 32 → 64", model, rng.integers(3, 49152, size=(32, 32)).tolist(), 64, repeat)
    shared = rng.integers(3, 49152, size=400).tolist()
    compare(f"SmolLM2-135M {bits}, group, 400 shared", model, [shared] * 8, 64, repeat)
    if dtype is torch.bfloat16:
        model = make(qwen, "cpu", dtype)
        compare("Qwen2.5-1.5B bf16, 8 → 16", model, rng.integers(3, 49152, size=(8, 32)).tolist(), 16, repeat)
        return
    model = make(tiny, "cpu", dtype)
    for batch in (1, 8, 64):
        compare("tiny (4 layers, width 128), 16 → 64", model, rng.integers(3, 1024, size=(batch, 16)).tolist(), 64, 5)


def hybrids(repeat: int) -> None:
    """The engine with states beside its block cache, and the same engine through transformers' own cache."""
    print(
        f"{'':38} {'batch':>5} {'fallback':>9} {'ours':>9} {'ratio':>7} {'of pairs':>11}\n(tokens per second, medians)"
    )
    rng, num_new = np.random.default_rng(0), 32
    ragged = [rng.integers(3, 1024, size=length).tolist() for length in rng.integers(16, 64, size=16)]
    work = {
        "16 prompts of 16 to 63 → 32": ragged,
        "2 groups of 8, equal prompts → 32": [ragged[i % 2] for i in range(16)],
    }
    for name, build in {"Falcon-H1": tiny_falcon_h1, "Qwen3-Next": tiny_qwen3_next}.items():
        model = make(build, "cpu", torch.float32)
        ours, fallback = (LocalEngine(model, max_sequences=32, max_model_len=512) for _ in range(2))
        fallback._worker.backend = own_cache = CachedBackend()
        own_cache.use(shared_view(model), EngineNeeds(max_length=512))
        for what, prompts in work.items():
            seconds: dict[LocalEngine, list[float]] = {ours: [], fallback: []}
            for engine in seconds:
                run_engine(engine, prompts[:2], 4)  # the first use packs weights
            for _ in range(repeat):
                for engine, times in seconds.items():
                    engine.new_version()
                    times.append(run_engine(engine, prompts, num_new))
            ratios = [slow / fast for fast, slow in zip(*seconds.values(), strict=True)]
            speeds = [len(prompts) * num_new / median(seconds[engine]) for engine in (fallback, ours)]
            print(
                f"{name + ', ' + what:38} {len(prompts):5d} {speeds[0]:9,.0f} {speeds[1]:9,.0f} {median(ratios):6.2f}x "
                f"{min(ratios):6.2f}–{max(ratios):.2f}",
                flush=True,
            )
        ours.close(), fallback.close()


def time_ms(draw: Callable[[Tensor], Any], logits_NV: Tensor) -> float:
    """Best time of several calls, each on fresh logits, since sampling changes them in place."""
    seconds = []
    for _ in range(3 + 20_000_000 // logits_NV.numel() % 20):
        own = logits_NV.clone()
        sync_device(own)
        started = time.perf_counter()
        draw(own)
        sync_device(own)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:]) * 1e3


def sync_device(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def engine_draw(batch: int, device: str) -> Callable[[Tensor], Any]:
    """The engine's sampling at temperature 0.8."""
    if device == "cuda":
        from ludic_gpu.cuda.kernels import sample_rows

        seeds, temperatures = torch.arange(batch, device=device), torch.full((batch,), 0.8, device=device)
        return lambda logits_NV: sample_rows(logits_NV, seeds, seeds, temperatures)
    sampling = SamplingParams(temperature=0.8, max_tokens=1)
    request = TokenCompletionRequest(model="", prompt_token_ids=[1] * 20, sampling=sampling)
    sequences = [Sequence(number=n, request=request, deliver=lambda *_: None, seed=n) for n in range(batch)]
    return lambda logits_NV: sample(logits_NV, sequences)


@torch.inference_mode()
def sampler(device: str) -> None:
    """Milliseconds to draw one token per row, with its log-prob."""

    def softmax(logits_NV: Tensor) -> Tensor:
        return torch.softmax(logits_NV / 0.8, dim=-1)

    def multinomial(logits_NV: Tensor) -> Tensor:
        probs_NV = softmax(logits_NV)
        return probs_NV.gather(1, torch.multinomial(probs_NV, 1)).log()

    print(
        f"{'vocabulary':>10} {'batch':>6} {'softmax':>9} {'multinomial':>12} {'ours':>9} {'ours/multinomial':>17}   (ms)"
    )
    for vocab, batches in ((64, (64,)), (1024, (64,)), (49_152, (1, 16, 128)), (151_936, (1, 16, 128))):
        for batch in batches:
            logits_NV = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(0)).to(device) * 3
            alone, theirs = time_ms(softmax, logits_NV), time_ms(multinomial, logits_NV)
            ours = time_ms(engine_draw(batch, device), logits_NV)
            print(f"{vocab:10d} {batch:6d} {alone:9.3f} {theirs:12.3f} {ours:9.3f} {ours / theirs:16.2f}x")


def main() -> None:
    import engine_gpu  # it imports this file

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--threads", type=int, default=None)
    arguments.add_argument("--sampler", action="store_true", help="time drawing alone")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="on a CPU")
    arguments.add_argument("--hybrids", action="store_true", help="tiny hybrids on a CPU")
    engine_gpu.add_flags(arguments)
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {device}")
    if options.sampler:
        sampler("cuda" if torch.cuda.is_available() else "cpu")
        return
    if options.hybrids:
        hybrids(options.repeat)
        return
    if torch.cuda.is_available() or options.shape:
        engine_gpu.run(options)
        return
    on_cpu(options.repeat, getattr(torch, options.dtype))


if __name__ == "__main__":
    main()
