"""The passes of the core, through the model's own modules: on padded samples, and on packed ones."""

from typing import Any

import torch
from torch import Tensor

from ludic.models.attention import SKIP_MASK, NotRoutable
from ludic.models.head import EntropyMode, compute, decoder_of, hidden_states, is_decoder, plain_model
from ludic.models.packed_attention import PackedSequences
from ludic.models.passes.base import ForwardPass, Outputs, PassNeeds, TokenBatch, outputs_of_chosen
from ludic.models.passes.routing import route_attention
from ludic.models.tree_attention import TreeSequences


class ModulesPass(ForwardPass):
    """Padded samples. It suits every module that returns logits."""

    def suits(self) -> str | None:
        return None

    def flat_hidden(self, batch: TokenBatch) -> Tensor:
        num_tokens = len(batch.ids_T)
        with self.saving(num_tokens, num_tokens // len(batch.lengths)):
            return self.by_modules(batch)

    def by_modules(self, batch: TokenBatch) -> Tensor:
        ids_BL, mask_BL = self.rows(batch)
        out: Tensor = decoder_of(self.model)(
            input_ids=ids_BL, attention_mask=mask_BL, use_cache=False
        ).last_hidden_state
        return out.flatten(0, 1)


class PackedPass(ModulesPass):
    """Packed samples, for models whose attention can be routed."""

    packs = True

    @classmethod
    def is_for(cls, model: Any, needs: PassNeeds) -> bool:
        return needs.packed and needs.context is None and is_decoder(model)

    def suits(self) -> str | None:
        try:
            with torch.no_grad():
                compute(self.model, lambda: route_attention(plain_model(self.model)))
        except NotRoutable as error:
            return error.reason
        return None

    def by_modules(self, batch: TokenBatch) -> Tensor:
        if batch.is_padded:
            return super().by_modules(batch)
        return hidden_states(self.model, batch.ids_T, batch.positions_T, self.state(batch))

    def state(self, batch: TokenBatch) -> Any:
        """The state that computes attention and recurrent layers of a packed micro-batch."""
        return self.attention(batch)

    def attention(self, batch: TokenBatch) -> PackedSequences | TreeSequences:
        tree = batch.tree
        return PackedSequences(batch.lengths, self.device) if tree is None else TreeSequences(tree, self.device)

    def _outputs(self, batch: TokenBatch, entropy: EntropyMode | None, observations: Any) -> Outputs:
        if batch.is_padded or self.has_head:
            return super()._outputs(batch, entropy, observations)
        return self._from_packed_logits(batch, entropy, observations)

    def _from_packed_logits(self, batch: TokenBatch, entropy: EntropyMode | None, observations: Any) -> Outputs:
        """For a model that does more to its hidden states than an output layer: its own logits, of the chosen positions alone."""
        wanted = [batch.actions.predictor_A, *([] if observations is None else [observations.predictor_O])]
        with self.precision():
            logits_NV = self.model(
                input_ids=batch.ids_T[None],
                position_ids=batch.positions_T[None],
                attention_mask=SKIP_MASK.to(self.device),
                use_cache=False,
                ludic_state=self.state(batch),
                logits_to_keep=torch.cat(wanted),
            ).logits[0]
        logits_AV, *rest = logits_NV.split([len(part) for part in wanted])
        return outputs_of_chosen(logits_AV, rest[0] if rest else None, batch, entropy, observations)
