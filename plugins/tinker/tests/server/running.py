"""A Tinker server with a tiny Llama in a thread of the test's process, for clients of the official SDK."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tinker
from tinker import types

from ludic.inference.local import LocalEngine
from ludic_tinker.server import app
from ludic_tinker.server.app import serve
from ludic_tinker.server.records import Keys, TenantLimits
from ludic_tinker.server.runs import TrainingBase
from ludic_tinker.server.sampling import Offer
from ludic_tinker.server.service import Service
from ludic_tinker.server.storage.store import DiskStore
from tests.unit.training.bandit import ByteTokenizer, tiny_llama

KEY = "tml-test"
NAME = "tiny"


class RunningServer:
    """`url` is where it listens; `service` belongs to its thread."""

    def __init__(self, **settings: Any) -> None:
        self.model: Any = settings.pop("model", None) or tiny_llama()
        self.offer: Offer = settings.pop("offer", Offer(names=(NAME,), max_context=64))
        self.keys: dict[str, str] = settings.pop("keys", {})
        self.limits: TenantLimits = settings.pop("limits", TenantLimits())
        self.folder = tempfile.TemporaryDirectory(prefix="tinker-server-")
        """Its data; what is there at the start is recovered."""
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
            self._is_ready.set()

    async def _serve(self) -> None:
        self.loop, self.stopped = asyncio.get_running_loop(), asyncio.Event()
        base = TrainingBase(self.model, token_budget=256)
        engine = LocalEngine(self.model, ByteTokenizer(), adapters=True, max_sequences=8, kv_tokens=1024)
        store = DiskStore(self.folder.name, base_model=NAME)
        self.service = Service(
            base,
            engine,
            store,
            self.offer,
            token_budget=256,
            limits=self.limits,
        )

        self.service.recover()

        def ready(url: str) -> None:
            self.url = url
            self._is_ready.set()

        serving = asyncio.create_task(serve(self.service, Keys(self.keys), port=0, on_ready=ready))
        await asyncio.wait(
            [serving, stopping := asyncio.create_task(self.stopped.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        stopping.cancel()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        engine.close()
        store.close()
        self.folder.cleanup()

    def __enter__(self) -> "RunningServer":
        self._thread.start()
        assert self._is_ready.wait(60), "the server did not start"
        if self.error is not None:
            raise self.error
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.stopped.set)
        self._thread.join(60)
        if self.error is not None:
            raise self.error

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds, asking between the turns of the server's event loop."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(60)

    def call(self, function: Callable[[], Any]) -> None:
        """In the server's thread."""

        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    @contextlib.contextmanager
    def client(self, key: str = KEY, **features: Any) -> Iterator[tinker.ServiceClient]:
        """A session of the SDK, which is told of these features."""
        with tinker.ServiceClient(base_url=self.url, api_key=key) as client:
            with mock.patch.dict(app._CONFIG, features):
                _ = client.holder  # connects
            yield client


def datum(*, start: int = 1, length: int = 6, **inputs: float) -> types.Datum:
    """A row of training data; each input has the same value for all its tokens."""
    tokens = list(range(start, start + length))
    tensors = {
        name: types.TensorData(data=[value] * length, dtype="float32", shape=[length]) for name, value in inputs.items()
    }
    targets = types.TensorData(data=[token + 1 for token in tokens], dtype="int64", shape=[length])
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))
