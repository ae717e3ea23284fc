"""Tokens per second of `ludic eval`, and of the embedded engine alone on the same requests.

The evaluation runs as the command does, without its printing: agents, chat template, tokenizer, parser, grading, the file of
rollouts, the report. Then the same prompts go straight to the engine, all at once, each for as many tokens as its episode
sampled, with the same seeds. Both passes begin with an empty prompt cache and alternate. The first evaluation is shown by itself:
it includes what an engine does once (on a GPU: compiling, capturing graphs). `--profile` says where it spends its time.

    .venv/bin/python research/experiments/eval_overhead.py                                                     # a CPU, a minute
    .venv/bin/python research/experiments/eval_overhead.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --episodes 1276 --max-tokens 512  # a GPU
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ludic.batch_gen.requests.samples import read_samples
from ludic.cli.eval.config import resolve
from ludic.cli.eval.models import evaluated_models, opened
from ludic.cli.eval.results import Column, rollouts_file, write_results
from ludic.cli.eval.run import make_requests, read_command
from ludic.eval import evaluate
from ludic.inference.local import LocalEngine
from ludic.run.given import env_factory
from ludic.run.parts.episodes import make_episode_setup
from ludic.tasks import long_lived_objects_exempt
from ludic.types import ChatResponse, Info, TokenCompletionRequest


@dataclass
class Pass:
    """One way through all requests."""

    num_tokens: int
    seconds: float
    cpu_s: float
    """Of all threads of this process."""

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds


class Recorder:
    """Passes requests on to the engine and keeps them, with the number of tokens that each was answered with."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.max_sequences = engine.max_sequences
        self.answered: list[tuple[TokenCompletionRequest, int]] = []

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        response, info = await self._engine.complete_tokens(request)
        self.answered.append((request, len(response.completion_token_ids)))
        return response, info

    def sync_weights(self, params: Any, *, timeout_s: float = 600.0, version: Any = None) -> str:
        raise RuntimeError("an evaluation changes no weights")


class Stacks:
    """Looks every few milliseconds where each thread is. Waiting threads are left out."""

    EVERY_S = 0.005
    IDLE = ("wait", "select", "poll", "accept", "_worker", "get", "acquire", "recv", "readinto", "_recv")

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Stacks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(self.EVERY_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident == threading.get_ident() or frame.f_code.co_name in self.IDLE:
                    continue
                name, functions = names.get(ident, "?"), set()
                while frame is not None:
                    path = Path(frame.f_code.co_filename)
                    functions.add(f"{'/'.join(path.parts[-2:])}:{frame.f_code.co_name}")
                    frame = frame.f_back
                self.seen.update((name, function) for function in functions)

    def show(self, count: int) -> None:
        """The functions under which most time was spent, callers included."""
        print("seconds  thread, function (with what it calls)")
        for (name, function), times in self.seen.most_common(count):
            print(f"{times * self.EVERY_S:7.2f}  {name}, {function}")


async def timed(engine: LocalEngine, work: Callable[[], Awaitable[int]]) -> Pass:
    engine.new_version()  # empties the prompt cache
    cpu_s, began = time.process_time(), time.perf_counter()
    num_tokens = await work()
    return Pass(num_tokens, time.perf_counter() - began, time.process_time() - cpu_s)


async def run_passes(
    args: list[str], folder: Path, num_rounds: int, *, profiled: bool = False
) -> tuple[list[Pass], list[Pass]]:
    """(evaluations, the engine alone); the first evaluation has no counterpart."""
    command, config = read_command(args)
    found = env_factory(command.target)
    config = resolve(config, found)
    assert config.env.data is not None, "main gives --data"
    samples, measure = read_samples(config.env.data), config.measure
    (model,) = evaluated_models(config.policy)
    async with opened(model, config.policy, with_tools=False, seed=0, concurrency=measure.concurrency) as policy:
        engine = policy.client
        assert isinstance(engine, LocalEngine), "the model is served in this process"
        recorder = Recorder(engine)
        setup = make_episode_setup(config.env, config.agent, found, recorder, policy.template, policy.model)
        requests = make_requests(setup, config, samples)
        number = 0

        async def evaluation() -> int:
            nonlocal number
            number += 1
            recorder.answered = []
            player = setup.engine(jsonl_path=rollouts_file(folder, f"pass-{number}"), resume=True, seed=measure.seed)
            report = await evaluate(
                player, requests, grading=measure.grading(1.0), max_steps=setup.max_steps,
                concurrency=measure.concurrency or setup.concurrency,
            )  # fmt: skip
            write_results(folder, [Column(label=model.label, report=report, seconds=0.0)])
            return sum(num_tokens for _, num_tokens in recorder.answered)

        async def engine_alone() -> int:
            asked = [
                replace(request, sampling=replace(request.sampling, max_tokens=num_tokens, ignore_eos=True))
                for request, num_tokens in recorder.answered
            ]
            answers = await asyncio.gather(*map(engine.complete_tokens, asked))
            return sum(len(response.completion_token_ids) for response, _ in answers)

        folder.mkdir(exist_ok=True)
        with long_lived_objects_exempt():
            with Stacks() if profiled else contextlib.nullcontext() as stacks:
                evaluations, alone = [await timed(engine, evaluation)], []
            if stacks is not None:
                stacks.show(70)
            for _ in range(num_rounds):
                alone.append(await timed(engine, engine_alone))
                evaluations.append(await timed(engine, evaluation))
    return evaluations, alone


def write_questions(path: Path, count: int) -> None:
    """Word problems of 20 to 120 words."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            numbers = [rng.randrange(2, 90) for _ in range(rng.randrange(2, 12))]
            parts = [
                f"On day {day} Ada picks {n} apples at farm {rng.randrange(999)}." for day, n in enumerate(numbers)
            ]
            question = f"{' '.join(parts)} How many apples does Ada have in the end?"
            file.write(json.dumps({"question": question, "answer": f"They add up.\n#### {sum(numbers)}"}) + "\n")


def show(name: str, passes: list[Pass], num_episodes: int) -> None:
    speed = statistics.median(one.speed for one in passes)
    seconds = statistics.median(one.seconds for one in passes)
    cpu_ms = 1e3 * statistics.median(one.cpu_s for one in passes) / num_episodes
    print(f"{name:28} {passes[-1].num_tokens:10,d} {seconds:9.2f} {speed:12,.0f} {cpu_ms:16.2f}")


def main() -> None:
    on_gpu = torch.cuda.is_available()
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="smollm2-135m" if on_gpu else "tiny", help="as for ludic eval")
    arguments.add_argument("--data", type=Path, help="JSONL of GSM8K questions; by default made up")
    arguments.add_argument("--episodes", type=int, default=1024 if on_gpu else 128)
    arguments.add_argument("--concurrency", type=int, help="episodes at a time; by default all")
    arguments.add_argument("--max-tokens", type=int, default=512 if on_gpu else 64)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--profile", action="store_true", help="say where the first evaluation spends its time")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as made:
        data = options.data or Path(made) / "questions.jsonl"
        if options.data is None:
            write_questions(data, options.episodes)
        args = ["gsm8k", "--model", options.model, "--data", str(data), "--num-tasks", str(options.episodes),
                "--temperature", "1.0", "--max-tokens", str(options.max_tokens),
                "--concurrency", str(options.concurrency or options.episodes)]  # fmt: skip
        evaluations, alone = asyncio.run(
            run_passes(args, Path(made) / "eval", options.rounds, profiled=options.profile)
        )
    print(
        f"{options.model}, {options.episodes} episodes on {'a GPU' if on_gpu else 'a CPU'}, torch {torch.__version__}\n"
    )
    print(f"{'':28} {'tokens':>10} {'seconds':>9} {'tokens/s':>12} {'CPU ms/episode':>16}")
    show("ludic eval, first time", evaluations[:1], options.episodes)
    show("ludic eval", evaluations[1:], options.episodes)
    show("the engine alone", alone, options.episodes)
    ratios = [one.speed / other.speed for one, other in zip(evaluations[1:], alone, strict=True)]
    print(
        f"\nludic eval / the engine alone: {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
