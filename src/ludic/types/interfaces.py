"""The interfaces between the parts. A class with these methods fits; nothing needs to inherit."""

import contextlib
import hashlib
import logging
import pickle
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import FunctionType, SimpleNamespace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ludic.types.rollout import Rollout
from ludic.types.samples import RolloutStepKey, SAWBatch, SAWItem
from ludic.types.sampling import ChatResponse, TokenChunk, TokenCompletionRequest
from ludic.types.steps import Info, Step
from ludic.types.tokens import LogprobArray, TokenIds

logger = logging.getLogger(__name__)


@runtime_checkable
class ChatClient(Protocol):
    """Token ids in, token ids out."""

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion, and small JSON facts of the client for the step's info."""
        ...

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        """Replace the served weights, all or nothing; returns the committed version."""
        ...


@runtime_checkable
class VersionedClient(ChatClient, Protocol):
    """A client that knows which policy it serves."""

    async def get_policy_version(self) -> int: ...


@runtime_checkable
class StreamingClient(ChatClient, Protocol):
    """A client that hands out tokens as they are sampled."""

    def stream_tokens(self, request: TokenCompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        """One completion in chunks; the last holds the whole. Closing the generator early cancels the request."""
        ...


@runtime_checkable
class BatchingClient(ChatClient, Protocol):
    """A client that computes many requests together: fewer at a time waste it."""

    max_sequences: int
    """Requests that it computes at a time; others wait."""


@runtime_checkable
class LimitedClient(ChatClient, Protocol):
    """A client that knows its context."""

    @property
    def max_total_tokens(self) -> int:
        """Tokens of one request at most, prompt and completion."""
        ...


@runtime_checkable
class TeacherScorer(Protocol):
    """A model that gives log-probabilities of tokens that another model sampled."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """Identifies the vocabulary; two models may be compared token by token only if it is equal."""
        ...

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> LogprobArray:
        """Log-probability of each completion token after all that comes before it."""
        ...


class BatchSource(Protocol):
    """A trainer's source of batches."""

    async def next_batch(self) -> SAWBatch: ...


@runtime_checkable
class Stateful(Protocol):
    """Has state that a resumed run must restore: a position, a tracker, a random generator."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def state_of(part: object) -> dict[str, Any]:
    """The state of a part that may have one; {} if it has none."""
    return part.state_dict() if isinstance(part, Stateful) else {}


def load_into(part: object, state: dict[str, Any]) -> None:
    """Restore what `state_of` returned."""
    if isinstance(part, Stateful):
        part.load_state_dict(state)


def is_saved(part: object) -> bool:
    """True if checkpoints hold the state of a user's object. Weights of a torch module, such as a reward model, are none of it."""
    return isinstance(part, Stateful) and not (hasattr(part, "parameters") and hasattr(part, "forward"))


class UnsavedState:
    """Notices that a user's object changes while it has no `state_dict`: checkpoints do not hold it."""

    def __init__(self, parts: Iterable[object]) -> None:
        """Called at the start of the run."""
        own = (
            part
            for part in parts
            if not (isinstance(part, Stateful) or type(part).__module__.startswith(("ludic.", "ludic_")))
        )
        self._before = [(part, _digests(part)) for part in own]

    def warn(self) -> None:
        """Called for the first checkpoint; it compares once."""
        for part, before in self._before:
            if changed := [name for name, now in _digests(part).items() if now != before.get(name)]:
                logger.warning(
                    "%s has changed since the start (%s) but has no state_dict and load_state_dict: a resumed run begins it again, "
                    "and goes on differently. See docs/credit.md.",
                    getattr(part, "__name__", type(part).__name__),
                    ", ".join(changed),
                )
        self._before = []


def own_parts(part: Any, path: str, seen: set[int] | None = None) -> dict[str, Any]:
    """The user's objects in a rule or a loss by their path; those of Ludic, such as ScaledCredit and CorrectedLoss, hold others."""
    seen = set() if seen is None else seen
    if id(part) in seen or isinstance(part, (type, Enum)):
        return {}
    seen.add(id(part))
    if isinstance(part, (list, tuple)):
        inner = dict(enumerate(part))
    elif isinstance(part, Mapping):
        inner = dict(part)
    elif type(part).__module__.startswith(("ludic.", "ludic_")):
        inner = _attributes(part)
    else:
        return {path: part}
    return {key: own for name, one in inner.items() for key, own in own_parts(one, f"{path}.{name}", seen).items()}


def _attributes(part: object) -> dict[Any, Any]:
    state: Any = object.__getstate__(part)
    plain, slots = state if isinstance(state, tuple) else (state, None)
    return {**(plain or {}), **(slots or {})}


def _digests(part: object) -> dict[Any, str]:
    """State of each attribute."""
    found = {}
    for name, value in _attributes(part).items():
        digest = hashlib.blake2b()
        pickler = _Pickler(SimpleNamespace(write=digest.update))
        pickler.fast = True  # equal values are equal, whether or not two parts are one object
        try:
            pickler.dump(value)
            found[name] = digest.hexdigest()
        except Exception:  # noqa: BLE001 - such as a lock, or a list that holds itself; no run ends for a warning
            with contextlib.suppress(Exception):
                found[name] = repr(value)
    return found


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """A tensor counts by its version: its numbers, perhaps gigabytes, are not read. A class or function is itself."""
        if isinstance(obj, (type, FunctionType)):
            return id(obj)
        return (id(obj), obj._version) if hasattr(type(obj), "data_ptr") else None


@runtime_checkable
class FollowsVersions(Protocol):
    """Is told which policy version is being trained, to bound the lag of its batches."""

    def notify_version(self, version: int) -> None: ...


def tell_version(part: object, version: int) -> None:
    if isinstance(part, FollowsVersions):
        part.notify_version(version)


@runtime_checkable
class FollowsDrift(Protocol):
    """Is told how far each update moved the policy. Costs the trainer two forward passes of one micro-batch."""

    def notify_drift(self, kl: float) -> None:
        """KL per token between the weights before and after an update; may be called from a thread."""
        ...


@runtime_checkable
class AccountsForItems(Protocol):
    """Hands out samples that must neither be lost nor used twice, and is told which were trained on.

    Both may be called from a thread, and must not take long.
    """

    def notify_trained(self, step: int, num_items: int) -> None:
        """An optimizer step is done; it used `num_items` of the items handed out since the last call, and drops the others. The
        further steps on a batch use none: a checkpoint between them holds the batch."""
        ...

    def notify_saved(self, step: int) -> None:
        """A checkpoint of this step is on disk: the samples trained until then are not needed again."""
        ...


SampleCheck: TypeAlias = Callable[[Sequence[SAWItem]], None]
"""Raises, with the reason, if these samples cannot be trained on."""


@runtime_checkable
class ChecksSamples(Protocol):
    """Hands out samples of other processes, and sets aside those that a trainer cannot train on."""

    def use_sample_check(self, check: SampleCheck) -> None: ...


@runtime_checkable
class Scorer(Protocol):
    """Gives rewards to finished episodes: a judge, a reward function, a penalty. `ludic.rewards.Rewards` applies it."""

    name: str
    """Scores of its components: a scorer "judge" returns {"judge": 0.5}, or {"judge/style": 1.0, "judge/fact": 0.0}."""
    by_group: bool
    """True: it sees all siblings of a group at once; False: the rollouts of one episode."""

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        """One mapping of named components per rollout, in order; {} for a rollout that it does not score."""
        ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """Counts something that is worth a metric: calls, tokens, cache hits."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics by name, since it was made. Those of several processes are added up."""
        ...


@runtime_checkable
class ReportsMeans(Protocol):
    """Has metrics that are means. Those of several processes are averaged."""

    def mean_weights(self) -> Mapping[str, float]:
        """Metric that is a mean → over how many."""
        ...


class CreditAssigner(Protocol):
    """Gives each step of finished rollouts one weight; it sees a whole batch, so siblings can be compared."""

    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]: ...


class PolicyPublisher(Protocol):
    """Hands new weights to the servers of the policy."""

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None: ...


@runtime_checkable
class InPlacePublisher(PolicyPublisher, Protocol):
    """Its server, an inference engine in this process, holds the trainer's own parameters."""

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """Entered around a change of the weights; the server pauses meanwhile."""
        ...


@runtime_checkable
class ChecksServers(PolicyPublisher, Protocol):
    """Can tell whether its published weights are still served: a restarted server has lost them."""

    def is_current(self, version: int) -> bool: ...


@runtime_checkable
class AdapterPublisher(PolicyPublisher, Protocol):
    """Reads the adapter that it sends from the model itself: no merged weights are handed to it."""

    def require_trained(self, model: Any) -> None:
        """Raise ConfigError if it sends the adapter of another model."""
        ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """Keeps a copy of the policy's weights, so that training may change the originals."""

    def take_snapshot(self, version: int) -> None:
        """Copy the current weights, between two steps; returns when they are copied."""
        ...


class Evaluator(Protocol):
    """Runs evaluation episodes: (one record per sample, metrics)."""

    async def eval(
        self,
        *,
        requests: Sequence[Any] | None = None,
        reducers: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[dict[str, Any]], dict[str, float]]: ...


class TrainingLogger(Protocol):
    """Receives the numbers of one step."""

    def log(self, step: int, stats: Mapping[str, float]) -> None: ...


SampleFilter: TypeAlias = Callable[[SAWItem], bool]
"""True keeps the item."""
TokenizeFn: TypeAlias = Callable[[str], list[int]]
StateFromStepFn: TypeAlias = Callable[[Rollout, int, Step], str]
StepSelector: TypeAlias = Callable[[Step], bool]
