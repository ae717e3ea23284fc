"""How far one update moved the policy: KL per token between the weights before and after it.

The mismatch that every step logs (`kl_actor_policy`) is taken before the update, so on-policy it is about 0 however fast
the policy moves. This looks at the same tokens once more afterwards. One micro-batch is enough for an average, and costs
two forward passes of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ludic.training.losses.tokens import Stats, over_tokens
from ludic.training.packing import FILLER
from ludic.training.policy import TrainedPolicy
from ludic.types import SAWItem

_MAX_LOG_RATIO = 20.0


class DriftProbe:
    """Made before an update, asked after it."""

    def __init__(self, policy: TrainedPolicy, items: Sequence[SAWItem], pad_token_id: int = 0) -> None:
        self._policy = policy
        self._batch = policy.batch(items, pad_token_id)
        self._counts = items[0] is not FILLER
        self._before_A = self._logps()

    def measure(self) -> Stats:
        """`policy_drift`: KL(before ‖ after) per token (k3), for ranks to add up; nothing of a filler."""
        difference_A = (self._logps() - self._before_A).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return {"policy_drift": over_tokens(difference_A.exp() - 1 - difference_A)} if self._counts else {}

    @torch.no_grad()
    def _logps(self) -> Tensor:
        return self._policy.logps(self._batch)[0]
