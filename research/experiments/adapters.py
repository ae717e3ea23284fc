"""Several LoRA adapters over one base model, against peft's LoRA: training and sampling, in one run.

Training: forward and backward pass over packed rows, by peft's layers (as `ludic train` with LoRA computes them), by the adapter
bank with one adapter, and with one adapter for each row; and the same rows one adapter after the other. Sampling: the embedded
engine over a peft model, over the base with one adapter, and with several adapters in the batch. peft's adapter has no part in
the output layer there, so ours have none either; `--head` adds it to ours.

Ways alternate; numbers are medians of `--repeat` rounds. With one thread times are CPU time, which other programs change little.

    .venv/bin/python research/experiments/adapters.py --threads 1
    .venv/bin/python research/experiments/adapters.py --threads 1 --adapters 8 --sequences 1 --only sampling    # one sequence per adapter
    PYTHONPATH=src:benchmarks python3 research/experiments/adapters.py --device cuda --shape 1.5b --sequences 16 --prompt 128 --new 256
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import peft
import torch
from engine import make, qwen, smollm2, tiny
from torch import Tensor

from ludic.inference.local import LocalEngine
from ludic.models.adapters import AdapterBank, AdapterSpec, LoraAdapter
from ludic.models.head import chosen_logps, find_head, hidden_states
from ludic.models.lora import adapted_layers
from ludic.models.packed_attention import PackedSequences
from ludic.models.passes.routing import route_attention
from ludic.models.weights import shared_view
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_tinker.server.targets import target_logps

SHAPES = {"smollm2": smollm2, "tiny": tiny, "1.5b": qwen}


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def compare(ways: dict[str, Callable[[], None]], repeat: int) -> dict[str, float]:
    """Seconds of each way, the median of rounds in which they alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeat + 1):
        for name, run in ways.items():
            started = clock()
            run()
            if number:  # the first round warms up
                seconds[name].append(clock() - started)
    return {name: median(own) for name, own in seconds.items()}


def report(title: str, tokens: int, seconds: dict[str, float], first: str) -> None:
    print(f"{title}, {tokens:,} tokens:")
    for name, own in seconds.items():
        print(f"  {name:42} {tokens / own:10,.0f} tok/s   {seconds[first] / own:5.2f} of {first}")


def new_adapters(model: Any, spec: AdapterSpec, count: int) -> list[LoraAdapter]:
    """With values in B: zeros may be multiplied faster."""
    adapters = [LoraAdapter.create(model, replace(spec, seed=number)) for number in range(count)]
    for adapter in adapters:
        with torch.no_grad():
            adapter.flat.add_(torch.randn_like(adapter.flat) * 1e-3)
    return adapters


def peft_of(model: Any, rank: int) -> Any:
    config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=adapted_layers(model))
    return peft.get_peft_model(shared_view(model), config)


def training(model: Any, args: argparse.Namespace) -> None:
    spec = AdapterSpec(rank=args.rank, head=args.head)
    adapters = new_adapters(model, spec, args.adapters)
    rng = np.random.default_rng(0)
    rows = [torch.from_numpy(rng.integers(model.config.vocab_size, size=args.length)) for _ in range(args.rows)]
    bank = AdapterBank(model)
    route_attention(bank.model)
    theirs = peft_of(model, args.rank)
    route_attention(theirs)
    theirs.train()
    head = find_head(theirs)
    trained = [p for p in theirs.parameters() if p.requires_grad]

    def hidden_of(net: Any, own: list[Tensor]) -> Tensor:
        lengths = [len(row) for row in own]
        positions = torch.cat([torch.arange(n) for n in lengths])
        return hidden_states(net, torch.cat(own), positions, PackedSequences(lengths, torch.device("cpu")))

    def by_peft() -> None:
        chosen_logps(hidden_of(theirs, rows), head, torch.cat(rows).roll(-1))[0].sum().backward()
        for parameter in trained:
            parameter.grad = None

    def by_bank(own: list[Tensor], owners: list[LoraAdapter]) -> None:
        spans = [(adapter, len(row)) for adapter, row in zip(owners, own, strict=True)]
        with bank.using(spans):
            hidden = hidden_of(bank.model, own)
        targets = torch.cat(own).roll(-1)
        output = target_logps(bank, hidden, spans, torch.arange(len(targets)), targets, for_backward=True)
        hidden.backward(output.backward(torch.ones(len(targets))))
        for adapter in owners:
            for parameter in adapter.parameters():
                parameter.grad = None

    shares = [list(range(i, len(rows), len(adapters))) for i in range(len(adapters))]
    mixed = [adapters[i] for i, share in enumerate(shares) for _ in share]
    several = f"{len(adapters)} adapters"
    ways: dict[str, Callable[[], None]] = {
        "peft": by_peft,
        "one adapter": lambda: by_bank(rows, [adapters[0]] * len(rows)),
        f"{several} in one pass": lambda: by_bank([rows[r] for share in shares for r in share], mixed),
        f"{several}, one after the other": lambda: [  # type: ignore[dict-item, return-value]
            by_bank([rows[r] for r in share], [adapters[i]] * len(share)) for i, share in enumerate(shares)
        ],
    }
    report(f"training, rank {args.rank}", args.rows * args.length, compare(ways, args.repeat), "peft")


def sampling(model: Any, args: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    num_sequences = args.adapters * args.sequences
    prompts = [rng.integers(model.config.vocab_size, size=args.prompt) for _ in range(num_sequences)]
    options = {
        "max_sequences": num_sequences,
        "max_model_len": args.prompt + args.new,
        "kv_tokens": max(1 << 16, 2 * num_sequences * (args.prompt + args.new)),
    }
    spec = AdapterSpec(rank=args.rank, head=args.head)
    engine = LocalEngine(model, **options, adapters=True)
    for number, adapter in enumerate(new_adapters(model, spec, args.adapters)):
        engine.add_adapter(str(number), adapter)
    theirs, plain = LocalEngine(peft_of(model, args.rank).eval(), **options), LocalEngine(model, **options)

    def answer(served: LocalEngine, owners: list[str | None]) -> None:
        async def ask() -> None:
            requests = [
                TokenCompletionRequest(
                    model="m",
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(temperature=1.0, max_tokens=args.new, ignore_eos=True),
                    return_=ReturnSpec.for_rl(),
                    seed=number,
                    adapter=owner,
                )
                for number, (prompt, owner) in enumerate(zip(prompts, owners, strict=True))
            ]
            await asyncio.gather(*(served.complete_tokens(request) for request in requests))

        served.new_version()  # nothing is left in the cache
        asyncio.run(ask())

    several = [str(i % args.adapters) for i in range(num_sequences)]
    ways: dict[str, Callable[[], None]] = {
        "peft": lambda: answer(theirs, [None] * num_sequences),
        "base without adapters": lambda: answer(plain, [None] * num_sequences),
        "one adapter": lambda: answer(engine, ["0"] * num_sequences),
        f"{args.adapters} adapters": lambda: answer(engine, several),  # type: ignore[arg-type]
    }
    title = f"sampling, rank {args.rank}, {num_sequences} sequences, prompts of {args.prompt}"
    report(title, num_sequences * args.new, compare(ways, args.repeat), "peft")
    for served in (engine, theirs, plain):
        served.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["training", "sampling"])
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda is for sampling, in bf16")
    parser.add_argument("--layers", type=int, help="of the model; ratios need not all of them")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--head", action="store_true", help="our adapters have a part in the output layer")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="training: rows of all adapters together")
    parser.add_argument("--length", type=int, default=64, help="training: tokens of a row")
    parser.add_argument("--sequences", type=int, default=4, help="sampling: sequences of each adapter")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=24, help="sampling: new tokens of a sequence")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = make(SHAPES[args.shape], args.device, dtype).requires_grad_(False)
    if args.layers:
        model.model.layers = model.model.layers[: args.layers]
        model.config.num_hidden_layers = args.layers
    if args.only != "sampling" and args.device == "cpu":
        training(model, args)
    if args.only != "training":
        sampling(model, args)


if __name__ == "__main__":
    main()
