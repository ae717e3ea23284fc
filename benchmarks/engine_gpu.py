"""The embedded engine's workloads on a GPU, beside vLLM on the same prompts where it is installed.

`benchmarks/engine.py` runs this file; its flags are there. Random weights in bf16, temperature 1, every request is answered in
full. Ours always returns log-probs, as training needs them; vLLM runs with and without. The first run of a workload compiles and
captures: "warm-up" is its time minus the best later run's. vLLM runs before ours, in its own process, on an empty GPU.

- fixed N: N requests of 128 prompt tokens and 256 new ones, all at once;
- ragged: 100 to 600 prompt tokens, 32 to 1,024 new ones;
- groups: 64 prompts of 1,024 tokens with 16 samples each, 256 new tokens.

The shape `tiny` has small versions of them, to try the script on a CPU.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import limit_s, make, qwen, qwen_7b, smollm2, tiny
from machine import ON_GPU, commit, described, hardware, show_kernel_times, versions

from ludic.inference.local import LocalEngine
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest

SHAPES: dict[str, Callable[[], Any]] = {"tiny": tiny, "135m": smollm2, "1.5b": qwen, "7b": qwen_7b}
ENOUGH_S = 20.0
"""A workload is repeated until its timed runs have taken this long, or `--repeat` times."""
VLLM_ON_CPU = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 28,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
}
"""To try the script; no measurement."""
RECORD = "RECORD "
"""Before each line of JSON that a child process prints for this one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are sent at the same moment."""

    name: str
    requests: list[tuple[list[int], int]]
    """Prompt, number of new tokens."""
    max_sequences: int
    """How many of them an engine may run at the same time."""

    @property
    def num_new(self) -> int:
        return sum(new for _, new in self.requests)

    @property
    def max_len(self) -> int:
        return max(len(prompt) + new for prompt, new in self.requests)


# --- workloads ---


def fixed(vocab: int, count: int, prompt: int = 128, new: int = 256) -> Workload:
    prompts = np.random.default_rng(0).integers(3, vocab, size=(count, prompt)).tolist()
    requests = [(ids, new) for ids in prompts]
    return Workload(name=f"fixed{count}", requests=requests, max_sequences=max(count, 128))


def ragged(vocab: int, count: int, max_sequences: int, prompt: tuple[int, int], new: tuple[int, int]) -> Workload:
    rng = np.random.default_rng(0)
    lengths = zip(rng.integers(*prompt, size=count), rng.integers(*new, size=count), strict=True)
    requests = [(rng.integers(3, vocab, size=length).tolist(), int(num_new)) for length, num_new in lengths]
    return Workload(name="ragged", requests=requests, max_sequences=max_sequences)


def groups(vocab: int, count: int, size: int, prompt: int, new: int) -> Workload:
    prompts = np.random.default_rng(0).integers(3, vocab, size=(count, prompt)).tolist()
    requests = [(ids, new) for ids in prompts for _ in range(size)]
    return Workload(name="groups", requests=requests, max_sequences=count * size)


def workloads(shape: str, vocab: int) -> list[Workload]:
    if shape == "tiny":
        return [
            *(fixed(vocab, count, 16, 32) for count in (1, 8, 32)),
            ragged(vocab, 32, 32, (10, 60), (4, 64)),
            groups(vocab, 4, 8, 64, 16),
        ]
    # The weights and the cache of the largest shape leave room for 256 ragged sequences on smaller GPUs, too.
    num_ragged, max_ragged = (512, 256) if shape == "7b" else (1024, 1024)
    return [
        *(fixed(vocab, count) for count in (1, 128, 512, 1024)),
        ragged(vocab, num_ragged, max_ragged, (100, 600), (32, 1024)),
        groups(vocab, 64, 16, 1024, 256),
    ]


def chosen(shape: str, only: list[str]) -> list[Workload]:
    """The workloads whose name starts with one of `only`; all without it. `fixed1` is one workload, `fixed` are four."""
    found = workloads(shape, config_of(shape).vocab_size)
    names = {work.name for work in found}
    wanted = [name for name in names if any(name == o or (o not in names and name.startswith(o)) for o in only)]
    if only and not wanted:
        raise SystemExit(f"--only {' '.join(only)}: the shape {shape} has {', '.join(work.name for work in found)}.")
    return [work for work in found if not only or work.name in wanted]


def config_of(shape: str) -> Any:
    with torch.device("meta"):
        return SHAPES[shape]().config


# --- timing ---


def timed(run: Callable[[], float], repeat: int) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < repeat and (not seconds or sum(seconds) < ENOUGH_S):
        seconds.append(run())
    return seconds


def run_ours(engine: LocalEngine, work: Workload) -> float:
    """Seconds, prompts included, without cached prefixes of an earlier run."""
    requests = [
        TokenCompletionRequest(
            model="",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=1.0, max_tokens=num_new, ignore_eos=True),
            return_=ReturnSpec.for_rl(),
            seed=number,
        )
        for number, (prompt, num_new) in enumerate(work.requests)
    ]

    async def all_at_once() -> int:
        answers = await asyncio.gather(*(engine.complete_tokens(request) for request in requests))
        return sum(len(response.completion_token_ids) for response, _ in answers)

    engine.new_version()
    started = time.perf_counter()
    num_tokens = asyncio.run(all_at_once())
    seconds = time.perf_counter() - started
    assert num_tokens == work.num_new, (num_tokens, work.num_new)
    return seconds


def measure_ours(model: Any, work: Workload, repeat: int, *, profiled: bool = False) -> tuple[float, float]:
    """Seconds of the best run after the first, and warm-up. `profiled`: one more run says where its time goes."""
    engine = LocalEngine(model, max_sequences=work.max_sequences, max_model_len=work.max_len)
    try:
        first = run_ours(engine, work)
        best = min(timed(lambda: run_ours(engine, work), repeat))
        if profiled:
            show_kernel_times(lambda: run_ours(engine, work))
    finally:
        engine.close()
    return best, first - best


# --- vLLM, in a child process ---


def plain_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint without weights, in the fields that every version of transformers reads."""
    sizes = (
        "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings tie_word_embeddings rms_norm_eps hidden_act"
    )
    return {name: getattr(config, name) for name in sizes.split()} | {
        "architectures": ["Qwen2ForCausalLM" if config.model_type == "qwen2" else "LlamaForCausalLM"],
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def run_child(script: str, arguments: list[str], python: str = sys.executable) -> Iterator[dict[str, Any]]:
    """The records that a script in benchmarks/others prints, as they come. If it fails, its errors are shown."""
    here = Path(__file__).resolve().parent
    # research/experiments/vllm.py must not be found where the child imports vLLM.
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [path for path in paths if Path(path).resolve() != here]
    command = [python, str(here / "others" / script), *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    log = Path(tempfile.gettempdir(), f"{script}.log")
    lines: list[str] = []
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            file.write(line)
            if line.startswith(RECORD):
                yield json.loads(line.removeprefix(RECORD))
            else:
                lines.append(line.rstrip())
    if child.returncode:
        reasons = [line for line in lines if "Error" in line][:5]
        told = f"{script} ended with {child.returncode}; its output is in {log}:"
        print(told, *reasons, *lines[-3:], sep="\n  ", flush=True)


def measure_vllm(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One child per number of sequences that vLLM may run at a time: all requests, or fewer where a workload says so."""
    work_list = chosen(shape, options.only)
    largest = max(work.max_sequences for work in work_list)
    by_limit: dict[int, dict[str, Any]] = {}
    for work in work_list:
        waits = len(work.requests) > work.max_sequences
        by_limit.setdefault(work.max_sequences if waits else largest, {})[work.name] = work.requests
    found = []
    for max_sequences, requests in by_limit.items():
        task = {
            "config": plain_config(config_of(shape)),
            "max_sequences": max_sequences,
            "max_model_len": 2048,
            "workloads": requests,
            "repeat": options.repeat,
            "enough_s": ENOUGH_S,
            "settings": {"dtype": "bfloat16", "gpu_memory_utilization": 0.8} if ON_GPU else VLLM_ON_CPU,
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "work.json")
            path.write_text(json.dumps(task))
            for row in run_child("vllm_decode.py", [str(path)], options.vllm_python):
                work = next(work for work in work_list if work.name == row["workload"])
                speed, has = work.num_new / row["seconds"], "with" if row["logprobs"] else "without"
                print(
                    f"vLLM {row['version']}, {shape}, {work.name}: {speed:,.0f} tok/s {has} log-probs; "
                    f"start-up {row['start_s']:.0f} s",
                    flush=True,
                )
                own = {name: row[name] for name in ("logprobs", "seconds", "start_s")}
                record_row(options.json, shape, work, engine="vllm", **own, versions={"vllm": row["version"]})
                found.append(row)
    return found


# --- records and rows ---


def append_record(path: str | None, **record: Any) -> None:
    """One line of JSON with the hardware, the versions and the commit."""
    if path is None:
        return
    facts = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "versions": versions("transformers", "triton") | record.pop("versions", {}),
        "commit": commit(),
    }
    with Path(path).open("a") as file:
        file.write(json.dumps({**record, **facts}) + "\n")


def record_row(path: str | None, shape: str, work: Workload, *, seconds: float, **facts: Any) -> None:
    """The record of a row."""
    what = {"benchmark": "engine", "shape": shape, "workload": work.name, "batch": len(work.requests)}
    append_record(path, **what, tokens_per_s=work.num_new / seconds, seconds=seconds, **facts)


def measure(shape: str, theirs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The rows of one shape; `theirs` are vLLM's."""
    by_row = {(row["workload"], row["logprobs"]): row for row in theirs}
    model = make(SHAPES[shape], "cuda" if ON_GPU else "cpu", torch.bfloat16 if ON_GPU else torch.float32)
    for work in chosen(shape, options.only):
        seconds, warm_up_s = measure_ours(model, work, options.repeat, profiled=options.profile)
        record_row(options.json, shape, work, engine="ludic", logprobs=True, seconds=seconds, warm_up_s=warm_up_s)
        compared = ""
        for logprobs in (True, False):
            row = by_row.get((work.name, logprobs))
            if row is None:
                compared += f" {'—':>10} {'—':>7}"
                continue
            compared += f" {work.num_new / row['seconds']:10,.0f} {row['seconds'] / seconds:6.2f}x"
        bound = "—"
        if work.name.startswith("fixed"):
            prompt, new = len(work.requests[0][0]), work.requests[0][1]
            bound = f"{limit_s(model, len(work.requests), prompt + new // 2) * new / seconds:.0%}"
        print(
            f"{shape:5} {work.name:10} {len(work.requests):5d} {work.num_new / seconds:10,.0f} {seconds:8.2f} "
            f"{warm_up_s:8.1f} {bound:>8}{compared}",
            flush=True,
        )
    del model
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def run(options: argparse.Namespace) -> None:
    shapes = options.shape or (["135m", "1.5b", "7b"] if ON_GPU else ["tiny"])
    theirs = {name: measure_vllm(name, options) if options.vllm else [] for name in shapes}  # while the GPU is empty
    print(
        f"{'shape':5} {'workload':10} {'batch':>5} {'ours':>10} {'seconds':>8} {'warm-up':>8} {'of limit':>8} "
        f"{'vLLM, logp':>10} {'ratio':>7} {'vLLM':>10} {'ratio':>7}   (tokens/s)\n{described()}",
        flush=True,
    )
    for name in shapes:
        measure(name, theirs[name], options)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=None, help="default: all but tiny on a GPU")
    parser.add_argument("--only", nargs="+", default=[], help="workloads: fixed1, fixed128, fixed, ragged, groups …")
    parser.add_argument("--vllm", action="store_true", help="run vLLM on the same workloads, if it can be imported")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM, if it is another one")
    parser.add_argument("--repeat", type=int, default=2, help="timed runs of a workload, after the first")
    parser.add_argument("--profile", action="store_true", help="on a GPU: one more run, with the time of its kernels")
    parser.add_argument("--json", default=None, help="append one record per row to this file")
