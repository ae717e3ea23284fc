"""Attention over concatenated sequences of different lengths on a GPU: block-diagonal and causal.

Uses PyTorch's variable-length flash attention, and SDPA sequence by sequence where flash attention cannot express the case
(logit soft-capping).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.models.attention import AttentionRules, softcapped_attention


# Letters: T query tokens, L key tokens, H query heads, K key/value heads, D head size.
def varlen_attention(
    query_THD: Tensor,
    key_LKD: Tensor,
    value_LKD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    rules: AttentionRules,
) -> Tensor:
    """The queries of a sequence are its last tokens: query i of n sees all keys except the last n − i − 1."""
    if rules.softcap is None and query_THD.dtype in (torch.bfloat16, torch.float16):
        window_left = -1 if rules.sliding_window is None else rules.sliding_window - 1
        out = torch.ops.aten._flash_attention_forward(
            query_THD.contiguous(), key_LKD.contiguous(), value_LKD.contiguous(), cu_q, cu_k, max_q, max_k, 0.0, True, False,
            scale=rules.scaling, window_size_left=window_left, window_size_right=0,
        )[0]  # fmt: skip
        return out
    return _one_by_one(query_THD, key_LKD, value_LKD, cu_q, cu_k, rules)


def _one_by_one(
    query_THD: Tensor, key_LKD: Tensor, value_LKD: Tensor, cu_q: Tensor, cu_k: Tensor, rules: AttentionRules
) -> Tensor:  # fmt: skip
    scaling, window, softcap = rules
    outs = []
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    for (q0, q1), (k0, k1) in zip(zip(bounds_q, bounds_q[1:]), zip(bounds_k, bounds_k[1:]), strict=True):  # noqa: B905, RUF007
        query, key, value = (
            query_THD[q0:q1].transpose(0, 1),
            key_LKD[k0:k1].transpose(0, 1),
            value_LKD[k0:k1].transpose(0, 1),
        )
        positions_k = torch.arange(k1 - k0, device=query.device)
        positions_q = positions_k[k1 - k0 - (q1 - q0) :, None]
        mask = positions_k[None] <= positions_q
        if window is not None:
            mask &= positions_k[None] > positions_q - window
        if softcap is None:
            group = query.shape[0] // key.shape[0]
            key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
            out = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scaling)[0]
        else:
            out = softcapped_attention(query, key, value, mask, scaling, softcap)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)
