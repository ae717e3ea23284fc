"""The two interfaces of a weight push: a control plane that directs the servers, and a communicator that sends the bytes."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from ludic_vllm.publish.transfer import Bucket, WeightMetadata


class ControlPlane(Protocol):
    """Directs the servers of the policy through an update; every failure is a WeightPushError."""

    def policy_version(self) -> int:
        """The lowest version of all servers."""
        ...

    def has_version(self, version: int) -> bool:
        """Whether every server has exactly this version, and none has restarted since."""
        ...

    def require_fits(self, metadata: Sequence[WeightMetadata]) -> None:
        """Raise ConfigError if these are not the served model's weights. Changes nothing and does not pause generation."""
        ...

    def announce_update_batch(self, metadata: Sequence[WeightMetadata], version: int) -> None:
        """Pause all servers at a token boundary and prepare them for these weights."""
        ...

    def finalize_update(self, version: int, checksums: Mapping[str, int]) -> None:
        """After all servers have loaded: compare the checksums, begin the version, resume generation."""
        ...

    def abandon_update(self) -> str:
        """Give up the update; returns the servers' state and what to do, as a sentence."""
        ...


class TensorCommunicator(Protocol):
    """Sends the bytes of one update."""

    @property
    def rank(self) -> int: ...

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        """Work that needs no pause: write files, fill buffers, connect."""
        ...

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        """Send one bucket to every server, in the order of the buckets."""
        ...

    def barrier(self) -> None:
        """Returns when the servers have loaded everything that was sent."""
        ...

    def release(self) -> None:
        """After the update, also a failed one: free files, buffers and connections."""
        ...


@runtime_checkable
class KeepsWeights(TensorCommunicator, Protocol):
    """A communicator whose `broadcast` can be called again after `release`, without `stage`: it still has the last bytes."""

    keeps_weights: bool
