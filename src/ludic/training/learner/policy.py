"""The model as the trainer sees it: a micro-batch in, log-probs of its action tokens out."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.distributed.fsdp import compute_device, is_sharded
from ludic.distributed.ranks import Ranks
from ludic.models.execution import MAX_LAUNCHED_WEIGHTS, decoder_layers
from ludic.models.head import EntropyMode, Head, plain_model
from ludic.models.kinds import part, part_if_installed, router_modules
from ludic.models.passes import ForwardPass, Outputs, PassNeeds, choose
from ludic.models.teacher_kl import VocabularyKL, vocabulary_kl
from ludic.training.learner.packing import (
    PADDING_ITEM,
    ObservationFields,
    PackedBatch,
    action_fields,
    pack,
    prefix_pair,
)
from ludic.types import ConfigError, LudicError, SAWItem


def vocabulary_of(model: Any) -> int | None:
    """The number of tokens that have an embedding and a logit; None if the model does not say."""
    inner = plain_model(model)
    if not hasattr(inner, "get_input_embeddings"):
        return None
    # A model that is not from transformers may have the first method only.
    tables = (inner.get_input_embeddings(), getattr(inner, "get_output_embeddings", lambda: None)())
    sizes = [getattr(table, name, None) for table, name in zip(tables, ("num_embeddings", "out_features"), strict=True)]
    return min((size for size in sizes if size is not None), default=None)


def require_known_ids(items: Iterable[SAWItem], num_tokens: int | None, error: type[LudicError], advice: str) -> None:
    """Raise `error` for a token, or a candidate of one, that a model of `num_tokens` tokens does not have."""
    for item in items:
        candidates = item.attachments.candidates
        arrays = [item.input_ids] if candidates is None else [item.input_ids, candidates.ids]
        largest = max(int(ids.max(initial=0)) for ids in arrays)
        if num_tokens is not None and largest >= num_tokens:
            what = "a token" if candidates is None else "a token, or a candidate of one,"
            raise error(f"A sample has {what} with the id {largest}; the model has {num_tokens} tokens. {advice}")


logger = logging.getLogger(__name__)
ANOTHER_TOKENIZER = (
    "The sample is of another tokenizer: train the model that made it, or render its texts again "
    "(make_chat_template_step_to_item, examples/sft.py)."
)


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
        context: Any = None,
    ) -> None:
        """`fused`: a plug-in's hand-written pass may take the place of the model's modules. `offload`: what the decoder saves for
        backward waits in host memory. `images`: the image processor of a vision-language model, whose samples are padded.
        `replay_experts`: passes inside `routed` send tokens to the experts that their samples recorded. `context`: the ranks that
        share each row with this one."""
        self.model = model
        if context is not None and replay_experts:
            raise ConfigError(
                "replay_experts does not work with context_parallel, where ranks share a row. Leave one out."
            )
        self.routers: Any = None if context is not None else _routers_of(model, is_needed=replay_experts)
        """The routers of a mixture of experts; None for other models, and if ranks share rows."""
        self._replays = replay_experts
        self.device: torch.device = compute_device(model)
        is_converted = is_sharded(model)  # FSDP gathers weights in the precision that they are used in
        first = next(model.parameters())
        is_autocast = mixed_precision_dtype == "bf16" and first.is_cuda and first.dtype is torch.float32
        needs = PassNeeds(
            device=self.device,
            packed=packed,
            fused=fused and not is_converted,
            autocast_dtype=torch.bfloat16 if is_autocast and not is_converted else None,
            offload=offload,
            images=images,
            context=context,
        )
        self.forward_pass: ForwardPass = choose(model, needs)
        can_share = share_prefixes and self.packed and context is None
        self.share_prefixes = can_share and _gains_by_sharing(model, self.device)
        """Compute the tokens that samples begin with in common once."""

    @property
    def packed(self) -> bool:
        """True if micro-batches are packed."""
        return self.forward_pass.packs

    @property
    def is_fused(self) -> bool:
        """True if packed batches run through a fused pass; compiled layers would not be called."""
        return self.forward_pass.is_fused

    @property
    def head(self) -> Head:
        return self.forward_pass.head

    def batch(self, items: Sequence[SAWItem], pad_token_id: int = 0, *, padded: bool = False) -> PackedBatch:
        """One micro-batch in the form this policy computes, or padded."""
        if not self.forward_pass.takes_images and any(item.attachments.images for item in items):
            raise ConfigError(f"A sample holds pictures, but {type(self.model).__name__} takes text only.")
        self.check_ids(items)
        if padded or not self.packed:
            return _padded(items, pad_token_id, self.device)
        return pack(items, self.device, share_prefixes=self.share_prefixes)

    def check_ids(self, items: Sequence[SAWItem]) -> None:
        """ConfigError for a token that the model does not have."""
        require_known_ids(items, vocabulary_of(self.model), ConfigError, ANOTHER_TOKENIZER)

    @contextlib.contextmanager
    def routed(self, batch: PackedBatch) -> Iterator[Any]:
        """Watch the routers of a mixture in passes over this batch, and replay the experts of its samples if the policy does. The
        backward pass belongs inside as well. None for other models."""
        if self.routers is None:
            yield None
            return
        experts_TLK = batch.column_T("experts") if self._replays else None
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

    def expert_load(self, ranks: Ranks, balance: float) -> Any:
        """The load of a mixture's experts in one batch, for metrics and the load-balancing loss; None for other models."""
        return None if self.routers is None else part("experts").ExpertLoad(self, ranks, balance)

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
        return self.forward_pass.outputs(batch, entropy, observations)

    def whole_logits(self, batch: PackedBatch) -> Tensor:
        """[B, L, V] of a padded micro-batch."""
        return self.forward_pass.whole_logits(batch)

    def outputs_of(
        self,
        logits_BLV: Tensor,
        batch: PackedBatch,
        *,
        entropy: EntropyMode | None = None,
        observations: ObservationFields | None = None,
    ) -> Outputs:
        """`outputs` from the whole logits of a padded micro-batch, without hidden states."""
        return self.forward_pass.outputs_of(logits_BLV, batch, entropy, observations)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """[T, D] the hidden states of all tokens, padding included."""
        return self.forward_pass.hidden(batch)

    def action_hidden(self, batch: PackedBatch) -> Tensor:
        """[A, D] the hidden states alone."""
        assert self.forward_pass.has_head, "callers that read hidden states have asked for the head"
        return self.hidden(batch).index_select(0, batch.actions.predictor_A)

    def kl_to(self, teacher: "TrainedPolicy", hidden_AD: Tensor, batch: PackedBatch, how: VocabularyKL) -> Tensor:
        """[A] KL to a frozen teacher at the action tokens, whose hidden states under this policy are `hidden_AD`."""
        with torch.no_grad():
            teacher_AE = teacher.action_hidden(batch)
        with self.forward_pass.precision():
            return vocabulary_kl(
                hidden_AD, self.head, teacher_AE, teacher.head, batch.actions.inverse_temperature_A, how
            )


def _routers_of(model: Any, *, is_needed: bool) -> Any:
    """The watcher of the routers of a mixture. Without the plug-in a mixture is trained unwatched, unless that `is_needed`."""
    if is_needed:
        return part("experts").Routers(model)
    experts = part_if_installed("experts") if router_modules(model) else None
    return None if experts is None else experts.Routers(model)


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
        len(layers) > 0 and sum(p.numel() for p in layers[0].parameters()) > MAX_LAUNCHED_WEIGHTS
    )


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
