"""Runs an evaluation: episodes with each model in turn, then the results."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ludic.batch_gen import GRPORequestStrategy
from ludic.batch_gen.requests.samples import read_samples
from ludic.cli.eval.config import EvalConfig
from ludic.cli.eval.folder import choose_folder, prepare_folder, rollouts_file, write_results
from ludic.cli.eval.models import EvaluatedModel, endpoint_models, evaluated_models, opened
from ludic.cli.eval.table import Column, make_table
from ludic.eval import EvalReport, Grading, evaluate, outcome_of
from ludic.run.env import EnvFactory
from ludic.run.parts import EpisodeSetup, env_arguments, fixed_requests, make_episode_setup
from ludic.types import InferenceSpec, ReturnSpec, Rollout, RolloutRequest, SamplingParams

console = Console(highlight=False, soft_wrap=True)


def run(config: EvalConfig, found: EnvFactory, *, resume: bool) -> int:
    """Evaluate every model on the same tasks; returns the exit code."""
    samples = None if config.env.data is None else read_samples(config.env.data)
    env = found.make(env_arguments(config.env, None if samples is None else samples[0]))
    grading = config.measure.grading(env.full_reward)
    config = replace(config, policy=asyncio.run(endpoint_models(config.policy)))
    field = evaluated_models(config.policy)
    folder = choose_folder(config, [candidate.label for candidate in field], resume=resume)
    columns: list[Column] = []
    try:
        for candidate in field:
            columns.append(asyncio.run(_measure(candidate, config, found, samples, grading, folder)))
            write_results(folder, columns)
    except KeyboardInterrupt:
        advice = f" The same command with --resume --name {folder.name} goes on." if folder.exists() else ""
        console.print(escape(f"\nStopped.{advice}"))
        return 130
    finally:
        if columns:  # also if the next model failed
            console.print(make_table(columns))
            console.print(escape(f"\nEpisodes, samples and numbers are in {folder}"))
    return 0


async def _measure(
    candidate: EvaluatedModel,
    config: EvalConfig,
    found: EnvFactory,
    samples: list[dict[str, Any]] | None,
    grading: Grading,
    folder: Path,
) -> Column:
    measure = config.measure
    seed = measure.seed if config.policy.init_seed is None else config.policy.init_seed
    async with opened(candidate, config.policy, with_tools=config.agent.may_call_tools, seed=seed) as policy:
        setup = make_episode_setup(config.env, config.agent, found, policy.client, policy.template, policy.model)
        setup = replace(setup, player=candidate.identity)
        requests = make_requests(setup, config, samples)
        prepare_folder(folder, config)  # after all checks, so that a mistake leaves no folder
        # With --resume the file holds the episodes of the earlier evaluation; otherwise it is new.
        engine = setup.engine(jsonl_path=rollouts_file(folder, candidate.file_stem), resume=True, seed=measure.seed)
        began = time.perf_counter()
        with _progress(candidate.label, len(requests), grading) as on_rollouts:
            report: EvalReport = await evaluate(
                engine,
                requests,
                grading=grading,
                max_steps=setup.max_steps,
                timeout_s=measure.timeout_s,
                concurrency=measure.concurrency,
                on_rollouts=on_rollouts,
            )
        return Column(label=candidate.label, report=report, seconds=time.perf_counter() - began)


def make_requests(
    setup: EpisodeSetup, config: EvalConfig, samples: list[dict[str, Any]] | None
) -> list[RolloutRequest]:
    """The same for every model: `samples` episodes of each task, each with its own seeds."""
    measure = config.measure
    num_tasks = measure.num_tasks if samples is None else min(measure.num_tasks or len(samples), len(samples))
    sampling = SamplingParams(
        temperature=measure.temperature, top_p=measure.top_p, max_tokens=config.agent.max_tokens or 1
    )
    inference = InferenceSpec(sampling=sampling, return_=ReturnSpec.for_eval())
    tasks = fixed_requests(setup, num_tasks, inference, samples=samples, seed=measure.seed)
    return GRPORequestStrategy(measure.samples, seed=measure.seed).expand(tasks)


@contextmanager
def _progress(label: str, num_episodes: int, grading: Grading) -> Iterator[Any]:
    """A progress bar with the mean so far; yields the callback for the rollouts of each episode."""
    scores: list[float] = []
    num_failed = 0
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[so_far]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(escape(label), total=num_episodes, so_far="")

    def on_rollouts(rollouts: list[Rollout]) -> None:
        nonlocal num_failed
        outcomes = [outcome_of(rollout, success_reward=grading.success_reward) for rollout in rollouts]
        is_graded = grading.success_reward is not None
        scores.extend(float(bool(o.correct)) if is_graded else o.reward for o in outcomes)
        num_failed += any(o.failure is not None for o in outcomes)
        mean = fmean(scores) if scores else 0.0
        so_far = f"right {mean:.1%}" if is_graded else f"reward {mean:.3f}"
        bar.update(task, advance=1, so_far=so_far + (f", {num_failed} failed" if num_failed else ""))

    with bar:
        yield on_rollouts
