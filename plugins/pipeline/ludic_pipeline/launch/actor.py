"""`ludic actor`: runs episodes for the learner of a pipeline, with the settings of its `ludic train`. See docs/pipeline.md."""

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ludic.batch_gen.episodes import TooManyFailures
from ludic.cli.args import TRY_AGAIN
from ludic.cli.terminal.colour import harmless
from ludic.distributed.folder import FolderFollower
from ludic.run.config.run_config import RunConfig
from ludic.run.given import EnvFactory
from ludic.run.model import (
    load_policy,
    load_tokenizer,
    local_engine,
    make_template,
    use_threads,
    with_pinned_checkpoints,
    without_adapter,
)
from ludic.run.names import ROLLOUTS, WEIGHTS
from ludic.run.parts.episodes import EpisodeSetup, make_episode_setup
from ludic.run.parts.requests import request_strategy, train_requests
from ludic.run.policies import resolve_run
from ludic.run.resolve import ResolvedRun
from ludic.tasks import cancel_all
from ludic.types import ChatClient, PolicyGone, derive_seed, shown_url
from ludic.util.stop import StopRequests
from ludic_pipeline.feature import pipeline_of, queue_key_of, redis_url, required_servers
from ludic_pipeline.generation import connect_to_servers, pipeline_algorithm
from ludic_pipeline.queue.actor import ActorReport, ActorSettings, run_pipeline_actor
from ludic_pipeline.queue.connection import RedisGone, require_redis

_ACTOR_SEEDS = 201
_SAY_EVERY_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _ActorPolicy:
    """The policy of this actor's agents."""

    client: ChatClient
    setup: EpisodeSetup
    first_version: Callable[[], Coroutine[Any, Any, object]] | None = None
    """Waited for before the first episode."""
    follow: Callable[[], Awaitable[None]] | None = None
    """Background task that loads new weights; None if the learner pushes them to the servers."""


def run_actor(config: RunConfig, env: EnvFactory, *, index: int) -> int:
    """Run episodes until stopped; returns the exit code."""
    run = resolve_run(with_pinned_checkpoints(config), env)
    require_redis("ludic actor")
    url = redis_url(pipeline_of(run.config))
    pipeline_algorithm(run)
    _say(f"Actor {index} of {run.folder}, for the queue {queue_key_of(run)} at {shown_url(url)}.")
    use_threads(run.config.model)
    try:
        with contextlib.ExitStack() as stack:
            make = _on_servers if pipeline_of(run.config).actor_engine == "vllm" else _with_an_engine
            report, code = asyncio.run(_until_stopped(run, make(run, stack), index))
    except (PolicyGone, RedisGone, TooManyFailures) as error:  # the last one: a server may have been away for too long
        print(f"ludic: {harmless(str(error))}", file=sys.stderr)
        return TRY_AGAIN
    _say("Stopped before it had weights." if report is None else f"{_report_line(report)}.")
    if report is not None and report.is_run_finished:
        _say(f"The learner has finished the run, {run.steps} updates. For more, start the learner before actors.")
    return code


# --- the policy ---


def _with_an_engine(run: ResolvedRun, stack: contextlib.ExitStack) -> _ActorPolicy:
    """An engine in this process, which follows the learner's folder."""
    config = run.config
    loaded = load_policy(without_adapter(config.model), seed=run.seed)
    engine = local_engine(
        loaded,
        max_length=run.trainer.max_seq_len,
        concurrency=config.rollouts.concurrency,
        record_experts=run.trainer.replay_experts,
    )
    stack.callback(engine.close)
    template = make_template(loaded.tokenizer, with_tools=config.agent.may_call_tools, renderer=config.agent.renderer)
    follower = FolderFollower(run.folder / WEIGHTS, engine)
    setup = make_episode_setup(config.env, config.agent, run.env, engine, template, loaded.name, reward=config.reward)
    stack.callback(setup.close)
    return _ActorPolicy(
        client=engine,
        setup=setup,
        first_version=follower.first_version,
        follow=follower.run,
    )


def _on_servers(run: ResolvedRun, stack: contextlib.ExitStack) -> _ActorPolicy:
    config = run.config
    required_servers(config.rollouts.server)
    template = make_template(
        load_tokenizer(config.model), with_tools=config.agent.may_call_tools, renderer=config.agent.renderer
    )
    client, model = connect_to_servers(run)
    stack.callback(lambda: asyncio.run(client.close()))
    setup = make_episode_setup(config.env, config.agent, run.env, client, template, model, reward=config.reward)
    stack.callback(setup.close)
    return _ActorPolicy(client=client, setup=setup)


# --- running episodes ---


def actor_seed(seed: int, index: int, life: int) -> int:
    """Seed of one actor process: actors draw different tasks, and a restarted actor does not repeat its first ones."""
    return derive_seed(seed, _ACTOR_SEEDS, index, life)


async def _until_stopped(run: ResolvedRun, policy: _ActorPolicy, index: int) -> tuple[ActorReport | None, int]:
    """The report and the exit code. The first signal lets a running push finish, the second cancels."""
    stop, signals, requests = asyncio.Event(), list[int](), StopRequests()
    running = asyncio.create_task(_run_episodes(run, policy, index, stop))

    def on_signal(number: int) -> None:
        signals.append(number)
        stop.set()
        if requests.hear() and requests.num > 1:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    report = None
    try:
        report = await running
    except asyncio.CancelledError:
        if not signals:
            raise
    return report, 128 + signals[0] if signals else 0


async def _run_episodes(run: ResolvedRun, policy: _ActorPolicy, index: int, stop: asyncio.Event) -> ActorReport | None:
    if policy.first_version is not None and not await _comes_before(stop, policy.first_version()):
        return None
    life = secrets.randbits(32)
    seed, rollouts = actor_seed(run.seed, index, life), run.config.rollouts
    path = run.folder / ROLLOUTS / f"actor-{index}-{life:08x}.jsonl.gz"
    jsonl_path = path if rollouts.save_rollouts else None
    return await run_pipeline_actor(
        policy.setup.engine(jsonl_path=jsonl_path, seed=seed),
        train_requests(run, policy.setup, seed),
        redis_url=redis_url(pipeline_of(run.config)),
        queue_key=queue_key_of(run),
        max_steps=run.max_steps,
        concurrency=rollouts.concurrency or policy.setup.concurrency,
        client=policy.client,
        algorithm=pipeline_algorithm(run),
        settings=ActorSettings(
            strategy=request_strategy(run, seed),
            num_updates=run.steps or 0,
            max_failed_share=rollouts.max_failed_share,
            max_waiting=pipeline_of(run.config).max_waiting or 1024,
            name=f"actor-{index}",
            follow=policy.follow,
        ),
        stop=stop,
        on_group=Progress(),
    )


async def _comes_before(stop: asyncio.Event, event: Coroutine[Any, Any, object]) -> bool:
    """True if the event came, False if `stop` was set first."""
    awaited, stopping = asyncio.create_task(event), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({awaited, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if awaited.done():
            awaited.result()  # raises its error
        return awaited.done()
    finally:
        await cancel_all([awaited, stopping])


# --- output ---


class Progress:
    """Prints a report line at most every `every_s` seconds."""

    def __init__(self, every_s: float = _SAY_EVERY_S) -> None:
        self._every_s = every_s
        self._say_at = 0.0

    def __call__(self, report: ActorReport) -> None:
        now = time.monotonic()
        if now >= self._say_at:
            self._say_at = now + self._every_s
            _say(_report_line(report))


def _report_line(report: ActorReport) -> str:
    left_out = {"failed": report.num_failed, "empty": report.num_empty, "abandoned": report.num_abandoned}
    said = [f"{count} {what}" for what, count in left_out.items() if count]
    return f"Pushed {report.num_groups} groups, {report.num_items} samples" + "".join(f", {each}" for each in said)


def _say(text: str) -> None:
    print(text, flush=True)
