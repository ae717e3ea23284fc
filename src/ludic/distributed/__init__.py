"""Getting new weights to whatever serves the policy."""

from ludic.distributed.shared_weights import SharedWeightsPublisher

__all__ = ["SharedWeightsPublisher"]
