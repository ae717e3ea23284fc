"""Gradients of a batch whose samples share prefixes: computed once per token, and once per sample.

    .venv/bin/python benchmarks/prefix_sharing.py                       # on a GPU a model of SmolLM2's shape, else a small one
    .venv/bin/python benchmarks/prefix_sharing.py --only tools          # one workload
    .venv/bin/python benchmarks/prefix_sharing.py --way gathered        # the other way of attention, where the model allows both

Both ways compute the same gradient; the script prints how far apart they are. Each is measured in a process that computes nothing
else, so that its peak of memory is its own (on a CPU without what the process takes before the first step); it grows with the
budget of tokens in a micro-batch, which on a CPU fits a whole group both ways. Passes alternate between the processes, and the
ratio is of the fastest ones; on a CPU, of CPU time, which other work on the machine changes less. Expected are the ratio of
tokens and, for attention, that of pairs of tokens that see each other.
"""

import argparse
import multiprocessing
import resource
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from engine import make, qwen, smollm2, tiny
from machine import described
from transformers import LlamaForCausalLM

from ludic.models.packed_attention import TreeSequences
from ludic.models.prefix_tree import TokenTree
from ludic.training.learner import policy as policy_module
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import ActorTokenLogps, SampleAttachments, SAWItem


def two_layers() -> Any:
    """The small model of engine.py with two of its four layers: all workloads take minutes on a CPU."""
    config = tiny().config
    config.num_hidden_layers = 2
    return LlamaForCausalLM(config)


SHAPES = {"tiny": two_layers, "smollm2": smollm2, "qwen": qwen}
GROUPS = {"gsm8k": (128, 256, 8), "long prompt": (1024, 1024, 16), "tools": (4096, 1024, 8)}
"""Prompt tokens, reply tokens, samples per group."""
GOALS = {"gsm8k": 1.25, "long prompt": 1.6, "tools": 2.5, "ten turns": 2.0}
WAYS = {"auto": None, "merged": True, "gathered": False}


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


def workloads(num_groups: int, vocab: int, only: str) -> dict[str, list[SAWItem]]:
    rng = np.random.default_rng(0)
    found = {n: [item for _ in range(num_groups) for item in group(*shape, vocab, rng)] for n, shape in GROUPS.items()}
    found["ten turns"] = [item for _ in range(num_groups) for item in tool_episode(vocab, rng)]
    return {name: items for name, items in found.items() if only in name}


def num_pairs(lengths: np.ndarray) -> int:
    """Of tokens in sequences of these lengths that see each other."""
    return int((lengths * (lengths + 1) // 2).sum())


def peak_bytes(on_gpu: bool) -> int:
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(args: argparse.Namespace, name: str, shares: bool, pipe: Connection) -> None:
    """One process: a pass for every True that it receives; then memory and gradient."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    policy_module.TreeSequences = partial(TreeSequences, merges=WAYS[args.way])
    model = make(SHAPES[args.model], "cuda" if on_gpu else "cpu", torch.bfloat16 if on_gpu else torch.float32)
    model.requires_grad_(True).train()
    items = workloads(args.groups, model.config.vocab_size, name)[name]
    policy = TrainedPolicy(model, share_prefixes=shares)
    policy.share_prefixes = shares  # also where it is off by default
    before = 0 if on_gpu else peak_bytes(on_gpu)
    while pipe.recv():
        model.zero_grad()
        began = clock()
        accumulate_gradients(policy, TokenClippedSurrogateLoss(), items, micro_token_budget=args.budget)
        if on_gpu:
            torch.cuda.synchronize()
        pipe.send(clock() - began)
    used = peak_bytes(on_gpu) - before
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    step = -(-sum(len(grad) for grad in grads) // 10_000_000)  # all of a large gradient takes minutes through a pipe
    pipe.send((used / 1e9, torch.cat([grad[::step].float() for grad in grads]).cpu().numpy()))


def compare(args: argparse.Namespace, name: str, items: list[SAWItem]) -> str:
    pipes = []
    start = multiprocessing.get_context("spawn")
    processes = []
    for shares in (True, False):
        ours, theirs = start.Pipe()
        processes.append(start.Process(target=serve, args=(args, name, shares, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    rounds = []
    for _ in range(args.rounds):
        rounds.append([])
        for pipe in pipes:
            pipe.send(True)
            rounds[-1].append(pipe.recv())
    for pipe in pipes:
        pipe.send(False)
    (small, ours), (large, theirs) = (pipe.recv() for pipe in pipes)
    for process in processes:
        process.join()
    fast, slow = np.min(rounds, axis=0)
    lengths = np.array([len(item.input_ids) for item in items])
    tree = TokenTree.of([item.input_ids for item in items])
    tokens = lengths.sum() / tree.num_tokens
    attention = num_pairs(lengths) / int((tree.positions_T + 1).sum())
    differs = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    speeds = f"{lengths.sum() / fast:10,.0f} {lengths.sum() / slow:9,.0f}"
    expected = f"{tokens:6.2f}× {attention:8.2f}×"
    return f"{name:11} {expected} {slow / fast:6.2f}× {GOALS[name]:5.2f}× {speeds} {small:7.2f} {large:7.2f} {differs:10.1e}"


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--model", choices=sorted(SHAPES), default="smollm2" if on_gpu else "tiny")
    parser.add_argument("--groups", type=int, default=8 if on_gpu else 1)
    parser.add_argument("--budget", type=int, default=16384 if on_gpu else 49152)
    parser.add_argument("--rounds", type=int, default=5 if on_gpu else 2)
    parser.add_argument("--way", choices=sorted(WAYS), default="auto")
    args = parser.parse_args()
    print(f"{args.model}, at most {args.budget} tokens in a micro-batch; {described()}\n")
    print("             expected          ratio   goal  tok/s shared  apart  GB shared  apart   gradient")
    print("workload    tokens  attention                                                   differs")
    with torch.device("meta"):  # for its vocabulary alone
        vocab = SHAPES[args.model]().config.vocab_size
    for name, items in workloads(args.groups, vocab, args.only).items():
        print(compare(args, name, items), flush=True)


if __name__ == "__main__":
    main()
