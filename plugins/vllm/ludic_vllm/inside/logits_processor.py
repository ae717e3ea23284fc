"""The limit on thinking (`max_think.py`) inside vLLM: a custom logits processor for either of its model runners.

vLLM has two interfaces for these, one per model runner, and picks the runner itself (the CPU build has the older one,
a GPU with Triton usually the newer). Both accept `MaxThink`, which creates the right processor.
It runs inside the server process (`--logits-processors ludic_vllm.inside.logits_processor:MaxThink`).
"""

import logging
from importlib import import_module
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.version import __version__

from ludic_vllm.inside.max_think import CLOSING_TAG, forced_token, forced_tokens, read_limit
from ludic_vllm.versions import release_of

_BATCH_MODULE = release_of(__version__).batch_processor
BatchProcessor: Any = object if _BATCH_MODULE is None else import_module(_BATCH_MODULE).LogitsProcessor
logger = logging.getLogger("vllm.ludic.max_think")  # a child of vllm's logger: it appears in the server's output


class _MaxThinkPerRequest(AdapterLogitsProcessor):
    """For the older runner, which stores the tokens of each request as a list."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._closing = _closing_ids(vllm_config)

    def is_argmax_invariant(self) -> bool:
        return False  # forcing a token changes which one is the likeliest

    def new_req_logits_processor(self, params: SamplingParams) -> "_ForceClosing | None":
        limit = read_limit(params.extra_args)
        return _ForceClosing(limit, self._closing) if limit is not None and self._closing else None


class _ForceClosing:
    """Masks the logits of one request to the forced token."""

    def __init__(self, limit: int, closing: list[int]) -> None:
        self.limit = limit
        self.closing = closing

    def __call__(self, reply: list[int], logits: torch.Tensor) -> torch.Tensor:
        token = forced_token(reply, self.limit, self.closing)
        if token is not None:
            logits.fill_(-torch.inf)
            logits[token] = 0.0
        return logits


class MaxThinkBatch(BatchProcessor):
    """For the newer runner, which stores all tokens on the device and must not be synchronised."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._requests = req_states
        self._closing = _closing_ids(vllm_config)
        self._closing_K = torch.tensor(self._closing, dtype=torch.int64, device=req_states.device)
        self._limits = np.zeros(req_states.max_num_reqs, dtype=np.int64)  # per slot of a request; 0: no limit

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._limits[req_idx] = (read_limit(sampling_params.extra_args) or 0) if self._closing else 0
        return bool(self._limits[req_idx])

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        slots = ctx.idx_mapping_np
        limits = self._limits[slots]
        # Without speculative decoding (vllm_server leaves this processor out with it) the lengths are exact, and
        # one request is one row of the logits.
        lengths = ctx.seq_lens_upper_bound_np - self._requests.prompt_len.np[slots]
        closing_now = (limits > 0) & (lengths >= limits) & (lengths < limits + len(self._closing))
        rows = np.flatnonzero(closing_now)
        return self._force(logits, rows, slots[rows], lengths[rows]) if len(rows) else logits

    def _force(self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        device = logits.device
        rows_R, slots_R, lengths_R = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (rows, slots, lengths))
        prompts_R = torch.from_numpy(self._requests.prompt_len.np[slots].astype(np.int64)).to(device)
        tokens = self._requests.all_token_ids.gpu
        width_W = torch.arange(int(lengths.max()) + len(self._closing), device=device)
        positions_RW = (prompts_R[:, None] + width_W).clamp(max=tokens.shape[1] - 1)
        replies_RW = tokens[slots_R[:, None], positions_RW].to(torch.int64)
        forced_R = forced_tokens(replies_RW, lengths_R, self._closing_K)
        only = torch.full((len(rows), logits.shape[1]), -torch.inf, dtype=logits.dtype, device=device)
        only.scatter_(1, forced_R.clamp(min=0)[:, None], 0.0)
        logits[rows_R] = torch.where(forced_R[:, None] >= 0, only, logits[rows_R])
        return logits


class MaxThink(AdapterLogitsProcessor, BatchProcessor):
    """The class that the flag names. vLLM checks that it is a processor of its runner's kind, then instantiates it."""

    def __new__(cls, vllm_config: Any, *rest: Any) -> Any:  # (device, is_pin_memory), or the newer runner's req_states
        return _MaxThinkPerRequest(vllm_config, *rest) if len(rest) == 2 else MaxThinkBatch(vllm_config, *rest)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        read_limit(sampling_params.extra_args)


def _closing_ids(vllm_config: Any) -> list[int]:
    """Token ids of the closing tag; empty if the tokenizer cannot encode it."""
    tokenizer = cached_tokenizer_from_config(model_config=vllm_config.model_config)
    ids = list(tokenizer.encode(CLOSING_TAG, add_special_tokens=False))
    if tokenizer.decode(ids).strip() == CLOSING_TAG:
        return ids
    logger.warning("This tokenizer cannot write %s: max_think will have no effect.", CLOSING_TAG)
    return []
