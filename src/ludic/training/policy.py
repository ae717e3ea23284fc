"""The model as the trainer sees it: a micro-batch in, log-probs of its action tokens out."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.distributed.fsdp import compute_device, is_sharded
from ludic.models.attention import route_attention
from ludic.models.head import EntropyMode, Head, chosen_logps, compute, find_head, hidden_states, plain_model
from ludic.models.packed import PackedSequences
from ludic.models.vocabulary_kl import VocabularyKL, vocabulary_kl
from ludic.training.packing import ActionFields, PackedBatch, action_fields, pack
from ludic.types import SAWItem

logger = logging.getLogger(__name__)

_AUTOCAST = {"bf16": torch.bfloat16}


class TrainedPolicy:
    """One model, packed or padded."""

    def __init__(self, model: Any, *, packed: bool = True, mixed_precision_dtype: str | None = "bf16") -> None:
        self.model = model
        self.packed = packed
        if packed:
            with torch.no_grad():
                compute(model, lambda: route_attention(plain_model(model)))
        self._head = find_head(model)
        first = next(model.parameters())
        self.device: torch.device = compute_device(model)
        is_converted = is_sharded(model)  # FSDP gathers weights in the precision that they are used in
        self._autocast_dtype = (
            _AUTOCAST[mixed_precision_dtype]
            if mixed_precision_dtype is not None and first.is_cuda and first.dtype is torch.float32 and not is_converted
            else None
        )

    @property
    def head(self) -> Head:
        return self._head

    def batch(self, items: Sequence[SAWItem], pad_token_id: int = 0) -> PackedBatch:
        """One micro-batch in the form this policy computes."""
        return pack(items, self.device) if self.packed else _padded(items, pad_token_id, self.device)

    def logps(self, batch: PackedBatch, *, entropy: EntropyMode | None = None) -> tuple[Tensor, Tensor | None]:
        """[A] log-probs of the action tokens under the distributions they were drawn from, and entropies if asked for."""
        return self.outputs(batch, entropy=entropy)[1:]

    def outputs(
        self, batch: PackedBatch, *, entropy: EntropyMode | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same after the hidden states [A, D] that the action tokens are predicted from."""

        def work() -> tuple[Tensor, Tensor, Tensor | None]:
            hidden_AD = self._action_hidden(batch)
            return hidden_AD, *self._logps_of(hidden_AD, batch, entropy)

        return compute(self.model, work)

    def action_hidden(self, batch: PackedBatch) -> Tensor:
        """[A, D] the hidden states alone."""
        return compute(self.model, lambda: self._action_hidden(batch))

    def kl_to(self, teacher: "TrainedPolicy", hidden_AD: Tensor, batch: PackedBatch, how: VocabularyKL) -> Tensor:
        """[A] KL to a frozen teacher at the action tokens, whose hidden states under this policy are `hidden_AD`."""
        with torch.no_grad():
            teacher_AE = teacher.action_hidden(batch)
        with self._precision():
            return vocabulary_kl(
                hidden_AD, self._head, teacher_AE, teacher.head, batch.actions.inverse_temperature_A, how
            )

    def _action_hidden(self, batch: PackedBatch) -> Tensor:
        with self._precision():
            return self._hidden(batch).index_select(0, batch.actions.predictor_A)

    def _logps_of(
        self, hidden_AD: Tensor, batch: PackedBatch, entropy: EntropyMode | None
    ) -> tuple[Tensor, Tensor | None]:
        actions = batch.actions
        with self._precision():
            return chosen_logps(
                hidden_AD,
                self._head,
                actions.target_A,
                actions.inverse_temperature_A,
                entropy=entropy,
                supports=actions.supports,
            )

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """Flat hidden states of all tokens, padding included."""
        if self.packed:
            state = PackedSequences(batch.lengths, self.device)
            return hidden_states(self.model, batch.ids_T, batch.positions_T, state)
        rows = len(batch.lengths)
        ids_BL = batch.ids_T.view(rows, -1)
        lengths = torch.tensor(batch.lengths, device=self.device)
        mask_BL = torch.arange(ids_BL.shape[1], device=self.device)[None] < lengths[:, None]
        decoder = plain_model(self.model).get_decoder()
        out: Tensor = decoder(input_ids=ids_BL, attention_mask=mask_BL.long(), use_cache=False).last_hidden_state
        return out.flatten(0, 1)

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self._autocast_dtype is None:
            yield
        else:
            with torch.autocast(self.device.type, dtype=self._autocast_dtype):
                yield


def _padded(items: Sequence[SAWItem], pad_token_id: int, device: torch.device) -> PackedBatch:
    """The same fields with every sample as long as the longest; `lengths` say what is real."""
    lengths = [len(item.input_ids) for item in items]
    longest = max(lengths)
    ids_BL = np.full((len(items), longest), pad_token_id, dtype=np.int64)
    for row, item in enumerate(items):
        ids_BL[row, : lengths[row]] = item.input_ids
    actions: ActionFields = action_fields(items, np.arange(len(items)) * longest, device)
    positions = np.tile(np.arange(longest), len(items))
    return PackedBatch(
        ids_T=torch.from_numpy(ids_BL.reshape(-1)).to(device),
        positions_T=torch.from_numpy(positions).to(device),
        lengths=lengths,
        actions=actions,
        items=list(items),
    )
