"""The forward passes that this plug-in adds for training: fused, hybrid, with pictures, and sliced over ranks."""

from typing import Any

from torch import Tensor

from ludic.models.head import EntropyMode, chosen_logps, hidden_states, is_decoder, plain_model
from ludic.models.kinds import is_vision_model, recurrent_layers
from ludic.models.llama import is_of_family
from ludic.models.passes.base import ModulesPass, Outputs, PackedPass, PassNeeds, TokenBatch
from ludic_gpu.context_parallel import require_same_in_slices
from ludic_gpu.llama.training import FusedDecoder, fused_decoder
from ludic_gpu.recurrent import HybridSequences
from ludic_gpu.vision import Pictures, VisionDecoder


class FusedPass(PackedPass):
    """The Llama family in half precision on a GPU, by hand-written layers."""

    is_fused = True

    @classmethod
    def is_for(cls, model: Any, needs: PassNeeds) -> bool:
        is_asked = needs.fused and super().is_for(model, needs)
        return is_asked and next(model.parameters()).is_cuda and is_of_family(plain_model(model))

    def suits(self) -> str | None:
        if (reason := super().suits()) is not None:
            return reason
        found = fused_decoder(self.model)
        if found is None:
            return "it is not of the Llama family in half precision, or its modules give other values"
        self._fused: FusedDecoder = found
        return None

    def flat_hidden(self, batch: TokenBatch) -> Tensor:
        if batch.is_padded or not self._fused.is_current:
            return super().flat_hidden(batch)
        tape = self.host_tape(len(batch.ids_T))
        return self._fused.hidden(batch.ids_T, batch.positions_T, self.attention(batch), tape)


class HybridPass(PackedPass):
    """Models with recurrent layers, each sample from an empty state."""

    @classmethod
    def is_for(cls, model: Any, needs: PassNeeds) -> bool:
        return super().is_for(model, needs) and bool(recurrent_layers(model))

    def state(self, batch: TokenBatch) -> Any:
        return HybridSequences(self.attention(batch), batch.paths, self.device)


class VisionPass(ModulesPass):
    """Vision-language models, on padded samples."""

    takes_images = True

    @classmethod
    def is_for(cls, model: Any, needs: PassNeeds) -> bool:
        return needs.context is None and is_vision_model(plain_model(model))

    def suits(self) -> str | None:
        images = self.needs.images
        self._vision = VisionDecoder(plain_model(self.model), None if images is None else Pictures(images))
        return None

    def by_modules(self, batch: TokenBatch) -> Tensor:
        ids_BL, mask_BL = self.rows(batch)
        images_B = [item.attachments.images for item in batch.items]
        return self._vision.hidden(ids_BL, mask_BL, images_B).flatten(0, 1)

    def _whole_logits(self, batch: TokenBatch) -> Tensor:
        with self.precision():
            return self.head.logits(self.flat_hidden(batch)).view(len(batch.lengths), -1, self.head.shape[0])


class SlicedPass(PackedPass):
    """Context parallelism: ranks share each row, and each computes the log-probs that its own tokens predict."""

    @classmethod
    def is_for(cls, model: Any, needs: PassNeeds) -> bool:
        return needs.context is not None

    def suits(self) -> str | None:
        """ConfigError on all ranks where it does not: they cannot train together in another way."""
        problem = self._problem()
        with self.precision():
            require_same_in_slices(self.model, self.needs.context, self.device, problem)
        return None

    def _problem(self) -> str:
        is_packed = self.needs.packed and is_decoder(self.model) and not is_vision_model(plain_model(self.model))
        if not is_packed or super().suits() is not None:
            return "its samples are padded"
        return "it has recurrent layers" if recurrent_layers(self.model) else ""

    def _outputs(self, batch: TokenBatch, entropy: EntropyMode | None, observations: Any) -> Outputs:
        if batch.is_padded:
            return super()._outputs(batch, entropy, observations)
        part, actions = self.needs.context.cut(batch.lengths, self.device), batch.actions
        with self.precision():
            ids_N, positions_N = part.of(batch.ids_T), part.of(batch.positions_T)
            with self.saving(len(ids_N)):
                hidden_ND = hidden_states(self.model, ids_N, positions_N, part)
            rows = part.rows(actions.predictor_A)
            logps_M, entropy_M = chosen_logps(
                hidden_ND.index_select(0, rows.local_M),
                self.head,
                actions.target_A.index_select(0, rows.taken_M),
                actions.inverse_temperature_A.index_select(0, rows.taken_M),
                entropy=entropy,
                candidates=rows.candidates(actions.candidates),
            )
            entropy_A = None if entropy_M is None else rows.joined(entropy_M)
            found = Outputs(None, rows.joined(logps_M), entropy_A)
            if observations is None:
                return found
            rows = part.rows(observations.predictor_O)
            targets = observations.target_O.index_select(0, rows.taken_M)
            logps_M = chosen_logps(hidden_ND.index_select(0, rows.local_M), self.head, targets)[0]
            return found._replace(observed_O=rows.joined(logps_M))
