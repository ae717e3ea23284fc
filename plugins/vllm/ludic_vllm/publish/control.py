"""Directs vLLM servers through a weight update over HTTP: all servers complete a step before any begins the next.

The order: check names and shapes, pause all servers at a token boundary, start the loader, send buckets, finish the loader
with the new version, empty prefix caches, compare checksums, resume. If a step fails on one server, all stop there: a server
with half-loaded weights must not generate.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeAlias

import torch

from ludic.distributed.publisher import WeightPushError
from ludic.types import ConfigError, PolicyGone
from ludic_vllm.publish.transfer import Bucket, WeightMetadata

PauseMode: TypeAlias = Literal["keep", "wait", "abort"]
"""Requests in flight are frozen and continue with the new weights ("keep"), finish first ("wait"), or are aborted."""
Answers: TypeAlias = dict[str, dict[str, Any]]
"""Server → its answer."""
FRESH = "default"
"""vLLM's version label of a server that has had no push since its start."""
RETRY_S = 0.5


class ControlClient(Protocol):
    """A client with servers and calls that use the control token. `VLLMChatClient` is one.

    Raises ConfigError for a call that is refused (token, endpoint), OSError if the server is unreachable, TimeoutError, and
    RuntimeError with the server's message for a call that fails.
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
    """Directs all servers of a client through one update."""

    def __init__(
        self, client: ControlClient, *, pause: PauseMode = "keep", timeout_s: float = 600.0, wait_s: float = 120.0
    ) -> None:
        """`timeout_s`: for one call. `wait_s`: how long a stopped server may take to come back."""
        if pause not in ("keep", "wait", "abort"):
            raise ConfigError(f"pause={pause!r}; choose 'keep', 'wait' or 'abort' for requests in flight.")
        self._client, self._pause, self._timeout_s, self._wait_s = client, pause, timeout_s, wait_s
        self._loading = False
        """A loader may have started: from here on no server may generate before it has all weights."""
        self._paused: list[str] = []
        self._threads = ThreadPoolExecutor(thread_name_prefix="ludic-weight-control")
        """Each step runs in its own event loop, since the publishing thread may already be in one."""

    # --- ControlPlane ---

    def policy_version(self) -> int:
        """The lowest version of all servers; 0 for a server that has had no push."""
        return min(0 if label == FRESH else int(label) for label in self._labels())

    def has_version(self, version: int) -> bool:
        return all(label == str(version) for label in self._labels())

    def require_fits(self, metadata: Sequence[WeightMetadata]) -> None:
        sent = {part.name: list(part.shape) for part in metadata}
        for server, expected in self._parameters().items():
            problem = misfit(sent, expected[0])
            if problem:
                raise ConfigError(f"The weights are not those of the model that {server} serves: {problem}")

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
                f"{', '.join(self.servers)} stay paused, because their weights may be half loaded. Publish again "
                "(a new push repairs them) or restart the server; it then starts with the weights of its folder."
            )
        self._resume_untouched()
        return "The servers continue with their previous weights."

    # --- memory ---

    def sleep(self) -> None:
        """Servers finish what they generate, move their weights to the CPU's memory and free their cache. `wake` and every push
        wake them. On a CPU they only pause."""
        self._post("/sleep", params={"level": "1", "mode": "wait"})

    def wake(self) -> None:
        """Wake the servers that sleep. What torch keeps here of freed GPU memory is given back first, since they need it."""
        asleep = [server for server, answer in self._get("/is_sleeping").items() if answer["is_sleeping"]]
        if not asleep:
            return
        torch.cuda.empty_cache()
        for server in asleep:
            try:
                self._post("/wake_up", servers=[server])
            except WeightPushError as error:
                if isinstance(error.__cause__, RuntimeError):
                    raise ConfigError(  # without memory vLLM keeps what it got, and takes all again when it is asked again
                        f"A sleeping server cannot wake. {error} If it lacks GPU memory: end what else uses the GPU, lower "
                        "--server-memory or the trainer's micro_token_budget. Then restart the server, or resume the run."
                    ) from error
                raise

    # --- for communicators ---

    @property
    def servers(self) -> list[str]:
        return list(self._client.servers)

    def num_workers(self, server: str) -> int:
        return int(self._get("/get_world_size", servers=[server])[server]["world_size"])

    def require_readable(self, paths: Sequence[str], advice: str) -> None:
        """Before the pause: check that every worker can read what it will load."""
        for server, answers in self._ask_workers("ludic_unreadable", [list(paths)]).items():
            unseen = sorted({path for answer in answers for path in answer})
            if unseen:
                raise ConfigError(f"{server} cannot read {unseen[0]}. {advice}")

    def require_mappable(self, block: Mapping[str, Any], advice: str) -> None:
        """Before the pause: check that every worker can map the trainer's GPU memory."""
        for server, answers in self._ask_workers("ludic_unmappable", [dict(block)]).items():
            problems = [problem for answer in answers for problem in answer]
            if problems:
                raise ConfigError(f"{server} cannot map the trainer's GPU memory ({problems[0]}). {advice}")

    def connect(self, server: str, init_info: Mapping[str, Any]) -> "Future[Any]":
        """The workers of one server join a process group; the trainer must join at the same time."""
        return self._begin_post("/init_weight_transfer_engine", {"init_info": dict(init_info)}, servers=[server])

    def load(self, bucket: Bucket, source: Mapping[str, Any]) -> "Future[Any]":
        """All servers load one bucket from `source`."""
        body = {"update_info": {"bucket": bucket.to_json(), "source": dict(source)}}
        return self._begin_post("/update_weights", body)

    # --- steps ---

    def _parameters(self) -> dict[str, list[Any]]:
        """Names and shapes of every server's weights, once all servers answer; one that stops meanwhile is also waited for."""
        while True:
            self._wait_for_servers()
            try:
                return self._ask_workers("ludic_parameters", [True])
            except WeightPushError as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise

    def _wait_for_servers(self) -> None:
        """Until all answer; wakes those that sleep."""
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                self._labels()
                return self.wake()
            except WeightPushError as error:
                if time.monotonic() > deadline:
                    raise WeightPushError(
                        f"{error} Waited {self._wait_s:.0f} s. Restart it and publish again, or remove it from the client."
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
                    raise WeightPushError(f"{server} received other values than were sent, for example for {wrong[0]}.")
                if worker["differing"]:
                    raise WeightPushError(
                        f"{server} did not load what it received, for example {worker['differing'][0]}."
                    )

    def _resume_untouched(self) -> None:
        for server in self._paused:
            with contextlib.suppress(WeightPushError):  # this server is down; its error is already being raised
                self._post("/resume", servers=[server])
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
    ) -> Answers:
        return self._begin_post(path, body, params, servers=servers).result()

    def _begin_post(
        self, path: str, body: Any = None, params: Mapping[str, str] | None = None, *, servers: Sequence[str] = ()
    ) -> "Future[Answers]":
        post, asked = self._client.control_post, servers or self.servers
        return self._begin({server: post(server, path, body, params, self._timeout_s) for server in asked})

    def _get(self, path: str, *, servers: Sequence[str] = (), timeout_s: float = 60.0) -> Answers:
        get, asked = self._client.control_get, servers or self.servers
        return self._begin({server: get(server, path, None, timeout_s) for server in asked}).result()

    def _begin(self, calls: Mapping[str, Coroutine[Any, Any, dict[str, Any]]]) -> "Future[Answers]":
        return self._threads.submit(asyncio.run, self._each(calls))

    async def _each(self, calls: Mapping[str, Coroutine[Any, Any, dict[str, Any]]]) -> Answers:
        """Run all calls at once; await all before raising the first failure, so that no server is left in the middle of a step."""
        answers = await asyncio.gather(*calls.values(), return_exceptions=True)
        for server, answer in zip(calls, answers, strict=True):
            if isinstance(answer, BaseException):
                raise _as_push_error(server, answer)
        return dict(zip(calls, answers, strict=True))  # type: ignore[arg-type]


def _as_push_error(server: str, error: BaseException) -> BaseException:
    """A WeightPushError for failures of a server or its connection; errors that a retry cannot fix pass unchanged."""
    if isinstance(error, ConfigError | PolicyGone) or not isinstance(error, OSError | TimeoutError | RuntimeError):
        return error
    made = WeightPushError(f"{server}: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def misfit(sent: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> str | None:
    """Why these weights cannot be loaded; None if they can."""
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
            "fuses layers, and a part of a fused layer would leave the rest undefined."
        )
    wrong = [name for name in sorted(sent) if list(sent[name]) != list(expected[name])]
    if wrong:
        name = wrong[0]
        shapes = f"{list(sent[name])}, the server's has {list(expected[name])}"
        return f"{name} has shape {shapes}. Start the server with the trained model."
    return None
