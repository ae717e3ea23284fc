"""`ludic serve --tinker` against `ludic train`'s own path, and eight tenants against one, in one run.

A step samples `--prompts` × `--group` replies of `--new-tokens` tokens and trains a LoRA adapter on them with PPO's loss.
- own: agent, rollout engine, embedded engine and Trainer in this process, as `ludic train --lora-rank` puts them together;
- one: the official SDK in another process: save_weights_and_get_sampling_client, sample, forward_backward, optim_step;
- eight: eight such processes at a time, each with a key and an adapter. Their sum is compared with one.

Own and one alternate, `--rounds` times; the medians are compared. Every step trains the same number of tokens.

    .venv/bin/python benchmarks/tinker_server.py                        # SmolLM2; small on a CPU
    .venv/bin/python benchmarks/tinker_server.py --shape 135m --layers 4   # random weights, for a slow CPU
    .venv/bin/python benchmarks/tinker_server.py --shape 1.5b              # random weights, on a GPU
"""

import argparse
import asyncio
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engine_gpu import SHAPES, append_record, config_of, plain_config
from grpo_step import OurStep
from machine import ON_GPU, commit, hardware

from ludic.models.loading import character_tokenizer
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_policy

GOALS = {"one": 0.85, "many": 0.70}
SIZES = ("prompts", "group", "prompt_tokens", "new_tokens")


# --- the server and its tenants ---


class Tenant:
    """A process with the SDK (tinker_tenant.py)."""

    def __init__(self, url: str, key: str, options: argparse.Namespace) -> None:
        known = json.dumps({name: getattr(options, name) for name in (*SIZES, "model", "lora_rank", "vocab_size")})
        command = [sys.executable, str(Path(__file__).with_name("tinker_tenant.py")), url, key, known]
        environment = {**os.environ, "TINKER_TELEMETRY": "0", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, num_steps: int) -> None:
        assert self._process.stdin is not None
        print(num_steps, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("A tenant has ended; see above.")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextlib.contextmanager
def served(options: argparse.Namespace, keys: dict[str, str]) -> Iterator[str]:
    """`ludic serve --tinker` in a process; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "keys")
        file.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
        command = [sys.executable, "-m", "ludic.cli.main", "serve", "--tinker", "--model", options.model, "--port", "0"]
        command += ["--api-keys", str(file), "--data", str(Path(folder, "data")), *options.server_flags.split()]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)

        threading.Thread(target=read, daemon=True).start()
        try:
            while "http://" not in (line := lines.get(timeout=600)):
                print(line, end="", flush=True)
            yield next(word for word in line.split() if word.startswith("http://")).rstrip("/,")
        finally:
            process.terminate()
            process.wait(60)


# --- both sides ---


def own_rows(own: OurStep, loop: asyncio.Runner, num_steps: int) -> list[dict[str, float]]:
    rows = loop.run(own.steps(num_steps, 0, 0))
    return [
        {
            "step_s": row["wall_s"],
            "publish_s": row["perf/publish_s"],
            "generation_s": row["perf/fetch_s"],
            "update_s": row["perf/update_s"],
            "num_trained": row["train/num_tokens"],
        }
        for row in rows
    ]


def median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def show(name: str, rows: list[dict[str, float]]) -> float:
    """Prints the medians; returns trained tokens per second of the whole step."""
    speed = statistics.median(row["num_trained"] / row["step_s"] for row in rows)
    phases = ", ".join(f"{phase} {median(rows, f'{phase}_s'):.2f}" for phase in ("generation", "update", "publish"))
    print(f"  {name:<6} {1 / median(rows, 'step_s'):.3f} steps/s, {speed:,.0f} tok/s; seconds: {phases}", flush=True)
    return speed


def measure(options: argparse.Namespace) -> None:
    settings = ModelSettings(model=options.model, lora_rank=options.lora_rank)
    loaded = load_policy(settings)
    options.vocab_size = loaded.model.config.vocab_size
    own = OurStep(options, loaded.model)
    keys = {f"tenant{i}": f"tml-tenant{i}" for i in range(options.tenants)}
    rows: dict[str, list[dict[str, float]]] = {"own": [], "one": []}
    with contextlib.ExitStack() as closing:
        url = closing.enter_context(served(options, keys))
        first = Tenant(url, keys["tenant0"], options)
        closing.callback(first.close)
        loop = closing.enter_context(asyncio.Runner())
        own_rows(own, loop, 2)  # compiles and captures on a GPU
        first.answer()  # it is ready
        first.ask(2)
        first.answer()
        for _ in range(options.rounds):
            rows["own"] += own_rows(own, loop, options.steps)
            first.ask(options.steps)
            rows["one"] += first.answer()["steps"]
        own.client.close()
        speeds = {name: show(name, found) for name, found in rows.items()}
        tenants = [first, *(Tenant(url, key, options) for key in list(keys.values())[1:])]
        for tenant in tenants[1:]:
            closing.callback(tenant.close)
            tenant.answer()
        for num_steps in (1, options.steps):  # the first is not measured
            for tenant in tenants:
                tenant.ask(num_steps)
            answers = [tenant.answer() for tenant in tenants]
    seconds = max(answer["ended"] for answer in answers) - min(answer["started"] for answer in answers)
    many = [row for answer in answers for row in answer["steps"]]
    total = sum(row["num_trained"] for row in many) / seconds
    print(f"  {options.tenants:<6} {len(many) / seconds:.3f} steps/s, {total:,.0f} tok/s together")
    ratios = {"one": speeds["one"] / speeds["own"], "many": total / speeds["one"]}
    updates = median(rows["own"], "update_s") / median(rows["one"], "update_s")
    generations = median(rows["own"], "generation_s") / median(rows["one"], "generation_s")
    print(f"one / own: {ratios['one']:.2f} (goal {GOALS['one']}); update {updates:.2f}, generation {generations:.2f}")
    print(f"sum of {options.tenants} / one: {ratios['many']:.2f} (goal {GOALS['many']})")
    sizes = {name: getattr(options, name) for name in SIZES}
    append_record(
        options.json, benchmark="tinker_server", model=options.model, **sizes, **speeds, many=total, ratios=ratios
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as for ludic serve")
    parser.add_argument("--shape", choices=list(SHAPES), default=None, help="random weights of this shape instead")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=16 if ON_GPU else 2)
    parser.add_argument("--group", type=int, default=8 if ON_GPU else 4)
    parser.add_argument("--prompt-tokens", type=int, default=100 if ON_GPU else 48)
    parser.add_argument("--new-tokens", type=int, default=256 if ON_GPU else 16)
    parser.add_argument("--steps", type=int, default=4 if ON_GPU else 2, help="measured ones, per round and tenant")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--share-prefixes", action=argparse.BooleanOptionalAction, default=True, help="of the own path")
    parser.add_argument("--micro-tokens", type=int, default=None, help="tokens of the own path's micro-batch")
    parser.add_argument("--server-flags", default="", help="more flags of ludic serve, in one word")
    parser.add_argument("--json", default=None, help="append one record to this file")
    options = parser.parse_args()
    options.env_seconds = 0.0  # OurStep reads it
    with tempfile.TemporaryDirectory() as folder:
        if options.shape is not None:
            options.model = str(Path(folder, "config.json"))
            config = plain_config(config_of(options.shape))
            config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
            Path(options.model).write_text(json.dumps(config))
            character_tokenizer().save_pretrained(folder)
        else:
            options.shape = "135m"
        print(
            f"Tinker server, {options.model}, rank {options.lora_rank}, {options.prompts} × {options.group} samples, "
            f"{options.prompt_tokens} → {options.new_tokens} tokens; torch {torch.__version__}, {hardware()}, commit {commit()}",
            flush=True,
        )
        measure(options)


if __name__ == "__main__":
    main()
