"""What bitwise mode costs, and what it gives: engine and trainer speed with and without it, and how far their log-probs are apart.

The engine samples groups of completions with random weights; the trainer makes one gradient of exactly these samples on the same
weights. "check" is the time of the self-check and of the first, short request, both before anything is timed. With one thread on a
CPU times are CPU time, which other programs on the machine change little; else wall-clock time. The two modes alternate, and
each number is the median of `--repeat` rounds.

    OMP_NUM_THREADS=1 PYTHONPATH=.:src python benchmarks/bitwise.py --shape tiny
    OMP_NUM_THREADS=1 PYTHONPATH=.:src python benchmarks/bitwise.py --shape smollm2 --groups 2 --tokens 16 --repeat 1
    PYTHONPATH=.:src python benchmarks/bitwise.py --device cuda --dtype bfloat16 --shape 1.5b --groups 32 --tokens 256
"""

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmarks.engine import qwen, smollm2

from ludic.inference.local import LocalEngine
from ludic.models.loading import load_model
from ludic.training import make_grpo
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import (
    ActorTokenLogps,
    ChatResponse,
    ReturnSpec,
    SampleAttachments,
    SamplingParams,
    SAWItem,
    TokenCompletionRequest,
)

SHAPES = {"tiny": lambda: load_model("tiny").model, "smollm2": smollm2, "1.5b": qwen}
GROUP = 8


@dataclass
class Measured:
    """Of one mode."""

    check_s: float
    engine: list[float] = field(default_factory=list)
    """Tokens per second that were sampled."""
    trainer: list[float] = field(default_factory=list)
    """Tokens per second of the samples: forward and backward."""
    differences: list[np.ndarray] = field(default_factory=list)


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._now = time.process_time if is_alone else time.perf_counter
        self.kind = "CPU time" if is_alone else "wall-clock time"

    def __call__(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now()


def requests(args: argparse.Namespace, vocab: int, seed: int, num_tokens: int) -> list[TokenCompletionRequest]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(vocab, size=args.prompt) for _ in range(args.groups)]
    return [
        TokenCompletionRequest(
            model="benchmark",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True),
            return_=ReturnSpec.for_rl(),
            seed=GROUP * number + member,
        )
        for number, prompt in enumerate(prompts)
        for member in range(GROUP)
    ]


async def answers(engine: LocalEngine, asked: list[TokenCompletionRequest]) -> list[ChatResponse]:
    return [response for response, _ in await asyncio.gather(*(engine.complete_tokens(one) for one in asked))]


def sample_of(response: ChatResponse) -> SAWItem:
    prompt, written = response.prompt_token_ids, response.completion_token_ids
    attached = SampleAttachments(actor_logps=ActorTokenLogps(response.completion_logprobs), temperature=1.0)
    mask = np.arange(len(prompt) + len(written)) >= len(prompt)
    return SAWItem(np.concatenate([prompt, written]), None, mask, 1.0, attachments=attached)


def measure(args: argparse.Namespace, model: Any, clock: Clock) -> dict[bool, Measured]:
    vocab = model.get_input_embeddings().num_embeddings
    found, engines, policies = {}, {}, {}
    for bitwise in (False, True):
        began = clock()
        engines[bitwise] = LocalEngine(
            model,
            max_model_len=args.prompt + args.tokens,
            kv_tokens=(args.prompt + args.tokens + 16) * args.groups * GROUP,
            bitwise=bitwise,
        )
        asyncio.run(answers(engines[bitwise], requests(args, vocab, 0, 2)))
        policies[bitwise] = TrainedPolicy(model, share_prefixes=True, mixed_precision_dtype=None, bitwise=bitwise)
        found[bitwise] = Measured(clock() - began)
    loss = make_grpo(group_size=GROUP).loss
    for number in range(args.repeat):
        for bitwise, own in found.items():
            asked = requests(args, vocab, number + 1, args.tokens)
            began = clock()
            replies = asyncio.run(answers(engines[bitwise], asked))
            own.engine.append(args.tokens * len(asked) / (clock() - began))
            items, policy = [sample_of(reply) for reply in replies], policies[bitwise]
            with torch.no_grad():
                batch = policy.batch(items)
                own.differences.append((policy.logps(batch)[0] - batch.actions.old_logp_A).cpu().numpy())
            began = clock()
            budget = max(args.budget, args.prompt + args.tokens)
            accumulate_gradients(policy, loss, items, micro_token_budget=budget)
            own.trainer.append(sum(len(item.input_ids) for item in items) / (clock() - began))
            model.zero_grad(set_to_none=True)
    for engine in engines.values():
        engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--groups", type=int, default=8, help=f"prompts, with {GROUP} completions each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = SHAPES[args.shape]().to(device, getattr(torch, args.dtype))
    clock = Clock(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    print(
        f"{args.shape} in {args.dtype} on {where}; {args.groups} × {GROUP} completions of {args.tokens} tokens after "
        f"{args.prompt}; {clock.kind}; torch {torch.__version__}"
    )
    print(f"{'':10}{'check s':>9}{'engine tok/s':>14}{'trainer tok/s':>15}{'mean |Δ|':>12}{'max |Δ|':>12}{'equal':>9}")
    found = measure(args, model, clock)
    for bitwise, own in found.items():
        difference = np.abs(np.concatenate(own.differences))
        print(
            f"{'bitwise' if bitwise else 'usual':10}{own.check_s:9.1f}{median(own.engine):14.1f}{median(own.trainer):15.1f}"
            f"{difference.mean():12.2g}{difference.max():12.2g}{(difference == 0).mean():9.1%}"
        )
    cost = [median(getattr(found[False], name)) / median(getattr(found[True], name)) for name in ("engine", "trainer")]
    print(f"bitwise takes {cost[0]:.2f} times as long to sample and {cost[1]:.2f} times as long to train")


if __name__ == "__main__":
    main()
