"""A Tinker server with a tiny Llama in a thread of the test's process, for clients of the official SDK."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinker

from ludic.inference.local import LocalEngine
from ludic.tinker.server.app import serve
from ludic.tinker.server.memory import MemoryStore
from ludic.tinker.server.records import Keys, TenantLimits
from ludic.tinker.server.runs import TrainingBase
from ludic.tinker.server.sampling import Samplers
from ludic.tinker.server.service import Offer, Service
from tests.unit.training.bandit import ByteTokenizer, tiny_llama

KEY = "tml-test"
NAME = "tiny"


class RunningServer:
    """`url` is where it listens; `service` belongs to its thread."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model = tiny_llama()
        self.keys: dict[str, str] = settings.pop("keys", {})
        self.config: dict[str, Any] | None = settings.pop("config", None)
        self.limits: TenantLimits = settings.pop("limits", TenantLimits())
        self._folder = folder
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
        store = MemoryStore()
        self.service = Service(
            base,
            Samplers(engine, store),
            store,
            Offer(names=(NAME,), max_context=64),
            token_budget=256,
            limits=self.limits,
        )

        def ready(url: str) -> None:
            self.url = url
            self._is_ready.set()

        serving = asyncio.create_task(serve(self.service, Keys(self.keys), port=0, config=self.config, on_ready=ready))
        await asyncio.wait(
            [serving, stopping := asyncio.create_task(self.stopped.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        stopping.cancel()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        engine.close()

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

    @contextlib.contextmanager
    def client(self, key: str = KEY) -> Iterator[tinker.ServiceClient]:
        """A session of the SDK."""
        with tinker.ServiceClient(base_url=self.url, api_key=key) as client:
            yield client
