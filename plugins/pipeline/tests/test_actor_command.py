"""`ludic actor` and its learner, `ludic train --engine pipeline`: real parts in one process, with a real Redis between them."""

import asyncio
import contextlib
import gzip
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ludic.run.config.run_config import RunConfig
from ludic.run.given import env_factory
from ludic.run.resolve import NEGATIVE_MASK, ResolvedRun, resolve
from ludic.run.settings import with_values
from ludic.training.loggers import read_metrics
from ludic.training.losses import CorrectedLoss, NegativeSequenceMask
from ludic.types import ConfigError
from ludic.util import stop as stopping
from ludic_pipeline import generation as run_pipeline
from ludic_pipeline.feature import queue_key_of
from ludic_pipeline.generation import pipeline_algorithm
from ludic_pipeline.launch import actor as run_actor
from ludic_pipeline.queue.actor import ActorReport
from ludic_pipeline.queue.connection import RedisAddress, RedisGone
from ludic_pipeline.queue.lease import LeaseLost
from ludic_pipeline.queue.queue import ActorId, ExperienceQueue
from ludic_pipeline.queue.source import PipelineBatchSource
from tests.redis_fixtures import RedisServer, end_redis, start_redis
from tests.unit.cli.train_parts import AGENT, SMALL, command_in

pytestmark = pytest.mark.slow


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LUDIC_REDIS_URL", raising=False)
    return command_in(tmp_path, monkeypatch, capsys)


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tic_tac_toe"], "needs a Redis that learner and actors share: give --redis"),
        (["tic_tac_toe", "--actor-index", "-1"], "actors are counted from 0"),
        (["tic_tac_toe", "--redis", "redis://h", "--algo", "scalerl"], "group by group"),
        (["tic_tac_toe", "--redis", "redis://h", "--actor-engine", "vllm"], "actor_engine = 'vllm' needs servers"),
        (["nowhere"], "No env named 'nowhere'"),
    ],
)
def test_a_mistake_is_a_helpful_message(arguments, message, ludic, tmp_path):
    ended = ludic("actor", *arguments, "--model", "tiny")
    assert ended.code == 2 and message in " ".join(ended.err.replace("│", " ").split()), ended.err
    assert not (tmp_path / "runs").exists()


# --- seeds ---


# --- parts ---


def test_pipeline_loss_is_corrected_unless_corrections_is_false():
    def loss_of(**values: object) -> object:
        config = with_values(RunConfig(), {"id": "tic_tac_toe", "engine": "pipeline", **values})
        return pipeline_algorithm(resolve(config, env_factory("tic_tac_toe"))).loss

    assert isinstance(loss_of(), CorrectedLoss) and isinstance(loss_of(algo="cispo"), CorrectedLoss)
    assert not isinstance(loss_of(corrections=False), CorrectedLoss)
    assert not isinstance(loss_of(algo="cispo", corrections=False), CorrectedLoss), "nor the mask of its preset"
    assert not isinstance(loss_of(algo="rft"), CorrectedLoss), "imitation has no ratio to correct"


def test_a_preset_keeps_its_default_mask_inside_those_of_the_pipeline():
    config = with_values(RunConfig(), {"id": "tic_tac_toe", "engine": "pipeline", "algo": "cispo"})
    run = resolve(config, env_factory("tic_tac_toe"))
    assert run.config.algo.correction == (NEGATIVE_MASK,)
    outer = pipeline_algorithm(run).loss
    assert isinstance(outer, CorrectedLoss) and isinstance(outer.loss, CorrectedLoss)
    assert [type(each) for each in outer.loss.corrections] == [NegativeSequenceMask]


@pytest.mark.parametrize(("same_request_s", "arrives"), [(5.0, True), (0.0, False)])
async def test_second_stop_request_cancels_a_running_push(same_request_s, arrives, monkeypatch):
    report = ActorReport(actor="actor-0")

    async def play(config, policy, index, stop):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        await stop.wait()
        await asyncio.sleep(0.05)
        return report

    monkeypatch.setattr(run_actor, "_run_episodes", play)
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", same_request_s)
    try:
        found = await run_actor._until_stopped(None, None, 0)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert found[0] is (report if arrives else None) and found[1] in (130, 143)


# --- together ---


@contextlib.contextmanager
def actors_beside(run: ResolvedRun, *indices: int):
    """Actors in threads, each with its own model and engine; they end with the block."""
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    reports: list[ActorReport | None] = []

    def work(index: int) -> None:
        async def play() -> None:
            stop = asyncio.Event()
            started.append((asyncio.get_running_loop(), stop))
            reports.append(await run_actor._run_episodes(run, policy, index, stop))

        with contextlib.ExitStack() as stack:
            policy = run_actor._with_an_engine(run, stack)
            asyncio.run(play())

    threads = [threading.Thread(target=work, args=(index,)) for index in indices]
    for thread in threads:
        thread.start()
    try:
        yield reports
    finally:
        for loop, stop in started:
            with contextlib.suppress(RuntimeError):  # an actor ends by itself when the run is finished
                loop.call_soon_threadsafe(stop.set)
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive(), "an actor did not stop"


def pipeline_config(
    redis: RedisServer, name: str, arguments: list[str]
) -> tuple[ResolvedRun, Callable[..., list[str]]]:
    flags = [*arguments, "--engine", "pipeline", "--redis", redis.url, "--name", name]
    from ludic.cli.args import parse_run
    from ludic.cli.train import TrainArgs

    _, config = parse_run(TrainArgs, flags, prog="ludic train", description="")
    return resolve(config, env_factory(config.env.id)), lambda *more: ["train", *flags, *more]


def episodes(folder: Path) -> list[dict]:
    files = sorted((folder / "rollouts").glob("actor-*.jsonl.gz"))
    return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def test_actors_feed_a_learner_that_evaluates_and_accounts_for_every_sample(ludic, shared_redis):
    arguments = [
        "letter.py:Letter",
        *SMALL,
        "--logger",
        "print",
        "--steps",
        "6",
        "--lr",
        "1e-2",
        "--checkpoint-every",
        "2",
    ]
    config, command = pipeline_config(shared_redis, "both", arguments)
    with actors_beside(config, 0, 1) as reports:
        ended = ludic(*command("--eval-every", "3", "--eval-at-start", "--eval-episodes", "8"))
    assert ended.code == 0, ended.err
    assert "Done after update 6 of 6" in ended.out and "Samples: produced " in ended.out
    assert "= 48 acknowledged + " in ended.out.rpartition("Samples: ")[2] and "UNACCOUNTED" not in ended.out
    rows = list(read_metrics(config.folder / "metrics.jsonl"))
    assert [row["step"] for row in rows if "eval/mean_reward" in row] == [0, 3, 6]
    assert all(report is not None and report.num_items for report in reports)
    assert (config.folder / "weights" / "weights_6.safetensors").is_file()
    played = episodes(config.folder)
    seeds = [(row["meta"]["env_seed"], row["meta"]["sampling_seed"]) for row in played]
    assert len(seeds) >= 48 and len(set(seeds)) == len(seeds), "two actors played the same episode"


def test_actors_score_episodes_and_groups_and_the_learner_logs_each_component(ludic, shared_redis, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rank(rollouts):\n    return [float(number) for number, _ in enumerate(rollouts)]\n"
    )
    arguments = ["letter.py:Letter", *SMALL, "--steps", "2", "--algo", "gdpo", "--reward", "mine.py:rank"]
    arguments += ["--reward", "length", "--reward-weight", "rank=0.5"]
    config, command = pipeline_config(shared_redis, "scored", arguments)
    with actors_beside(config, 0):
        ended = ludic(*command())
    assert ended.code == 0, ended.err
    size = config.group_size
    for row in read_metrics(config.folder / "metrics.jsonl"):
        assert (
            row["train/score/rank"] == (size - 1) / 2 == 2 * row["train/reward/rank"] and row["train/reward/length"] < 0
        )
    assert {row["steps"][-1]["info"]["scores"]["rank"] for row in episodes(config.folder)} == set(
        map(float, range(size))
    )


def test_an_actor_plays_with_an_agent_behind_the_gateway(ludic, shared_redis, tmp_path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    arguments = ["letter.py:Letter", *SMALL, "--steps", "2", "--agent", "my_agent.py:solve"]
    config, command = pipeline_config(shared_redis, "outside", arguments)
    with actors_beside(config, 0):
        ended = ludic(*command("--eval-every", "2", "--eval-episodes", "4"))
    assert ended.code == 0, ended.err
    played = episodes(config.folder)
    assert len(played) >= 16 and all(row["meta"]["gateway"]["calls"] == 1 for row in played)


def test_a_new_run_of_the_same_name_begins_with_an_empty_queue(ludic, shared_redis, tmp_path):
    arguments = ["letter.py:Letter", *SMALL, "--steps", "1"]
    config, command = pipeline_config(shared_redis, "again", arguments)
    with actors_beside(config, 0):
        assert ludic(*command()).code == 0
    (tmp_path / "runs" / "again").rename(tmp_path / "runs" / "old")
    with actors_beside(config, 0):
        ended = ludic(*command())
    assert ended.code == 0 and "= 8 acknowledged + " in ended.out.rpartition("Samples: ")[2], ended.out


def test_a_learner_removes_the_mark_of_a_finished_run_before_it_loads_the_model(ludic, shared_redis, monkeypatch):
    config, command = pipeline_config(shared_redis, "old", ["letter.py:Letter", *SMALL, "--steps", "1"])

    async def marked(*, mark: bool = False) -> int | None:
        async with ExperienceQueue(shared_redis.url, queue_key_of(config)) as queue:
            if mark:
                assert await queue.finish(1)
            return (await queue.beat_actor(ActorId("actor"), 0)).finished_after

    def load(*_: object) -> None:
        raise ConfigError(f"finished when it loads: {asyncio.run(marked())}")

    monkeypatch.setattr("ludic.run.session.load_weights", load)
    assert asyncio.run(marked(mark=True)) == 1
    assert "finished when it loads: None" in ludic(*command()).err


def test_a_redis_that_refuses_the_mark_does_not_fail_a_finished_run(ludic, shared_redis, caplog):
    config, _ = pipeline_config(shared_redis, "refused", ["letter.py:Letter", *SMALL])
    with RedisAddress(shared_redis.url).sync_client() as client:
        client.set(ExperienceQueue(shared_redis.url, queue_key_of(config)).keys.all[6], "not a hash")  # leases
    asyncio.run(run_pipeline.mark_finished(config, 3))
    assert "the actors are not told" in caplog.text and "holds a string" in caplog.text


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (LeaseLost("Another learner has the lease."), "To go on: ludic launch runs/lost --resume"),
        (RedisGone("Redis is away."), "To go on: ludic launch runs/lost --resume"),
        (
            FloatingPointError("The gradient is not finite."),
            "If another try ends the same way:",
        ),  # a batch is set aside
    ],
)
def test_learner_exits_with_try_again_after_an_error_that_a_restart_may_mend(
    error, advice, ludic, shared_redis, monkeypatch
):
    async def lose(self: object) -> None:
        raise error

    monkeypatch.setattr(PipelineBatchSource, "next_batch", lose)
    _, command = pipeline_config(shared_redis, "lost", ["letter.py:Letter", *SMALL, "--steps", "1"])
    ended = ludic(*command())
    assert ended.code == 75 and f"{error} {advice}" in ended.out


def test_a_password_reaches_no_file_and_no_output(ludic, monkeypatch, tmp_path, caplog):
    """It is in the variable, where a resumed run finds it again."""
    server = start_redis("--requirepass", "hunter2", "--appendonly", "no")
    url = f"unix://:hunter2@{server.socket}"
    said = []
    try:
        said.append(
            ludic("train", "letter.py:Letter", *SMALL, "--engine", "pipeline", "--redis", url, "--name", "secret")
        )
        assert said[-1].code == 2 and "LUDIC_REDIS_URL" in said[-1].err and not (tmp_path / "runs").exists()
        monkeypatch.setenv("LUDIC_REDIS_URL", url)
        run = ["letter.py:Letter", *SMALL, "--engine", "pipeline", "--name", "secret", "--steps", "1"]
        config, _ = pipeline_config(server, "secret", ["letter.py:Letter", *SMALL, "--steps", "2"])  # its actor's
        own = resolve(with_values(config.config, {"redis": None}), config.env)
        with actors_beside(own, 0):
            said.append(ludic("train", *run))
            assert said[-1].code == 0, said[-1].err
            said.append(ludic("train", "runs/secret", "--resume", "--steps", "2"))
            assert said[-1].code == 0, said[-1].err
        monkeypatch.delenv("LUDIC_REDIS_URL")
        said.append(ludic("train", "runs/secret", "--resume", "--steps", "3"))
        assert said[-1].code == 2 and "LUDIC_REDIS_URL" in said[-1].err
    finally:
        end_redis(server)
    assert not any("hunter2" in one.out + one.err for one in said) and "hunter2" not in caplog.text
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 5 and not any(b"hunter2" in file.read_bytes() for file in files)
