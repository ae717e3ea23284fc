"""`ludic eval`: plays the same tasks with each model in turn and prints their results. See docs/evaluation.md."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ludic.agents import Agent
from ludic.batch_gen import GRPORequestStrategy
from ludic.batch_gen.requests.groups import assign_roles
from ludic.batch_gen.requests.streams import held_out, is_stream, read_or_generate
from ludic.cli.args import Switch, Target, config_file, parse_with_settings
from ludic.cli.eval.config import EvalConfig, PolicySettings, of_run, resolve, trains_on
from ludic.cli.eval.models import EvaluatedModel, endpoint_models, evaluated_models, opened, pinned
from ludic.cli.eval.results import (
    Column,
    choose_folder,
    make_table,
    prepare_folder,
    rollouts_file,
    write_page,
    write_results,
)
from ludic.cli.terminal.colour import make_console
from ludic.eval import Grading, outcome_of
from ludic.eval import evaluate as run_episodes
from ludic.interaction import Policies
from ludic.interaction.base import AnyEnv
from ludic.run.given import EnvFactory, env_factory
from ludic.run.parts.episodes import EpisodeSetup, make_episode_setup
from ludic.run.parts.requests import fixed_requests
from ludic.run.parts.samples import env_arguments
from ludic.run.protocols.agents import agent_factory
from ludic.tasks import long_lived_objects_exempt
from ludic.types import ChatClient, ConfigError, InferenceSpec, ReturnSpec, Rollout, RolloutRequest, SamplingParams

Samples: TypeAlias = list[dict[str, Any]] | None
_MODEL, _OPPONENT = "evaluated", "opponent"
"""Names of the two policies of an evaluation with --against."""
console = make_console()

DESCRIPTION = (
    "Play an environment and say how well it went: accuracy and rewards with 95 % confidence intervals, pass@k, majority@k. A "
    "reply that cannot be read is a wrong answer; so is an episode that was cut off or failed. Episodes are written to a folder "
    "under runs/eval/ as they finish; --resume goes on with it."
)
USUAL = (
    "target", "model", "against", "data", "num_tasks", "samples", "pass_k", "temperature", "max_tokens", "base_url", "name",
    "resume",
)  # fmt: skip
"""Flags that `--help` shows."""


@dataclass(frozen=True)
class _EvalArgs:
    """The command."""

    target: Target
    """Id of an env (`ludic envs`), file.py:Class of your own, or the folder of a training run: its env, before and after."""
    resume: Switch = False
    """Go on with the evaluation in the folder --name, or else with the newest of this env and model."""


def evaluate(args: list[str]) -> int:
    command, config = read_command(args)
    run = Path(command.target)
    if run.is_dir() and trains_on(run, config.env.data):
        print(f"These are the samples that {run} was trained on, {config.env.data}; --data FILE.jsonl takes others.")
    found = env_factory(config.env.id, server=config.env.env_server)
    return _compare(resolve(config, found), found, resume=command.resume)


def read_command(args: list[str]) -> tuple[_EvalArgs, EvalConfig]:
    """The arguments, and the settings: flags over the settings of the run that the target names, over the defaults."""
    command, config = _parse(args, EvalConfig())
    folder = Path(command.target)
    if folder.is_dir() and config_file(command.target) is None:
        raise ConfigError(f"{folder} is a folder without a config.toml. Name an env, and give the folder as --model.")
    if not folder.is_dir():
        return command, replace(config, env=replace(config.env, id=command.target))
    usual = of_run(folder)
    if not usual.env.id:
        raise ConfigError(f"The run in {folder} names no env. Give one: ludic eval ENV --model {folder}")
    command, config = _parse(args, replace(usual, policy=replace(usual.policy, model=())))
    model = config.policy.model or usual.policy.model
    return command, replace(config, policy=replace(config.policy, model=model))


def _parse(args: list[str], default: EvalConfig) -> tuple[_EvalArgs, EvalConfig]:
    return parse_with_settings(_EvalArgs, default, args, prog="ludic eval", description=DESCRIPTION, usual=USUAL)


def _compare(config: EvalConfig, found: EnvFactory, *, resume: bool) -> int:
    """Evaluate every model on the same tasks; returns the exit code."""
    measure, data = config.measure, config.env.data
    if is_stream(data) and not measure.num_tasks:
        raise ConfigError(
            f"--num-tasks 0 takes all of --data, but {data} generates samples without end. Give a number."
        )
    samples = None if data is None else read_or_generate(data, num=measure.num_tasks, seed=held_out(measure.seed))
    env = found.make(env_arguments(config.env, None if samples is None else samples[0]))
    config = replace(config, policy=_with_opponent(config, env.agent_ids))
    config = replace(config, policy=asyncio.run(endpoint_models(config.policy)))
    models = evaluated_models(config.policy)
    folder = choose_folder(config, [model.label for model in models], resume=resume)
    columns: list[Column] = []
    try:
        for model in models:
            columns.append(asyncio.run(_measure(model, config, found, samples, env, folder)))
            write_results(folder, columns)
    except KeyboardInterrupt:
        advice = f" The same command with --resume --name {folder.name} goes on." if folder.exists() else ""
        console.print(escape(f"\nStopped.{advice}"))
        return 130
    finally:
        if columns:  # also if the next model failed
            console.print(make_table(columns))
            page = write_page(folder)
            console.print(escape(f"\nEpisodes, samples and numbers are in {folder}"))
            if page is not None:
                console.print(escape(f"The worst rollouts, and some of the best: {page}"))
    return 0


def _with_opponent(config: EvalConfig, agent_ids: list[str]) -> PolicySettings:
    """The policy settings with the checkpoint of the opponent; prints a line where one model plays several roles."""
    policy, roles = config.policy, " and ".join(agent_ids)
    if policy.against is None:
        if len(agent_ids) > 1:
            print(f"Each model plays {roles}, so it meets itself. --against MODEL (or RUN@10) gives it an opponent.")
        return policy
    if len(agent_ids) == 1 or policy.base_url is not None or config.agent.protocol is not None:
        raise ConfigError(
            f"--against {policy.against} takes an env with several roles (this one has {roles}), models of this process (no "
            "--base-url) and no --protocol. Leave it out, or the others."
        )
    return replace(policy, against=pinned(policy.against))


async def _measure(
    model: EvaluatedModel, config: EvalConfig, found: EnvFactory, samples: Samples, env: AnyEnv, folder: Path
) -> Column:
    measure, grading = config.measure, config.measure.grading(env.full_reward)
    seed = measure.seed if config.policy.init_seed is None else config.policy.init_seed
    with_tools, concurrency = config.agent.may_call_tools, measure.concurrency
    open_model = partial(opened, settings=config.policy, with_tools=with_tools, seed=seed, concurrency=concurrency)
    async with open_model(model) as policy, AsyncExitStack() as stack:
        setup = make_episode_setup(
            config.env, config.agent, found, policy.client, policy.template, policy.model, reward=config.reward
        )
        setup = replace(setup, player=model.identity)
        stack.callback(setup.close)
        requests = make_requests(setup, config, samples)
        if config.policy.against is not None:
            rival = await stack.enter_async_context(open_model(EvaluatedModel(_OPPONENT, config.policy.against)))
            playing = {_MODEL: policy, _OPPONENT: rival}

            def make_agent(client: ChatClient, name: str) -> Agent:
                return agent_factory(config.agent, playing[name].template, name)(client)

            clients = {name: each.client for name, each in playing.items()}
            setup = replace(setup, policies=Policies(clients, make_agent))
            seatings = [dict.fromkeys(env.agent_ids, _OPPONENT) | {own: _MODEL} for own in env.agent_ids]
            requests = [assign_roles(each, seatings[each.meta["sample_index"] % len(seatings)]) for each in requests]
        prepare_folder(folder, config)  # after all checks, so that a mistake leaves no folder
        # With --resume the file holds the episodes of the earlier evaluation; otherwise it is new.
        engine = setup.engine(
            jsonl_path=rollouts_file(folder, model.file_stem), resume=True, seed=measure.seed, max_unscored_share=0.5
        )
        with long_lived_objects_exempt(), _progress(model.label, len(requests), grading) as on_rollouts:
            began = time.perf_counter()
            report = await run_episodes(
                engine,
                requests,
                grading=grading,
                max_steps=setup.max_steps,
                timeout_s=measure.timeout_s,
                concurrency=concurrency or setup.concurrency,
                on_rollouts=on_rollouts,
                without=_OPPONENT,
            )
        report = replace(report, metrics={**report.metrics, **engine.scorer_metrics()})
        return Column(label=model.label, report=report, seconds=time.perf_counter() - began)


def make_requests(setup: EpisodeSetup, config: EvalConfig, samples: Samples) -> list[RolloutRequest]:
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
    total, num_scores, num_failed = 0.0, 0, 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[so_far]}")
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(escape(label), total=num_episodes, so_far="")

    def on_rollouts(rollouts: list[Rollout]) -> None:
        nonlocal total, num_scores, num_failed
        own = [rollout for rollout in rollouts if not rollout.is_thread and rollout.policy != _OPPONENT]
        outcomes = [outcome_of(rollout, success_reward=grading.success_reward) for rollout in own]
        is_graded = grading.success_reward is not None
        total += sum(float(bool(o.correct)) if is_graded else o.reward for o in outcomes)
        num_scores += len(outcomes)
        num_failed += any(o.failure is not None for o in outcomes)
        mean = total / num_scores if num_scores else 0.0
        so_far = f"right {mean:.1%}" if is_graded else f"reward {mean:.3f}"
        bar.update(task, advance=1, so_far=so_far + (f", {num_failed} failed" if num_failed else ""))

    with bar:
        yield on_rollouts
