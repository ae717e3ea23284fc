"""The interfaces between the parts. Whoever has these methods fits; nothing needs to inherit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ludic.types.inference import ChatResponse, TokenCompletionRequest
from ludic.types.rollout import Rollout
from ludic.types.samples import RolloutStepKey, SAWBatch, SAWItem
from ludic.types.steps import Info, Step


@runtime_checkable
class ChatClient(Protocol):
    """Token ids in, token ids out."""

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion, and whatever small JSON facts the client wants on the step."""
        ...

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        """Replace the served weights, all or nothing; the committed version comes back."""
        ...


@runtime_checkable
class VersionedClient(ChatClient, Protocol):
    """A client that knows which policy it serves."""

    async def get_policy_version(self) -> int: ...


class BatchSource(Protocol):
    """Where a trainer gets its next batch."""

    async def next_batch(self) -> SAWBatch: ...


class CreditAssigner(Protocol):
    """From finished rollouts to one weight per step; it sees a whole batch, so siblings can be compared."""

    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]: ...


class PolicyPublisher(Protocol):
    """Hands new weights to whatever serves the policy."""

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None: ...


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
