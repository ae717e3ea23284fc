"""Training with shared prefixes computed once, against packing every sample in full: trained tokens per second and memory.

    .venv/bin/python benchmarks/prefix_sharing.py                # on a CPU: small shapes
    .venv/bin/python benchmarks/prefix_sharing.py --only tools   # one workload

Both ways compute the same gradient; the script prints how far apart they are. "Expected" is the ratio of tokens.
"""

import argparse
import resource
import time

import numpy as np
import torch
from engine import make, qwen, smollm2, tiny

from ludic.models.prefix_tree import TokenTree
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import ActorTokenLogps, SampleAttachments, SAWItem

ON_GPU = torch.cuda.is_available()
SHAPES = {"tiny": tiny, "smollm2": smollm2, "qwen": qwen}
GROUPS = {"gsm8k": (128, 256, 8), "long prompt": (1024, 1024, 16), "tools": (4096, 1024, 8)}
"""Prompt tokens, reply tokens, samples per group."""


def sample(ids: np.ndarray, num_prompt: int, weight: float) -> SAWItem:
    mask = np.arange(len(ids)) >= num_prompt
    logps = ActorTokenLogps(np.full(int(mask.sum()), -5.0, dtype=np.float32))
    return SAWItem(ids.astype(np.int32), None, mask, weight, {}, SampleAttachments(actor_logps=logps))


def group(prompt: int, reply: int, size: int, vocab: int, rng: np.random.Generator) -> list[SAWItem]:
    first = rng.integers(0, vocab, prompt)
    replies = [rng.integers(0, vocab, int(n)) for n in rng.integers(reply // 2, reply * 3 // 2, size)]
    return [sample(np.concatenate([first, own]), prompt, float(rng.normal())) for own in replies]


def tool_episode(vocab: int, rng: np.random.Generator, turns: int = 10) -> list[SAWItem]:
    """One sample per turn; the thinking of earlier turns is cut from the history, their calls and results stay."""
    history, items = rng.integers(0, vocab, 600), []
    for _ in range(turns):
        thinking, call, result = (rng.integers(0, vocab, n) for n in (300, 60, 200))
        items.append(sample(np.concatenate([history, thinking, call]), len(history), float(rng.normal())))
        history = np.concatenate([history, call, result])
    return items


def measure(policy: TrainedPolicy, items: list[SAWItem], budget: int) -> tuple[float, float, torch.Tensor]:
    """Seconds (the best of three), peak memory in GB, and the gradient."""
    seconds = []
    for _ in range(3):
        policy.model.zero_grad()
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        began = time.perf_counter()
        accumulate_gradients(policy, TokenClippedSurrogateLoss(), items, micro_token_budget=budget)
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    used = torch.cuda.max_memory_allocated() if ON_GPU else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gradient = torch.cat([p.grad.flatten().float() for p in policy.model.parameters() if p.grad is not None])
    return min(seconds), used / 1e9, gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--model", choices=sorted(SHAPES), default="smollm2" if ON_GPU else "tiny")
    parser.add_argument("--groups", type=int, default=8 if ON_GPU else 1)
    parser.add_argument("--budget", type=int, default=16384)
    args = parser.parse_args()
    model = make(SHAPES[args.model], "cuda" if ON_GPU else "cpu", torch.bfloat16 if ON_GPU else torch.float32)
    model.requires_grad_(True).train()
    vocab, rng = model.config.vocab_size, np.random.default_rng(0)
    workloads = {
        name: [item for _ in range(args.groups) for item in group(*shape, vocab, rng)] for name, shape in GROUPS.items()
    }
    workloads["ten turns"] = [item for _ in range(args.groups) for item in tool_episode(vocab, rng)]
    where = "GPU" if ON_GPU else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.model}, {where}, micro-batches of at most {args.budget} tokens; GB is the peak so far on a CPU\n")
    print("workload      expected  ratio  tok/s shared   separate    GB    GB  gradient differs")
    for name, items in workloads.items():
        if args.only and args.only not in name:
            continue
        num_tokens = sum(len(item.input_ids) for item in items)
        expected = num_tokens / TokenTree.of([item.input_ids for item in items]).num_tokens
        fast, small, ours = measure(TrainedPolicy(model, share_prefixes=True), items, args.budget)
        slow, large, theirs = measure(TrainedPolicy(model), items, args.budget)  # the larger peak comes last
        differs = float((ours - theirs).norm() / theirs.norm())
        speeds = f"{num_tokens / fast:12,.0f} {num_tokens / slow:9,.0f}"
        print(f"{name:12} {expected:7.2f}× {slow / fast:5.2f}× {speeds} {small:5.1f} {large:5.1f} {differs:16.1e}")


if __name__ == "__main__":
    main()
