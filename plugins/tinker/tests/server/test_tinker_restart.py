"""`kill -9` of a real server in the middle of loops of the unchanged SDK, which go on by their own retries.

Each test compares with a loop of the same seed that was not disturbed: same losses, same weights, same number of steps.
"""

import logging
import multiprocessing
import os
import resource
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from safetensors.torch import load_file
from tinker import types
from torch import Tensor

from ludic.cli.main import main
from plugins.tinker.tests.server.running import KEY, NAME, datum, prompt
from tests.extended import cases

pytestmark = pytest.mark.slow

STEPS = 5
ADAM = types.AdamParams(learning_rate=1e-3, eps=1e-8)
"""With a small eps the direction of a tiny gradient is its rounding."""
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["ludic_serve.command", "ludic_tinker.server.app", "peft"])


def serve(arguments: list[str], log: Path) -> None:
    """The command, in a process that has loaded its modules already."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["ludic", *arguments]
    main()


class Server:
    """`ludic serve --tinker` on one port and one folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.log = folder / "data", folder / "server.log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Any = None
        self.start()

    def start(self) -> None:
        arguments = ["serve", "--tinker", "--model", NAME, "--port", str(self.port), "--data", str(self.folder)]
        self.process = _FORK.Process(target=serve, args=([*arguments, "--snapshot-every", "2"], self.log))
        self.process.start()

    def wait(self) -> None:
        """Until it listens."""
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=60):
                    return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.is_alive(), self.log.read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def restart(self) -> None:
        self.kill()
        self.start()

    def state(self, path: str) -> dict[str, Tensor]:
        """The tensors of a checkpoint, from its files."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        folder = self.folder / "runs" / run / kind / name
        return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        running = Server(tmp_path_factory.mktemp("restart"))
        running.wait()
        yield running
        running.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[tinker.ServiceClient]:
    """One session for all tests: it survives the restarts."""
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield client
    client.close("success").result()


class Loop:
    """Steps of supervised training; `disturb` is called between the calls of the SDK with the name of the place."""

    def __init__(self, client: tinker.ServiceClient, disturb: Callable[[str], None] = lambda place: None) -> None:
        self.training = client.create_lora_training_client(base_model=NAME, rank=4, seed=7).result()
        disturb("created")
        self.losses = []
        for step in range(STEPS):
            first = self.training.forward_backward(
                [datum(start=5 + step, weights=1.0), datum(length=3, weights=1.0)], "cross_entropy"
            )
            second = self.training.forward_backward([datum(start=12 + step, length=2, weights=1.0)], "cross_entropy")
            update = self.training.optim_step(ADAM)
            disturb(f"submitted {step}")
            self.losses += [first.result().metrics["loss:sum"], second.result().metrics["loss:sum"]]
            disturb(f"passed {step}")
            update.result()
            disturb(f"stepped {step}")
        saving = self.training.save_state("end")
        disturb("saving")
        self.path = saving.result().path


@pytest.fixture(scope="module")
def undisturbed(client: tinker.ServiceClient) -> Loop:
    return Loop(client)


def assert_same(server: Server, loop: Loop, undisturbed: Loop) -> None:
    np.testing.assert_allclose(loop.losses, undisturbed.losses, rtol=1e-6)
    found, expected = server.state(loop.path), server.state(undisturbed.path)
    assert found.keys() == expected.keys()
    assert int(found["num_steps"]) == STEPS
    for name, value in expected.items():
        # The weights are of size 1 at most, the optimizer's moments may be larger.
        size = max(1.0, float(value.abs().max()))
        np.testing.assert_allclose(found[name], value, atol=1e-6 * size, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    "places",
    cases(
        [{"created", "submitted 2", "stepped 3"}, {"submitted 0", "passed 1", "stepped 1", "saving"}],
        default=[{"submitted 0", "passed 1", "stepped 1", "saving"}],
    ),
    ids=lambda places: "+".join(sorted(places)),
)
def test_a_loop_goes_on_after_kill_9(server: Server, client: tinker.ServiceClient, undisturbed: Loop, places: set[str]):
    left = set(places)

    def disturb(place: str) -> None:
        if place in left:
            left.remove(place)
            server.restart()

    loop = Loop(client, disturb)
    assert not left
    assert_same(server, loop, undisturbed)


@pytest.mark.extended(covered_by="test_a_loop_goes_on_after_kill_9")
def test_a_server_that_is_killed_while_it_recovers_recovers_again(
    server: Server, client: tinker.ServiceClient, undisturbed: Loop
):
    def disturb(place: str) -> None:
        if place == "submitted 3":
            for _ in range(3):
                server.restart()
                server.wait()  # and runs are computed again from now on

    assert_same(server, Loop(client, disturb), undisturbed)


def test_samplers_survive_and_lost_samples_are_drawn_again(
    server: Server, client: tinker.ServiceClient, undisturbed: Loop
):
    """Of a training run directly, of named weights, and of the base model."""
    unnamed = undisturbed.training.save_weights_and_get_sampling_client().result()
    path = undisturbed.training.save_weights_for_sampler("named").result().path
    samplers = [
        unnamed,
        client.create_sampling_client(model_path=path).result(),
        client.create_sampling_client(base_model=NAME).result(),
    ]

    def sample() -> list[Any]:
        params = types.SamplingParams(max_tokens=24, seed=3, temperature=1.0)
        return [sampler.sample(prompt(5, 6, 7), 1, params) for sampler in samplers]

    def drawn(futures: list[Any]) -> list[types.SampledSequence]:
        return [future.result().sequences[0] for future in futures]

    before = drawn(sample())
    assert not np.allclose(before[0].logprobs, before[2].logprobs, atol=1e-4)
    lost = sample()
    server.restart()
    for after in (drawn(lost), drawn(sample())):
        assert [sequence.tokens for sequence in after] == [sequence.tokens for sequence in before]
        for one, other in [*zip(before, after, strict=True), (before[0], before[1])]:
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_a_full_disk_delays_a_loop_and_the_server_lives(
    server: Server, client: tinker.ServiceClient, undisturbed: Loop, caplog: pytest.LogCaptureFixture
):
    """RLIMIT_FSIZE makes writes fail as a full disk does."""
    server.wait()
    pid = server.process.pid
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)

    def disturb(place: str) -> None:
        if place == "stepped 1":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, unlimited[1]))
        if place == "submitted 2":
            while "The server could not write the request down" not in caplog.text:
                time.sleep(0.05)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)

    with caplog.at_level(logging.DEBUG, logger="tinker._base_client"):  # says why it repeats a request
        assert_same(server, Loop(client, disturb), undisturbed)
    assert server.process.is_alive()
