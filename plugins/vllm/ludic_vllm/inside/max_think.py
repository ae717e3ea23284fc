"""A limit on thinking: after a number of reply tokens, the closing tag is forced, token by token.

The forced token follows from the reply's tokens alone, with no state between tokens, so a request that is preempted, resumed
or moved within the batch needs no special case. There are two versions: for the token list of one request, and for a batch on
a device. `logits_processor.py` installs both in vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Letters: R requests, W tokens of a reply (padded), K tokens of the closing tag.

CLOSING_TAG = "</think>"
FIELD = "max_think"
"""Name of the limit among a request's extra arguments (`vllm_xargs`)."""


def read_limit(extra_arguments: Mapping[str, Any] | None) -> int | None:
    """A request's limit; None if it has none."""
    limit = (extra_arguments or {}).get(FIELD)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"{FIELD} is {limit!r}; give the number of thinking tokens, an integer of at least 1.")
    return limit


def forced_token(reply: Sequence[int], limit: int, closing: Sequence[int]) -> int | None:
    """The token that must come next, or None if the model may choose.

    A tag that the model has already begun is completed, not started again.
    """
    # After len(closing) forced tokens the tag is complete, so longer replies need no search.
    if not limit <= len(reply) < limit + len(closing):
        return None
    reply, closing = list(reply), list(closing)
    if any(reply[start : start + len(closing)] == closing for start in range(len(reply) - len(closing) + 1)):
        return None
    begun = max(k for k in range(len(closing)) if reply[len(reply) - k :] == closing[:k])
    return closing[begun]


def forced_tokens(replies_RW: "torch.Tensor", lengths_R: "torch.Tensor", closing_K: "torch.Tensor") -> "torch.Tensor":
    """`forced_token` for a batch of replies that have reached their limits; -1 where the model may choose.

    Only the first `lengths_R` tokens of each row count. Everything stays on the device, without synchronisation.
    """
    import torch

    num_closing = len(closing_K)
    starts_W = torch.arange(replies_RW.shape[1] - num_closing + 1, device=replies_RW.device)
    matches_RW = (replies_RW.unfold(1, num_closing, 1) == closing_K).all(-1)
    closed_R = (matches_RW & (starts_W + num_closing <= lengths_R[:, None])).any(-1)
    begun_R = torch.zeros_like(lengths_R)
    for k in range(1, num_closing):
        positions_RK = lengths_R[:, None] - k + torch.arange(k, device=lengths_R.device)
        tail_RK = replies_RW.gather(1, positions_RK.clamp(min=0))
        begun_R = torch.where((tail_RK == closing_K[:k]).all(-1) & (lengths_R >= k), k, begun_R)
    return torch.where(closed_R, -1, closing_K[begun_R])
