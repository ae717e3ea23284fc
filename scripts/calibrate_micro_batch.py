"""Find the largest `micro_token_budget` that fits on this machine.

The gradient does not depend on the budget (see docs/training.md), only speed and memory do. So this tries real training
steps on random samples: two micro-batches of that many tokens, loss, backward, clipping, AdamW. The budget doubles until it
no longer fits and is then bisected. The worst case is tried: samples of `--max-seq-len`, every token but the first an action.

    python scripts/calibrate_micro_batch.py smollm2-135m --max-seq-len 1024
    python scripts/calibrate_micro_batch.py Qwen/Qwen2.5-1.5B --lora-r 16 --gradient-checkpointing
    python scripts/calibrate_micro_batch.py tiny --hidden-size 64 --layers 2 --max-budget 4096

On a GPU "fits" means no torch.OutOfMemoryError; on a CPU that the process stays within `--memory-limit-gb`. Leave room for
what else will be there: an engine on the same GPU takes its cache, a reference model its weights.
"""
# ruff: noqa: T201 - a script prints

import argparse
import difflib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ludic.models.execution import decoder_layers
from ludic.models.head import plain_model
from ludic.models.loading import SMOLLM2, load_model
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.optimizer import FullPrecisionAdamW, is_narrow
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import ActorTokenLogps, ConfigError, LudicError, MissingExtra, SampleAttachments, SAWItem

TINY = "tiny"
GB = 1e9
MARGIN = 0.1
"""Margin for real batches, which fragment memory differently."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class OverLimit(Exception):
    """The process exceeds --memory-limit-gb."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One budget and its result."""

    budget: int
    fits: bool
    peak_gb: float
    """Peak memory; for a budget that does not fit, when it was stopped."""
    seconds: float
    """Of the whole step."""


# --- searching ---


def search(attempt: Callable[[int], bool], *, smallest: int, largest: int) -> int | None:
    """The largest budget that `attempt` accepts, to within a sixteenth; None if not even the smallest fits."""
    best, too_much = None, None
    budget = smallest
    while budget <= largest:
        if not attempt(budget):
            too_much = budget
            break
        best = budget
        if budget == largest:
            break
        budget = min(2 * budget, largest)
    while best is not None and too_much is not None and too_much - best > max(best // 16, 1):
        middle = (best + too_much) // 2
        if attempt(middle):
            best = middle
        else:
            too_much = middle
    return best


def recommended(best: int, max_seq_len: int) -> int:
    """Less the margin, in steps of 64; at least one sample."""
    return max(int(best * (1 - MARGIN)) // 64 * 64, max_seq_len)


# --- one training step ---


def samples(num_tokens: int, max_seq_len: int, vocab: int) -> list[SAWItem]:
    """Random samples of maximum length, `num_tokens` in all."""
    whole, rest = divmod(num_tokens, max_seq_len)
    return [_sample(length, vocab) for length in [max_seq_len] * whole + [rest] if length > 1]


def _sample(length: int, vocab: int) -> SAWItem:
    rng = np.random.default_rng(length)
    mask = np.ones(length, dtype=bool)
    mask[0] = False
    logps = ActorTokenLogps(np.full(length - 1, -np.log(vocab), dtype=np.float32))
    ids = rng.integers(0, vocab, size=length).astype(np.int32)
    return SAWItem(ids, None, mask, 1.0, {}, SampleAttachments(actor_logps=logps))


class Step:
    """A training step with learning rate zero, which keeps the weights."""

    def __init__(self, model: Any, max_seq_len: int) -> None:
        self._policy = TrainedPolicy(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        on_gpu = self._policy.device.type == "cuda"
        kind = FullPrecisionAdamW if is_narrow(self._parameters) else torch.optim.AdamW  # as the trainer has it
        self._optimizer = kind(self._parameters, lr=0.0, fused=on_gpu, foreach=not on_gpu)
        self._loss = TokenClippedSurrogateLoss()
        self._max_seq_len = max_seq_len
        self._vocab = self._policy.head.weight_VD.shape[0]

    def run(self, budget: int) -> None:
        """Two micro-batches: the second's activations add to the first's gradients."""
        items = samples(budget, self._max_seq_len, self._vocab) * 2
        try:
            accumulate_gradients(self._policy, self._loss, items, micro_token_budget=budget, watch_entropy=True).means()
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)


# --- memory ---


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class CpuMemory:
    """Checks memory at each layer and stops a forward pass that exceeds the limit, before the system kills it."""

    def __init__(self, model: Any, limit_gb: float | None) -> None:
        if not Path("/proc/self/statm").exists():
            raise ConfigError(
                "On a CPU the memory in use is read from /proc, which only Linux has. Use a GPU, or guess."
            )
        self.limit = 0.8 * (_available() + resident()) if limit_gb is None else limit_gb * GB
        self._peak = 0
        self._layers = decoder_layers(model)

    def _check(self, *_: Any) -> None:
        self._peak = max(self._peak, resident())
        if self._peak > self.limit:
            raise OverLimit

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._peak, done = resident(), threading.Event()
        hooks = [layer.register_forward_pre_hook(self._check) for layer in self._layers]
        thread = threading.Thread(target=self._watch, args=(done,), daemon=True)
        thread.start()
        try:
            yield
            self._check()
        finally:
            done.set()
            thread.join()
            for hook in hooks:
                hook.remove()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(0.005):
            self._peak = max(self._peak, resident())

    @property
    def peak_gb(self) -> float:
        return self._peak / GB


class GpuMemory:
    """On a GPU the allocator raises by itself."""

    def __init__(self, device: torch.device, limit_gb: float | None) -> None:
        free, total = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_reserved(device)
        self.limit = float(free + ours) if limit_gb is None else limit_gb * GB
        torch.cuda.set_per_process_memory_fraction(min(self.limit / total, 1.0), device)
        self._device = device

    @contextmanager
    def watched(self) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError as error:
            raise OverLimit from error

    @property
    def peak_gb(self) -> float:
        return torch.cuda.max_memory_reserved(self._device) / GB


def _available() -> int:
    """Bytes available to this process, also in a container."""
    meminfo = Path("/proc/meminfo").read_text()
    free = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
    group, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if group.exists() and used.exists() and group.read_text().strip() != "max":
        free = min(free, int(group.read_text()) - int(used.read_text()))
    return free


# --- what is trained ---


def build_model(args: argparse.Namespace) -> Any:
    model = _tiny(args) if args.model == TINY else _loaded(args)
    longest = plain_model(model).config.get_text_config().max_position_embeddings
    if longest < args.max_seq_len:
        raise ConfigError(f"--max-seq-len {args.max_seq_len}, but the model has positions up to {longest}.")
    if args.lora_r:
        model = _with_adapter(model, args.lora_r)
    model.train()
    if args.gradient_checkpointing:
        plain_model(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _tiny(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    if args.hidden_size % args.heads:
        raise ConfigError(f"--hidden-size {args.hidden_size} cannot be split into --heads {args.heads}.")
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=max(args.max_seq_len, 2048),
    )
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = LlamaForCausalLM(config)
    return model.to(device, _DTYPES[args.dtype or "fp32"])


def _loaded(args: argparse.Namespace) -> Any:
    near = difflib.get_close_matches(args.model, (SMOLLM2, TINY), n=1)
    if near and near[0] != args.model.lower() and not Path(args.model).exists():
        raise ConfigError(f"There is no model {args.model!r} here. Did you mean {near[0]!r}?")
    dtype = _DTYPES[args.dtype] if args.dtype else None
    return load_model(args.model, dtype=dtype, device=args.device).model


def _with_adapter(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", "--lora-r") from error
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


# --- the command ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Find the largest TrainerConfig.micro_token_budget that fits on this machine.",
        epilog="Ctrl-C ends the search; the largest budget found so far is printed.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help='a folder, hub id or .gguf file, "smollm2-135m", or "tiny" (sized by the options at the end)')
    add("--max-seq-len", type=_at_least(2), default=1024, metavar="N", help="tokens of the longest sample (1024)")
    add("--lora-r", type=_at_least(1), metavar="R", help="train a LoRA adapter of this rank on all linear layers")
    add("--gradient-checkpointing", action="store_true", help="recompute activations: less memory, slower")
    add("--dtype", choices=_DTYPES, help="of the model (what the hardware likes; fp32 for tiny)")
    add("--device", help='"cpu" or "cuda" (a GPU if there is one)')
    add(
        "--memory-limit-gb", type=_positive, metavar="GB",
        help="how much this process may use (CPU: 80%% of what is available; GPU: all that is free)",
    )  # fmt: skip
    add("--max-budget", type=_at_least(2), default=131_072, metavar="N", help="do not try more tokens (131072)")
    tiny = parser.add_argument_group('the shape of "tiny", a Llama with random weights')
    tiny.add_argument("--hidden-size", type=_at_least(1), default=64, metavar="N", help="(64)")
    tiny.add_argument("--layers", type=_at_least(1), default=2, metavar="N", help="(2)")
    tiny.add_argument("--heads", type=_at_least(1), default=4, metavar="N", help="(4)")
    tiny.add_argument("--vocab-size", type=_at_least(2), default=1024, metavar="N", help="(1024)")
    args = parser.parse_args(arguments)
    if args.max_budget < args.max_seq_len:
        parser.error(f"--max-budget {args.max_budget} is less than --max-seq-len {args.max_seq_len}")
    if args.device not in (None, "cpu") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: this machine has no GPU that torch can use")
    return args


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return whole_number


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not an amount of memory")
    return value


def calibrate(args: argparse.Namespace) -> int:
    """Search, print the growing table and the result; returns the exit code."""
    model = build_model(args)
    device = next(model.parameters()).device
    memory = (
        GpuMemory(device, args.memory_limit_gb) if device.type == "cuda" else CpuMemory(model, args.memory_limit_gb)
    )
    step = Step(model, args.max_seq_len)
    trials: list[Trial] = []

    def attempt(budget: int) -> bool:
        trials.append(_tried(step, memory, budget))
        _print_row(trials[-1])
        return trials[-1].fits

    print(_described(model, args, memory.limit))
    print(f"{'budget':>8}  {'fits':4}  {'peak GB':>7}  {'step s':>7}  {'tokens/s':>9}", flush=True)
    was_interrupted = False
    try:
        search(attempt, smallest=args.max_seq_len, largest=args.max_budget)
    except KeyboardInterrupt:
        was_interrupted = True
        print("\nInterrupted; what is known so far:")
    found = _conclude(trials, args)
    return 130 if was_interrupted else 0 if found else 1


def _tried(step: Step, memory: CpuMemory | GpuMemory, budget: int) -> Trial:
    started, fits = time.perf_counter(), True
    try:
        with memory.watched():
            step.run(budget)
    except OverLimit:
        fits = False
    seconds, peak_gb = time.perf_counter() - started, memory.peak_gb
    gc.collect()  # the traceback held activations
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Trial(budget=budget, fits=fits, peak_gb=peak_gb, seconds=seconds)


def _print_row(trial: Trial) -> None:
    speed = f"{2 * trial.budget / trial.seconds:9,.0f}" if trial.fits else f"{'–':>9}"
    fits = "yes" if trial.fits else "no"
    print(f"{trial.budget:8}  {fits:4}  {trial.peak_gb:7.2f}  {trial.seconds:7.2f}  {speed}", flush=True)


def _described(model: Any, args: argparse.Namespace, limit: float) -> str:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    first = next(model.parameters())
    extras = [f"LoRA r={args.lora_r}"] * bool(args.lora_r) + ["gradient checkpointing"] * args.gradient_checkpointing
    parts = [f"{args.model}: {trained / 1e6:.1f}M trained parameters", str(first.dtype).removeprefix("torch."), *extras]
    return f"{', '.join(parts)}; samples of {args.max_seq_len} tokens; {limit / GB:.1f} GB on {first.device}"


def _conclude(trials: list[Trial], args: argparse.Namespace) -> bool:
    fitting = [trial.budget for trial in trials if trial.fits]
    if not fitting:
        if trials:
            print(
                f"Not even samples of {args.max_seq_len} tokens, one at a time, fit. Lower --max-seq-len, try "
                "--gradient-checkpointing or --lora-r, or take a smaller model."
            )
        return False
    best = max(fitting)
    budget = recommended(best, args.max_seq_len)
    kept = (
        f"at least {MARGIN:.0%} less than the {best} that fitted"
        if budget < best
        else "no margin left: it is one sample"
    )
    print(f"\nTrainerConfig(max_seq_len={args.max_seq_len}, micro_token_budget={budget})  # {kept}")
    if all(trial.fits for trial in trials):
        print("More may fit: nothing larger was tried.")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """A user error is one line, not a traceback."""
    try:
        return calibrate(parse(arguments))
    except LudicError as error:
        print(f"calibrate_micro_batch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
