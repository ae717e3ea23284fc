"""Preemptions of the embedded engine when its cache is too small for all requests, with admission that keeps room and without.

    OMP_NUM_THREADS=1 .venv/bin/python research/experiments/admission.py                    # a small model, on a CPU or a GPU
    OMP_NUM_THREADS=1 .venv/bin/python research/experiments/admission.py --kv 4096 --turns 4

Groups of 8 share a prompt of 60 tokens; replies end by chance, after 96 tokens on average and at most --max-tokens. Both ways
alternate. A preempted sequence is computed again, so fewer preemptions are less work for the same tokens.
"""

import argparse
import asyncio
import random
import time

import torch

from ludic.inference.local import LocalEngine
from ludic.models.loading import make_tiny
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest


async def episode(engine: LocalEngine, number: int, turns: int, max_tokens: int) -> int:
    """Sampled tokens of one episode."""
    rng = random.Random(number // 8)
    ids = [rng.randrange(5, 90) for _ in range(60)]
    num_sampled = 0
    for turn in range(turns):
        sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens)
        request = TokenCompletionRequest(
            model="m", prompt_token_ids=ids, sampling=sampling, seed=100 * number + turn, return_=ReturnSpec.for_rl()
        )
        response, _ = await engine.complete_tokens(request)
        reply = response.completion_token_ids.tolist()
        num_sampled += len(reply)
        ids = [*ids, *reply, *(rng.randrange(5, 90) for _ in range(20))]
    return num_sampled


async def measure(keep_room: bool, given: argparse.Namespace) -> tuple[int, float, int]:
    """Preemptions, seconds of CPU time, sampled tokens."""
    loaded = make_tiny(seed=0)
    engine = LocalEngine(
        loaded.model, loaded.tokenizer, max_model_len=1024, kv_tokens=given.kv, max_sequences=64, keep_room=keep_room
    )
    began = time.process_time()
    sampled = await asyncio.gather(
        *(episode(engine, number, given.turns, given.max_tokens) for number in range(given.episodes))
    )
    seconds = time.process_time() - began
    preemptions = engine.stats["preemptions"]
    engine.close()
    return preemptions, seconds, sum(sampled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", type=int, nargs="*", default=[2048, 4096, 8192], help="tokens of the cache")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'kv tokens':>9} {'preemptions':>24} {'CPU seconds, best':>24} {'ratio':>6}")
    for kv in given.kv:
        rows: dict[bool, list[tuple[int, float, int]]] = {False: [], True: []}
        for _ in range(given.repeat):
            for keep_room in rows:
                rows[keep_room].append(asyncio.run(measure(keep_room, argparse.Namespace(**{**vars(given), "kv": kv}))))
        counts = [f"{min(r[0] for r in own)}-{max(r[0] for r in own)}" for own in rows.values()]
        best = [min(r[1] for r in own) for own in rows.values()]
        print(
            f"{kv:>9} {' -> '.join(counts):>24} {best[0]:>11.2f} -> {best[1]:>8.2f} {best[1] / best[0]:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
