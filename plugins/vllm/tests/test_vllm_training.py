"""Training through a real vLLM server: `ludic train --engine vllm`, weights pushed after every update."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, RolloutEngine
from ludic.inference import HFChatTemplate, VLLMChatClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.types import (
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    SAWBatch,
    load_rollouts,
)
from plugins.vllm.tests.test_vllm_weights import assert_serves
from plugins.vllm.tests.vllm_fixtures import RunningServer, skip_without_vllm, warm_vllm_environment
from tests import forked
from tests.extended import cases
from tests.fakes import CountingEnv, RecordingClient, make_agent
from tests.unit.cli.train_parts import ENV

pytest.importorskip("torch", reason="the train extra is not installed")
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def player(tmp_path_factory) -> Path:
    """A small Llama that knows the words of the game, with heads of a size that vLLM computes on a CPU."""
    from ludic.envs.tic_tac_toe.board import COMPACT_WORDS
    from ludic.models.loading import tiny_llama, word_tokenizer

    folder = tmp_path_factory.mktemp("models") / "player"
    tokenizer = word_tokenizer(COMPACT_WORDS)
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=64, layers=2, heads=2).save_pretrained(folder)
    return folder


def train_command(player: Path, runs: Path, *, steps: int) -> list[str]:
    return [
        "-m", "ludic.cli.main", "train", "tic_tac_toe", "--set", "view=compact", "--model", str(player),
        "--engine", "vllm", "--steps", str(steps), "--rollouts-per-update", "32", "--group-size", "8", "--lr", "1e-2",
        "--max-tokens", "3", "--max-seq-len", "128", "--logger", "print", "--runs", str(runs), "--name", "run",
        "--dtype", "float32",
    ]  # fmt: skip


def train(command: list[str]) -> None:
    run = forked.python(*command, environment=warm_vllm_environment())
    said = run.communicate(timeout=400)
    assert run.returncode == 0, said


@pytest.fixture(scope="module")
def trained_adapter(player, tmp_path_factory) -> Path:
    """A folder with a run that has come to its end."""
    skip_without_vllm()
    folder = tmp_path_factory.mktemp("adapter")
    command = [*train_command(player, folder, steps=3), "--lora-rank", "4", "--push", "adapter", "--server-sleep"]
    train(command)
    return folder


@pytest.fixture(scope="module")
def lost_its_server(player, tmp_path_factory) -> tuple[Path, int | None, str]:
    """(folder, exit code, what it said) of a run with all weights whose server is killed, hangs, and is killed once too often."""
    skip_without_vllm()
    folder = tmp_path_factory.mktemp("lost")
    command = train_command(player, folder, steps=10_000)
    run = forked.python(
        *command, "--max-restarts", "2", "--server-hung-after", "6",
        output=folder / "output", environment=warm_vllm_environment(),
    )  # fmt: skip
    metrics = folder / "run" / "metrics.jsonl"

    def until_updates(more: int) -> None:
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") >= done + more):
            assert run.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.2)

    try:
        until_updates(3)
        os.killpg(server_of(run.pid), signal.SIGKILL)
        until_updates(3)
        (log,) = (folder / "run" / "server").glob("server-*.log")
        os.kill(listener_of(int(log.stem.removeprefix("server-"))), signal.SIGSTOP)
        until_updates(3)
        os.killpg(server_of(run.pid), signal.SIGKILL)
        said, _ = run.communicate(timeout=100)
    finally:
        run.kill()
    return folder, run.returncode, said


@pytest.mark.parametrize(
    "pushed",
    cases(["all weights", "adapter"], default=["adapter"]),
)
def test_grpo_on_tic_tac_toe_learns_from_the_weights_it_pushed(pushed, request):
    if pushed == "adapter":
        folder = request.getfixturevalue("trained_adapter")
    else:
        folder, *_ = request.getfixturevalue("lost_its_server")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1)) and (steps == [1, 2, 3] if pushed == "adapter" else len(steps) >= 3)
    assert all(row["train/lag_max"] == 0 for row in rows)
    assert any(row["train/grad_norm"] > 0 for row in rows)
    # The ratio between trainer and sampler is 1: what the server sampled with is what the trainer holds, after each push.
    assert all(abs(row["train/kl_actor_policy"]) < 1e-3 and row["train/ess"] > 0.999 for row in rows)
    (file,) = (folder / "run" / "rollouts").glob("*.jsonl.gz")
    versions = [run.version for r in load_rollouts(file) for step in r.agent_steps for run in step.trace.version_runs]
    assert set(range(len(steps))) <= set(versions) <= set(range(len(steps) + 1)), (
        "one for each update, and one under way"
    )
    if pushed == "adapter":
        (log,) = (folder / "run" / "server").glob("server-*.log")
        assert log.read_text().count("sleep mode is not supported on CPU") == 6, "asleep and woken, once per update"


@pytest.mark.extended(
    covered_by="test_a_server_killed_in_the_middle_of_a_batch_costs_episodes_and_gets_the_weights_again"
)
def test_a_run_restarts_its_own_server_and_ends_when_that_dies_too_often(lost_its_server):
    folder, code, said = lost_its_server
    assert code == 2, said
    assert "the vLLM server was ended by SIGKILL; restart 1 of at most 2" in said, said
    assert "the vLLM server hangs: it accepts connections, but /health was not answered in time; restart 2" in said, (
        said
    )
    ending = "was ended by SIGKILL, and has died 3 times within 600 s, more than max_restarts = 2 allows"
    assert f"The vLLM server of this run {ending}" in " ".join(said.split()) and "Traceback" not in said, said
    assert f"To go on: ludic train {folder / 'run'} --resume" in said


def server_of(pid: int) -> int:
    """The server of a run, which leads its own session; between them is the guard that ends it with the run."""
    return child_of(child_of(pid))


def child_of(pid: int) -> int:
    """The one process that it has started, in whichever thread."""
    (child,) = [int(number) for of in Path(f"/proc/{pid}/task").glob("*/children") for number in of.read_text().split()]
    return child


def listener_of(port: int) -> int:
    """The process that listens on a port of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (socket,) = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(file) == socket:
                return int(file.parts[2])
    raise AssertionError(f"nothing listens on {port}")


class KilledInTheMiddle:
    """The source's second batch finds its server killed half way; it is started again for the third."""

    def __init__(
        self, inner: RolloutBatchSource, client: RecordingClient, server: RunningServer, publisher: Any
    ) -> None:
        self._inner, self._client, self._server, self._publisher = inner, client, server, publisher
        self.batches: list[SAWBatch] = []
        self.is_current: list[bool] = []
        """What the publisher knows of its weights: before the kill, and after it."""

    async def next_batch(self) -> SAWBatch:
        if len(self.batches) == 1:
            async with asyncio.timeout(100):
                killing = self._kill_after(len(self._client.calls) + 20)
                batch, _ = await asyncio.gather(self._inner.next_batch(), killing)
            self._server.process.start()
        else:
            batch = await self._inner.next_batch()
        self.batches.append(batch)
        return batch

    async def _kill_after(self, num_calls: int) -> None:
        while len(self._client.calls) < num_calls:
            await asyncio.sleep(0.002)
        self.is_current.append(await asyncio.to_thread(self._publisher.is_current, 1))
        await asyncio.to_thread(self._server.process.kill)
        self.is_current.append(await asyncio.to_thread(self._publisher.is_current, 1))


def shorter_is_better(text: str) -> ParseResult:
    return ParseResult("go", 1.0 / (1 + len(text)), None)


def test_a_server_killed_in_the_middle_of_a_batch_costs_episodes_and_gets_the_weights_again(vllm_server):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ludic.distributed import create_vllm_publisher
    from ludic.models.lora import dense_parameters
    from ludic.training import Trainer, TrainerConfig, make_grpo

    model: Any = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir, dtype=torch.float32)
    first_weights = {name: weight.clone() for name, weight in dense_parameters(model)}
    template = HFChatTemplate(AutoTokenizer.from_pretrained(vllm_server.model_dir))
    impatient = VLLMChatClient(
        vllm_server.host, vllm_server.port, control_token=vllm_server.control_token, max_retries=0
    )
    client = RecordingClient(impatient)
    publisher = create_vllm_publisher(impatient)

    def protocol(**kwargs: Any) -> SingleAgentProtocol:
        agent = make_agent(
            client, model="tiny", chat_template=template, parser=shorter_is_better, reject_incomplete_completions=False
        )
        return SingleAgentProtocol(agent, **kwargs)

    inference = InferenceSpec(
        sampling=SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True), return_=ReturnSpec.for_rl()
    )
    request = RolloutRequest(
        env=EnvSpec("counting", {"target": 99}), protocol=ProtocolSpec("single"), inference=inference
    )
    engine = RolloutEngine(
        env_registry={"counting": CountingEnv},
        protocol_registry={"single": protocol},
        max_retries=0,
        max_failed_share=1.0,
    )
    source = KilledInTheMiddle(
        RolloutBatchSource(
            engine,
            requests_fn=lambda: [request] * 8,
            strategy=GRPORequestStrategy(2),
            algorithm=make_grpo(group_size=2),
            max_steps=2,
            concurrency=4,
        ),
        client,
        vllm_server,
        publisher,
    )
    trainer = Trainer(
        model=model,
        algo=make_grpo(group_size=2),
        batch_source=source,
        publisher=publisher,
        cfg=TrainerConfig(lr=1e-3, max_seq_len=512),
    )
    try:
        history = [trainer.train_step_sync() for _ in range(3)]
        # 16 episodes of 2 calls, 4 at a time, killed after 20 calls: some groups were whole, some were not.
        failed = [batch.meta["num_failed"] for batch in source.batches]
        assert failed[0] == failed[2] == 0 and 0 < failed[1] < 16
        versions = [{item.oldest_version for item in batch.items} for batch in source.batches]
        assert versions == [{0}, {1}, {2}], "the server that came back was given the second update's weights"
        assert all(stats["train/logp_difference_abs"] < 1e-3 for stats in history), "the weights that it says it has"
        assert source.is_current == [True, False] and publisher.is_current(3)
        assert_serves(vllm_server, model, version=3)
    finally:
        vllm_server.wait()
        publisher.publish(first_weights, version=0)


def test_a_server_is_the_teacher_of_a_run(vllm_server, tmp_path):
    """It serves what the student begins as, so before the first update the two agree; the tokenizer is found by its folder."""
    command = [
        "-m", "ludic.cli.main", "train", "tic_tac_toe", "--model", str(vllm_server.model_dir), "--algo", "opd",
        "--teacher", vllm_server.url, "--steps", "2", "--rollouts-per-update", "4", "--max-tokens", "8", "--max-steps", "1",
        "--max-seq-len", "1900", "--lr", "1e-2", "--logger", "none", "--runs", str(tmp_path), "--name", "run", "--dtype",
        "float32",
    ]  # fmt: skip
    train(command)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kls = [row["train/teacher_kl"] for row in rows if "train/teacher_kl" in row]
    assert len(kls) == 2 and abs(kls[0]) < 1e-3 and rows[0]["perf/teacher_s"] > 0


# --- a pipeline ---


@pytest.mark.extended(
    covered_by="test_a_server_killed_in_the_middle_of_a_batch_costs_episodes_and_gets_the_weights_again"
)
def test_the_vllm_server_of_a_launched_pipeline_is_killed_and_gets_its_weights_again(tmp_path, vllm_model_dir):
    skip_without_vllm()
    pytest.importorskip("redis", reason="the pipeline extra is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    from plugins.pipeline.tests.pipeline_harness import counted_by_hand
    from plugins.pipeline.tests.test_launch_process import SIZES, kill, launch, steps, until

    (tmp_path / "letter.py").write_text(ENV)
    on_vllm = ["--model", str(vllm_model_dir), "--actor-engine", "vllm", "--actors", "1", "--steps", "10"]
    launched = launch(tmp_path, "letter.py:Letter", *SIZES, *on_vllm, **warm_vllm_environment())
    try:
        until(lambda: len(steps(tmp_path)) >= 3, launched, "no three updates")
        kill(tmp_path, "server")
        said, _ = launched.communicate(timeout=300)
    finally:
        if launched.poll() is None:
            launched.terminate()
    assert launched.returncode == 0 and "server was ended by SIGKILL; restart 1 of at most 5" in said, said
    assert steps(tmp_path) == list(range(1, 11))
    counts, in_queue = counted_by_hand(tmp_path / "runs" / "run")
    assert counts["trained"] == 10 * 16
    assert counts["produced"] == counts["trained"] + counts["stale"] + counts["filtered"] + counts["dead"] + in_queue
