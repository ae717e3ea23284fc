"""The forward pass of a model in training: its interface, and the passes of the core on padded and on packed samples."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ludic.models.attention import SKIP_MASK, NotRoutable, say_once
from ludic.models.head import (
    EntropyMode,
    Head,
    chosen_logps,
    compute,
    decoder_of,
    find_head,
    hidden_states,
    is_decoder,
    logps_of_logits,
    plain_model,
    whole_logits,
)
from ludic.models.kinds import part
from ludic.models.packed_attention import PackedSequences, TreeSequences
from ludic.models.passes.routing import route_attention
from ludic.models.prefix_tree import TokenTree
from ludic.types import ConfigError


class Outputs(NamedTuple):
    """Results of one forward pass over a micro-batch."""

    hidden_AD: Tensor | None
    """The hidden states that predict the action tokens; None if the model only returns logits."""
    logps_A: Tensor
    entropy_A: Tensor | None
    observed_O: Tensor | None = None
    """Log-probs of observation tokens, at temperature 1."""


class TokenBatch(Protocol):
    """The part of a micro-batch that a pass reads (`ludic.training.learner.packing.PackedBatch`)."""

    @property
    def ids_T(self) -> Tensor: ...

    @property
    def positions_T(self) -> Tensor: ...

    @property
    def lengths(self) -> list[int]: ...

    @property
    def paths(self) -> Sequence[np.ndarray]: ...

    @property
    def tree(self) -> TokenTree | None: ...

    @property
    def items(self) -> Sequence[Any]: ...

    @property
    def actions(self) -> Any: ...

    @property
    def is_padded(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PassNeeds:
    """Requirements of a trainer for the forward pass of its model."""

    device: torch.device
    """Device of the computation; parameters may be on another."""
    packed: bool = True
    """Samples end to end, where the model can."""
    fused: bool = True
    """A hand-written pass may take the place of the model's modules."""
    autocast_dtype: torch.dtype | None = None
    offload: bool = False
    """Activations saved for backward are kept in host memory."""
    images: Any = None
    """The image processor of a vision-language model."""
    context: Any = None
    """The ranks that share each row with this one."""


# Letters: T flat tokens, D hidden size, A action tokens, O observation tokens; B samples, L tokens of the longest, V vocabulary.
class ForwardPass(ABC):
    """One way to compute a model. A subclass is named by an entry point of the group `ludic.passes`.

    Every pass takes padded micro-batches; those with `packs` take packed ones as well.
    """

    packs = False
    takes_images = False
    is_fused = False
    """True if packed micro-batches do not go through the model's modules; compiled layers would not be called."""

    def __init__(self, model: Any, needs: PassNeeds) -> None:
        self.model, self.needs, self.device = model, needs, needs.device
        self.offload: Any = None
        """Host memory for what the decoder saves, where it is offloaded."""
        self._head: Head | None = None

    @classmethod
    def is_for(cls, model: Any, needs: PassNeeds) -> bool:
        """True if it is meant for models of this kind; others are not asked further."""
        return True

    @abstractmethod
    def suits(self) -> str | None:
        """Why it cannot compute the model, for a sentence about the model; None if it can, and then it is ready."""

    @abstractmethod
    def flat_hidden(self, batch: TokenBatch) -> Tensor:
        """[T, D] the hidden states of all tokens, padding included, in the precision of the caller."""

    def prepare(self) -> None:
        """Called once, after `suits`. Finds the output layer; without one, log-probs are taken from the model's own logits, which
        are held whole."""
        if self.needs.offload:
            self.offload = part("offload").ActivationOffload(self.device)
        try:
            self._head = find_head(self.model) if is_decoder(self.model) else None
        except ConfigError as error:
            say_once(f"Log-probs are taken from whole logits, which takes more memory: {error}")

    @property
    def has_head(self) -> bool:
        return self._head is not None

    @property
    def head(self) -> Head:
        if self._head is None:
            raise ConfigError(
                f"{type(self.model).__name__} only returns logits; a critic on the policy and a KL over the vocabulary need the "
                "hidden states and the output layer of a transformers decoder."
            )
        return self._head

    def hidden(self, batch: TokenBatch) -> Tensor:
        """[T, D] the hidden states of all tokens, padding included."""

        def work() -> Tensor:
            with self.precision():
                return self.flat_hidden(batch)

        return compute(self.model, work)

    def outputs(self, batch: TokenBatch, entropy: EntropyMode | None = None, observations: Any = None) -> Outputs:
        """Log-probs of the action tokens, their entropy if asked for, and log-probs of observation tokens if they are given."""
        return compute(self.model, lambda: self._outputs(batch, entropy, observations))

    def _outputs(self, batch: TokenBatch, entropy: EntropyMode | None, observations: Any) -> Outputs:
        if self._head is None:
            return self.outputs_of(self._whole_logits(batch), batch, entropy, observations)
        actions = batch.actions
        with self.precision():
            hidden_TD = self.flat_hidden(batch)
            hidden_AD = hidden_TD.index_select(0, actions.predictor_A)
            logps_A, entropy_A = chosen_logps(
                hidden_AD,
                self._head,
                actions.target_A,
                actions.inverse_temperature_A,
                entropy=entropy,
                candidates=actions.candidates,
            )
            if observations is None:
                return Outputs(hidden_AD, logps_A, entropy_A)
            hidden_OD = hidden_TD.index_select(0, observations.predictor_O)
            observed_O = chosen_logps(hidden_OD, self._head, observations.target_O)[0]
            return Outputs(hidden_AD, logps_A, entropy_A, observed_O)

    def whole_logits(self, batch: TokenBatch) -> Tensor:
        """[B, L, V] of a padded micro-batch."""
        return compute(self.model, lambda: self._whole_logits(batch))

    def _whole_logits(self, batch: TokenBatch) -> Tensor:
        with self.precision():
            return whole_logits(self.model, *self.rows(batch))

    def outputs_of(
        self, logits_BLV: Tensor, batch: TokenBatch, entropy: EntropyMode | None = None, observations: Any = None
    ) -> Outputs:
        """`outputs` from the whole logits of a padded micro-batch, without hidden states."""
        logits_TV = logits_BLV.flatten(0, 1)
        logits_AV = logits_TV.index_select(0, batch.actions.predictor_A)
        logits_OV = None if observations is None else logits_TV.index_select(0, observations.predictor_O)
        return _outputs_of_chosen(logits_AV, logits_OV, batch, entropy, observations)

    def rows(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Ids and attention mask [B, L] of a padded micro-batch."""
        assert batch.is_padded, "a packed batch has no rows"
        ids_BL = batch.ids_T.view(len(batch.lengths), -1)
        lengths = torch.tensor(batch.lengths, device=self.device)
        mask_BL = torch.arange(ids_BL.shape[1], device=self.device)[None] < lengths[:, None]
        return ids_BL, mask_BL.long()

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self.needs.autocast_dtype
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def host_tape(self, *num_tokens: int) -> Any:
        """Host memory for what one pass saves, over tensors with a dimension of one of these sizes; None without offload."""
        return self.offload.tape(*num_tokens) if self.offload is not None and torch.is_grad_enabled() else None

    def saving(self, *num_tokens: int) -> contextlib.AbstractContextManager[Any]:
        """Inside it, what the modules save for backward goes to the host if it is offloaded."""
        host = self.host_tape(*num_tokens)
        found: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if host is None else host.saving()
        return found


def _outputs_of_chosen(
    logits_AV: Tensor, logits_OV: Tensor | None, batch: TokenBatch, entropy: EntropyMode | None, observations: Any
) -> Outputs:
    actions = batch.actions
    logps_A, entropy_A = logps_of_logits(
        logits_AV,
        actions.target_A,
        actions.inverse_temperature_A,
        entropy=entropy,
        candidates=actions.candidates,
    )
    if observations is None or logits_OV is None:
        return Outputs(None, logps_A, entropy_A)
    scale_O = torch.ones_like(observations.target_O, dtype=torch.float32)
    return Outputs(None, logps_A, entropy_A, logps_of_logits(logits_OV, observations.target_O, scale_O)[0])


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
        return _outputs_of_chosen(logits_AV, rest[0] if rest else None, batch, entropy, observations)
