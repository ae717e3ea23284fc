"""The model as the trainer sees it: a micro-batch in, log-probs of its action tokens out."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ludic.distributed.fsdp import compute_device, is_sharded
from ludic.distributed.ranks import Ranks
from ludic.models.attention import SKIP_MASK, NotRoutable, route_attention, say_once
from ludic.models.execution import decoder_layers
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
from ludic.models.kinds import is_vision_model
from ludic.models.packed_attention import PackedSequences
from ludic.models.teacher_kl import VocabularyKL, vocabulary_kl
from ludic.models.tree_attention import TreeSequences
from ludic.training.learner.packing import (
    PADDING_ITEM,
    ObservationFields,
    PackedBatch,
    action_fields,
    pack,
    prefix_pair,
)
from ludic.training.vocabulary import require_known_ids, vocabulary_of
from ludic.types import ConfigError, SAWItem
from ludic_gpu.context_parallel import ContextParallel, require_same_in_slices
from ludic_gpu.experts import RouterPass, Routers
from ludic_gpu.llama.graphs import MAX_LAYER_WEIGHTS
from ludic_gpu.llama.training import fused_decoder
from ludic_gpu.memory.offload import ActivationOffload, HostTape
from ludic.models.kinds import recurrent_layers
from ludic_gpu.recurrent.packed import HybridSequences
from ludic_gpu.vision.inputs import Pictures, VisionDecoder

logger = logging.getLogger(__name__)
ANOTHER_TOKENIZER = (
    "The sample is of another tokenizer: train the model that made it, or render its texts again "
    "(make_chat_template_step_to_item, examples/sft.py)."
)


class Outputs(NamedTuple):
    """What one forward pass says of a micro-batch."""

    hidden_AD: Tensor | None
    """The hidden states that predict the action tokens; None if the model only returns logits."""
    logps_A: Tensor
    entropy_A: Tensor | None
    observed_O: Tensor | None = None
    """Log-probs of observation tokens, at temperature 1."""


class TrainedPolicy:
    """One model, packed or padded. A module that only returns logits (no transformers decoder) is padded."""

    def __init__(
        self,
        model: Any,
        *,
        packed: bool = True,
        share_prefixes: bool = False,
        mixed_precision_dtype: str | None = "bf16",
        fused: bool = True,
        offload: bool = False,
        images: Any = None,
        replay_experts: bool = False,
        context: ContextParallel | None = None,
    ) -> None:
        """`fused`: the Llama family in half precision on a GPU runs through `ludic_gpu.llama`, not its own modules.
        `offload`: what the decoder saves for backward waits in host memory. `images`: the image processor of a vision-language
        model, whose samples are padded.
        `replay_experts`: passes inside `routed` send tokens to the experts that their samples recorded. `context`: the ranks that
        share each row with this one."""
        self.model = model
        self._vision = _vision_of(model, images)
        if context is not None and replay_experts:
            raise ConfigError(
                "replay_experts does not work with context_parallel, where ranks share a row. Leave one out."
            )
        self.routers = Routers(model) if replay_experts else None if context is not None else Routers.of(model)
        """Of a mixture of experts; None for other models, and if ranks share rows."""
        self._replays = replay_experts
        self.packed = packed and self._vision is None and is_decoder(model) and _can_pack(model)
        self._is_hybrid = self.packed and bool(recurrent_layers(model))
        self._head = _head_of(model)
        first = next(model.parameters())
        self.device: torch.device = compute_device(model)
        can_share = share_prefixes and self.packed and context is None
        self.share_prefixes = can_share and _gains_by_sharing(model, self.device)
        """Compute the tokens that samples begin with in common once."""
        is_converted = is_sharded(model)  # FSDP gathers weights in the precision that they are used in
        is_autocast = mixed_precision_dtype == "bf16" and first.is_cuda and first.dtype is torch.float32
        self._autocast_dtype = torch.bfloat16 if is_autocast and not is_converted else None
        is_fused = fused and self.packed and not is_converted
        self._fused = fused_decoder(model) if is_fused else None
        self._offload = ActivationOffload(self.device) if offload else None
        self._context = context
        if context is not None:
            with self._precision():
                require_same_in_slices(model, context, self.device, self._why_whole())

    def _why_whole(self) -> str:
        """Why ranks cannot share the rows of this model; empty if they can."""
        if not self.packed:
            return "its samples are padded"
        return (
            "it has recurrent layers"
            if self._is_hybrid
            else ""
            if self.routers is None
            else "it is a mixture of experts"
        )

    @property
    def is_fused(self) -> bool:
        """Whether packed batches run through the fused pass; compiled layers would not be called."""
        return self._fused is not None

    @property
    def head(self) -> Head:
        if self._head is None:
            raise ConfigError(
                f"{type(self.model).__name__} only returns logits; a critic on the policy and a KL over the vocabulary need the "
                "hidden states and the output layer of a transformers decoder."
            )
        return self._head

    def batch(self, items: Sequence[SAWItem], pad_token_id: int = 0, *, padded: bool = False) -> PackedBatch:
        """One micro-batch in the form this policy computes, or padded."""
        if self._vision is None and any(item.attachments.images for item in items):
            raise ConfigError(f"A sample holds pictures, but {type(self.model).__name__} takes text only.")
        self.check_ids(items)
        if padded or not self.packed:
            return _padded(items, pad_token_id, self.device)
        return pack(items, self.device, share_prefixes=self.share_prefixes)

    def check_ids(self, items: Sequence[SAWItem]) -> None:
        """ConfigError for a token that the model does not have."""
        require_known_ids(items, vocabulary_of(self.model), ConfigError, ANOTHER_TOKENIZER)

    @contextlib.contextmanager
    def routed(self, batch: PackedBatch) -> Iterator[RouterPass | None]:
        """Watch the routers of a mixture in passes over this batch, and replay the experts of its samples if the policy does. The
        backward pass belongs inside, too. None for other models."""
        if self.routers is None:
            yield None
            return
        experts_TLK = batch.experts_TLK() if self._replays else None
        if self._replays and experts_TLK is None and batch.items[0] is not PADDING_ITEM:
            raise ConfigError(
                "replay_experts=True, but no sample says which experts its tokens went to. Sample with "
                "LocalEngine(record_experts=True), or leave replay_experts out."
            )
        with self.routers.watched(experts_TLK) as now:
            yield now

    def own_routing(self) -> contextlib.AbstractContextManager[None]:
        """Inside it, a mixture chooses its experts itself and nothing is recorded, even within `routed`."""
        return contextlib.nullcontext() if self.routers is None else self.routers.unwatched()

    def logps(self, batch: PackedBatch, *, entropy: EntropyMode | None = None) -> tuple[Tensor, Tensor | None]:
        """[A] log-probs of the action tokens under the distributions they were drawn from, and entropies if asked for."""
        found = self.outputs(batch, entropy=entropy)
        return found.logps_A, found.entropy_A

    def outputs(
        self,
        batch: PackedBatch,
        *,
        entropy: EntropyMode | None = None,
        observations: ObservationFields | None = None,
    ) -> Outputs:
        """The same with the hidden states that predict the action tokens, and log-probs of observation tokens if they are given."""

        def work() -> Outputs:
            if self._context is not None and not batch.is_padded:
                return self._sliced_outputs(self._context, batch, entropy, observations)
            if self._head is None and batch.is_padded:
                return self.outputs_of(self._whole_logits(batch), batch, entropy=entropy, observations=observations)
            if self._head is None:
                return self._from_packed_logits(batch, entropy, observations)
            actions = batch.actions
            with self._precision():
                hidden_TD = self._hidden(batch)
                hidden_AD = hidden_TD.index_select(0, actions.predictor_A)
                logps_A, entropy_A = chosen_logps(
                    hidden_AD,
                    self.head,
                    actions.target_A,
                    actions.inverse_temperature_A,
                    entropy=entropy,
                    candidates=actions.candidates,
                )
                if observations is None:
                    return Outputs(hidden_AD, logps_A, entropy_A)
                hidden_OD = hidden_TD.index_select(0, observations.predictor_O)
                observed_O = chosen_logps(hidden_OD, self.head, observations.target_O)[0]
                return Outputs(hidden_AD, logps_A, entropy_A, observed_O)

        return compute(self.model, work)

    def _sliced_outputs(
        self,
        context: ContextParallel,
        batch: PackedBatch,
        entropy: EntropyMode | None,
        observations: ObservationFields | None,
    ) -> Outputs:
        """`outputs` where ranks share the row: each computes the log-probs that its own tokens predict."""
        part, actions = context.cut(batch.lengths, self.device), batch.actions
        with self._precision():
            ids_N, positions_N = part.of(batch.ids_T), part.of(batch.positions_T)
            with self._saving(len(ids_N)):
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

    def whole_logits(self, batch: PackedBatch) -> Tensor:
        """[B, L, V] of a padded micro-batch."""
        return compute(self.model, lambda: self._whole_logits(batch))

    def outputs_of(
        self,
        logits_BLV: Tensor,
        batch: PackedBatch,
        *,
        entropy: EntropyMode | None = None,
        observations: ObservationFields | None = None,
    ) -> Outputs:
        """`outputs` from the whole logits of a padded micro-batch, without hidden states."""
        logits_TV = logits_BLV.flatten(0, 1)
        logits_AV = logits_TV.index_select(0, batch.actions.predictor_A)
        logits_OV = None if observations is None else logits_TV.index_select(0, observations.predictor_O)
        return self._outputs_of_chosen(logits_AV, logits_OV, batch, entropy, observations)

    def _from_packed_logits(
        self, batch: PackedBatch, entropy: EntropyMode | None, observations: ObservationFields | None
    ) -> Outputs:
        """For a model that does more to its hidden states than an output layer: its own logits, of the chosen positions alone."""
        wanted = [batch.actions.predictor_A, *([] if observations is None else [observations.predictor_O])]
        with self._precision():
            logits_NV = self.model(
                input_ids=batch.ids_T[None],
                position_ids=batch.positions_T[None],
                attention_mask=SKIP_MASK.to(self.device),
                use_cache=False,
                ludic_state=self._state(batch),
                logits_to_keep=torch.cat(wanted),
            ).logits[0]
        logits_AV, *rest = logits_NV.split([len(part) for part in wanted])
        return self._outputs_of_chosen(logits_AV, rest[0] if rest else None, batch, entropy, observations)

    def _outputs_of_chosen(
        self,
        logits_AV: Tensor,
        logits_OV: Tensor | None,
        batch: PackedBatch,
        entropy: EntropyMode | None,
        observations: ObservationFields | None,
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

    def _whole_logits(self, batch: PackedBatch) -> Tensor:
        with self._precision():
            if self._vision is None:
                return whole_logits(self.model, *self._rows(batch))
            return self.head.logits(self._hidden(batch)).view(len(batch.lengths), -1, self.head.shape[0])

    def hidden(self, batch: PackedBatch) -> Tensor:
        """[T, D] the hidden states of all tokens, padding included."""

        def work() -> Tensor:
            with self._precision():
                return self._hidden(batch)

        return compute(self.model, work)

    def action_hidden(self, batch: PackedBatch) -> Tensor:
        """[A, D] the hidden states alone."""
        assert self._head is not None, "callers that read hidden states have asked for the head"
        return compute(self.model, lambda: self._action_hidden(batch))

    def kl_to(self, teacher: "TrainedPolicy", hidden_AD: Tensor, batch: PackedBatch, how: VocabularyKL) -> Tensor:
        """[A] KL to a frozen teacher at the action tokens, whose hidden states under this policy are `hidden_AD`."""
        with torch.no_grad():
            teacher_AE = teacher.action_hidden(batch)
        with self._precision():
            return vocabulary_kl(
                hidden_AD, self.head, teacher_AE, teacher.head, batch.actions.inverse_temperature_A, how
            )

    def _action_hidden(self, batch: PackedBatch) -> Tensor:
        with self._precision():
            return self._hidden(batch).index_select(0, batch.actions.predictor_A)

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """Flat hidden states of all tokens, padding included."""
        num_tokens = len(batch.ids_T)
        if not batch.is_padded and self._fused is not None and self._fused.is_current:
            tree = batch.tree
            state = PackedSequences(batch.lengths, self.device) if tree is None else TreeSequences(tree, self.device)
            return self._fused.hidden(batch.ids_T, batch.positions_T, state, self._host_tape(num_tokens))
        with self._saving(num_tokens, num_tokens // len(batch.lengths)):
            return self._decoded(batch)

    def _host_tape(self, *num_tokens: int) -> HostTape | None:
        return self._offload.tape(*num_tokens) if self._offload is not None and torch.is_grad_enabled() else None

    def _saving(self, *num_tokens: int) -> contextlib.AbstractContextManager[Any]:
        """What the modules save for backward goes to the host, if it is offloaded."""
        host = self._host_tape(*num_tokens)
        return contextlib.nullcontext() if host is None else host.saving()

    def _decoded(self, batch: PackedBatch) -> Tensor:
        if not batch.is_padded:
            return hidden_states(self.model, batch.ids_T, batch.positions_T, self._state(batch))
        ids_BL, mask_BL = self._rows(batch)
        if self._vision is not None:
            images_B = [item.attachments.images for item in batch.items]
            return self._vision.hidden(ids_BL, mask_BL, images_B).flatten(0, 1)
        out: Tensor = decoder_of(self.model)(
            input_ids=ids_BL, attention_mask=mask_BL, use_cache=False
        ).last_hidden_state
        return out.flatten(0, 1)

    def _state(self, batch: PackedBatch) -> Any:
        """Attention, and the recurrent layers, of a packed micro-batch."""
        tree, lengths = batch.tree, batch.lengths
        state = PackedSequences(lengths, self.device) if tree is None else TreeSequences(tree, self.device)
        return HybridSequences(state, batch.paths, self.device) if self._is_hybrid else state

    def _rows(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Ids and attention mask [B, L] of a padded micro-batch."""
        assert batch.is_padded, "a packed batch has no rows"
        ids_BL = batch.ids_T.view(len(batch.lengths), -1)
        lengths = torch.tensor(batch.lengths, device=self.device)
        mask_BL = torch.arange(ids_BL.shape[1], device=self.device)[None] < lengths[:, None]
        return ids_BL, mask_BL.long()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)


def check_shared_prefixes(policy: TrainedPolicy, items: Sequence[SAWItem], tolerance: float, ranks: Ranks) -> bool:
    """Compare two samples with a common prefix, computed together and separately; turn sharing off if log-probs differ.

    False if no rank has two such samples yet.

    Every rank takes part, since a sharded model needs all of them in a forward pass.
    """
    policy.check_ids(items)
    pair = prefix_pair(items) if policy.share_prefixes else None
    if not ranks.max(float(pair is not None)):
        return False
    pair = pair or [PADDING_ITEM]
    was_training = policy.model.training
    policy.model.eval()  # without dropout
    try:
        with torch.no_grad():
            together, separately = (
                policy.logps(pack(pair, policy.device, share_prefixes=shares))[0].float() for shares in (True, False)
            )
    finally:
        policy.model.train(was_training)
    difference = ranks.max((together - separately).abs().mean().item())
    is_exact = policy.device.type == "cpu"  # a GPU computes in half precision, where both ways round differently
    if not difference <= (min(tolerance, 1e-3) if is_exact else tolerance):
        policy.share_prefixes = False
        logger.warning(
            "%s gives other log-probs when samples share their prefix (by %.2g nats per token); every sample is computed in full, "
            "which is slower. share_prefixes=False says so from the start.",
            type(policy.model).__name__,
            difference,
        )
    return True


def _gains_by_sharing(model: Any, device: torch.device) -> bool:
    """On a GPU, tokens that are not computed save nothing while launching kernels takes longer than computing: small models."""
    layers = decoder_layers(model)
    return device.type == "cpu" or (
        len(layers) > 0 and sum(p.numel() for p in layers[0].parameters()) > MAX_LAYER_WEIGHTS
    )


def _can_pack(model: Any) -> bool:
    try:
        with torch.no_grad():
            compute(model, lambda: route_attention(plain_model(model)))
    except NotRoutable as error:
        name = type(plain_model(model)).__name__
        say_once(f"{name} is trained on padded samples instead of packed ones, which is slower: {error.reason}.")
        return False
    return True


def _vision_of(model: Any, images: Any) -> VisionDecoder | None:
    inner = plain_model(model)
    return VisionDecoder(inner, None if images is None else Pictures(images)) if is_vision_model(inner) else None


def _head_of(model: Any) -> Head | None:
    """None: log-probs are taken from the model's own logits, which are held whole."""
    try:
        return find_head(model) if is_decoder(model) else None
    except ConfigError as error:
        say_once(f"Log-probs are taken from whole logits, which takes more memory: {error}")
        return None


def _padded(items: Sequence[SAWItem], pad_token_id: int, device: torch.device) -> PackedBatch:
    """The same fields with every sample as long as the longest; `lengths` are without padding."""
    lengths = [len(item.input_ids) for item in items]
    longest = max(lengths)
    ids_BL = np.full((len(items), longest), pad_token_id, dtype=np.int64)
    for row, item in enumerate(items):
        ids_BL[row, : lengths[row]] = item.input_ids
    paths = list(np.arange(ids_BL.size).reshape(ids_BL.shape))
    return PackedBatch(
        ids_T=torch.from_numpy(ids_BL.reshape(-1)).to(device),
        positions_T=torch.from_numpy(np.tile(np.arange(longest), len(items))).to(device),
        lengths=lengths,
        actions=action_fields(items, paths, device),
        items=list(items),
        paths=paths,
        is_padded=True,
    )
