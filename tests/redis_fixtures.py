"""A real redis-server for a test, on its own socket, that can be killed and started again."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_START_S = 30.0


class RedisServer:
    """Append-only and with fsync at every write, so that what it acknowledged outlives a kill -9. With "everysec" it may not:
    Redis puts off its writes while an earlier fsync is under way."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.socket = folder, folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "RedisServer":
        command = [
            "redis-server", "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", *self._options,
        ]  # fmt: skip
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server did not begin to answer"
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """As kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        done = subprocess.run(["redis-cli", "-s", str(self.socket), "ping"], capture_output=True, text=True)
        return "PONG" in done.stdout or "NOAUTH" in done.stdout


def start_redis(*options: str) -> RedisServer:
    """In a short folder: a socket's path has about a hundred characters, and pytest's folders are deep."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    return RedisServer(Path(tempfile.mkdtemp(prefix="ludic-redis-")), *options).start()


def end_redis(server: RedisServer) -> None:
    server.kill()
    shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = start_redis()
    yield server
    end_redis(server)


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[RedisServer]:
    """For tests that neither kill it nor look at all of its keys: use a queue key of your own. It keeps nothing on disk."""
    server = start_redis("--appendonly", "no")
    yield server
    end_redis(server)
