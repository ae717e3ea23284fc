"""Directing vLLM servers through a weight update, over HTTP: all of them step by step, none ahead of the others.

The order: names and shapes are checked, everybody pauses at a token boundary, the loader starts, buckets come in, the
loader finishes with the new version, prefix caches are emptied, checksums are compared, everybody goes on. A step that
fails on one server stops all of them there; a server whose weights are half loaded must not generate.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeAlias

from ludic.distributed.publish.interfaces import WeightPushError
from ludic.inference.vllm.buckets import Bucket, WeightMetadata
from ludic.types import ConfigError, PolicyGone

PauseMode: TypeAlias = Literal["keep", "wait", "abort"]
"""Requests in flight: frozen and continued with the new weights, finished first, or ended where they are."""
FRESH = "default"
"""vLLM's label of a server that nobody has pushed to since it started."""
RETRY_S = 0.5


class ControlClient(Protocol):
    """What is needed of a client: its servers, and calls with the control token. `VLLMChatClient` is one.

    ConfigError for a call that is refused (token, endpoint), OSError when the server is not there, TimeoutError,
    RuntimeError with the server's own words for a call that fails.
    """

    @property
    def servers(self) -> Sequence[str]: ...

    async def control_post(
        self,
        server: str,
        path: str,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = ...,
    ) -> dict[str, Any]: ...

    async def control_get(
        self, server: str, path: str, params: Mapping[str, str] | None = None, timeout_s: float = ...
    ) -> dict[str, Any]: ...


class VllmControlPlane:
    """One update on all servers of a client."""

    def __init__(
        self, client: ControlClient, *, pause: PauseMode = "keep", timeout_s: float = 600.0, wait_s: float = 120.0
    ) -> None:
        """`timeout_s`: for one call. `wait_s`: how long a server that is down may take to come back."""
        if pause not in ("keep", "wait", "abort"):
            raise ConfigError(
                f"pause={pause!r}, but requests in flight can be kept ('keep'), waited for ('wait') or 'abort'-ed."
            )
        self._client, self._pause, self._timeout_s, self._wait_s = client, pause, timeout_s, wait_s
        self._loading = False
        """A loader may have begun: from here on a server does not generate before it has everything."""
        self._paused: list[str] = []
        self._threads = ThreadPoolExecutor(thread_name_prefix="ludic-weight-control")
        """Each step runs in an event loop of its own: whoever publishes may be in one already."""

    # --- ControlPlane ---

    def policy_version(self) -> int:
        """The smallest of all servers'; a server that nobody has pushed to has version 0."""
        return min(0 if label == FRESH else int(label) for label in self._labels())

    def has_version(self, version: int) -> bool:
        return all(label == str(version) for label in self._labels())

    def require_fits(self, metadata: Sequence[WeightMetadata]) -> None:
        self._wait_for_servers()
        sent = {part.name: list(part.shape) for part in metadata}
        for server, expected in self._ask_workers("ludic_parameters").items():
            problem = misfit(sent, expected[0])
            if problem:
                raise ConfigError(f"These weights are not those of the model that {server} serves: {problem}")

    def announce_update_batch(self, metadata: Sequence[WeightMetadata], version: int) -> None:
        self._paused = self.servers
        self._post("/pause", params={"mode": self._pause})
        self._ask_workers("ludic_forget_update")
        self._loading = True
        self._post("/start_weight_update")

    def finalize_update(self, version: int, checksums: Mapping[str, int]) -> None:
        self._post("/finish_weight_update", {"weight_version": str(version)})
        self._empty_prefix_caches()
        if checksums:
            self._compare(checksums, self._ask_workers("ludic_received"))
        self._post("/resume")
        self._loading, self._paused = False, []

    def abandon_update(self) -> str:
        if self._loading:
            return (
                f"{', '.join(self.servers)} stay paused: half of the new weights would be worse than none. Publish again "
                "(a new push repairs them) or restart the server; a restarted one begins with the weights of its folder."
            )
        self._resume_untouched()
        return "The servers go on with the weights they had."

    # --- for communicators ---

    @property
    def servers(self) -> list[str]:
        return list(self._client.servers)

    def num_workers(self, server: str) -> int:
        return int(self._get("/get_world_size", servers=[server])[server]["world_size"])

    def require_readable(self, paths: Sequence[str], advice: str) -> None:
        """Before anybody stands still: every worker sees what it is going to load."""
        for server, answers in self._ask_workers("ludic_unreadable", [list(paths)]).items():
            unseen = sorted({path for answer in answers for path in answer})
            if unseen:
                raise ConfigError(f"{server} cannot read {unseen[0]}. {advice}")

    def connect(self, server: str, init_info: Mapping[str, Any]) -> "Future[Any]":
        """The workers of one server join a process group; the trainer has to join at the same time."""
        body = {"init_info": dict(init_info)}
        return self._begin(self._each({server: self._post_to(server, "/init_weight_transfer_engine", body)}))

    def load(self, bucket: Bucket, source: Mapping[str, Any]) -> "Future[Any]":
        """All servers take one bucket, from where `source` says."""
        body = {"update_info": {"bucket": bucket.to_json(), "source": dict(source)}}
        return self._begin(self._each({s: self._post_to(s, "/update_weights", body) for s in self.servers}))

    # --- steps ---

    def _wait_for_servers(self) -> None:
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                self._labels()
                return
            except WeightPushError as error:
                if time.monotonic() > deadline:
                    raise WeightPushError(
                        f"{error} It was waited for {self._wait_s:.0f} s. Start it again and publish, or take it out of the client."
                    ) from error
            time.sleep(RETRY_S)

    def _empty_prefix_caches(self) -> None:
        for server, answer in self._post("/reset_prefix_cache").items():
            if not answer.get("success", True):
                raise WeightPushError(f"{server} kept its prefix cache, whose entries come from the old weights.")

    def _compare(self, checksums: Mapping[str, int], received: Mapping[str, Sequence[Any]]) -> None:
        for server, workers in received.items():
            for worker in workers:
                wrong = [name for name, value in checksums.items() if worker["checksums"].get(name) != value]
                if wrong:
                    raise WeightPushError(f"{server} received other values than were sent, for example of {wrong[0]}.")
                if worker["differing"]:
                    raise WeightPushError(
                        f"{server} did not load what it received, for example {worker['differing'][0]}."
                    )

    def _resume_untouched(self) -> None:
        for server in self._paused:
            try:
                self._run({server: self._post_to(server, "/resume")})
            except WeightPushError:
                continue  # the one that is down; its error is the one that is raised
        self._paused = []

    # --- calls ---

    def _labels(self) -> list[str]:
        answers = self._get("/weight_info", timeout_s=min(10.0, self._timeout_s))
        return [str(answer["weight_version"]) for answer in answers.values()]

    def _ask_workers(
        self, method: str, args: Sequence[Any] = (), *, servers: Sequence[str] = ()
    ) -> dict[str, list[Any]]:
        answers = self._post("/collective_rpc", {"method": method, "args": list(args)}, servers=servers)
        return {server: answer["results"] for server, answer in answers.items()}

    def _post(
        self, path: str, body: Any = None, params: Mapping[str, str] | None = None, *, servers: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        asked = servers or self.servers
        return self._run({server: self._post_to(server, path, body, params) for server in asked})

    def _post_to(
        self, server: str, path: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        return self._client.control_post(server, path, body, params, self._timeout_s)

    def _get(self, path: str, *, servers: Sequence[str] = (), timeout_s: float = 60.0) -> dict[str, dict[str, Any]]:
        asked = servers or self.servers
        return self._run({server: self._client.control_get(server, path, None, timeout_s) for server in asked})

    def _run(self, calls: Mapping[str, Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        answers: dict[str, dict[str, Any]] = self._begin(self._each(calls)).result()
        return answers

    def _begin(self, call: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return self._threads.submit(asyncio.run, call)

    async def _each(self, calls: Mapping[str, Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """All at once; all are awaited before the first failure is raised, so none is left in the middle of a step."""
        answers = await asyncio.gather(*calls.values(), return_exceptions=True)
        for server, answer in zip(calls, answers, strict=True):
            if isinstance(answer, BaseException):
                raise as_push_error(server, answer)
        return dict(zip(calls, answers, strict=True))  # type: ignore[arg-type]


def as_push_error(server: str, error: BaseException) -> BaseException:
    """What a server or the way to it did wrong; what waiting cannot mend stays what it is."""
    if isinstance(error, ConfigError | PolicyGone) or not isinstance(error, OSError | TimeoutError | RuntimeError):
        return error
    made = WeightPushError(f"{server}: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def misfit(sent: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> str | None:
    """Why these weights cannot be loaded; None when they can."""
    unknown = sorted(sent.keys() - expected.keys())
    if unknown:
        return (
            f"it has no {unknown[0]} ({len(unknown)} unknown names). Publish dict(model.named_parameters()) of the model it was "
            "started with, adapters merged (ludic.models.lora.dense_parameters)."
        )
    missing = sorted(expected.keys() - sent.keys())
    if missing:
        return (
            f"{missing[0]} is missing ({len(missing)} of {len(expected)}). Publish all weights, without a param_filter: the server "
            "fuses neighbours, and a part of a fused layer would leave the rest undefined."
        )
    wrong = [name for name in sorted(sent) if list(sent[name]) != list(expected[name])]
    if wrong:
        name = wrong[0]
        return (
            f"{name} has shape {list(sent[name])}, the server's has {list(expected[name])}. Start the server with the model that "
            "is trained."
        )
    return None
