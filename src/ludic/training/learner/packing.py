"""Micro-batches of samples within a token budget, as tensors: packed end to end, or padded.

Packing wastes nothing: the budget counts real tokens. The padded form is for losses on whole logits and for models that cannot
pack. Both have the same fields of every action token (`ActionFields`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from ludic.models.head import CandidateMask
from ludic.models.packed_attention import to_device
from ludic.models.prefix_tree import TokenTree, first_fit, prefix_groups, prefix_order, shared_lengths
from ludic.training.config import LengthPolicy
from ludic.types import CandidateSets, ConfigError, SAWItem
from ludic.types.columns import COLUMNS


@dataclass(frozen=True, slots=True)
class _Fitted:
    """The samples that can be trained on, and how many were cut or dropped."""

    items: list[SAWItem]
    num_truncated: int = 0
    num_dropped: int = 0


def fit_length(items: Sequence[SAWItem], max_seq_len: int, policy: LengthPolicy = "raise") -> _Fitted:
    """Raise, truncate or drop samples longer than `max_seq_len`. A truncated sample is kept if any action token is left."""
    if policy not in get_args(LengthPolicy):
        raise ConfigError(f"too_long={policy!r}; there are {', '.join(get_args(LengthPolicy))}.")
    kept: list[SAWItem] = []
    num_truncated = num_dropped = 0
    for item in map(without_padding, items):
        if len(item.input_ids) <= max_seq_len:
            kept.append(item)
            continue
        if policy == "raise":
            raise ConfigError(
                f"A sample has {len(item.input_ids)} tokens, more than max_seq_len={max_seq_len} (rollout "
                f"{item.origin.rollout_id}). Raise max_seq_len and micro_token_budget, shorten episodes, or set "
                "too_long='truncate' or 'drop'."
            )
        cut = truncated(item, max_seq_len) if policy == "truncate" else None
        if cut is None or not cut.num_action_tokens:
            num_dropped += 1
        else:
            num_truncated += 1
            kept.append(cut)
    return _Fitted(kept, num_truncated, num_dropped)


def without_padding(item: SAWItem) -> SAWItem:
    """A padded sample, with only the tokens that count."""
    counts = item.attention_mask
    if counts is None or counts.all():
        return item
    if (item.action_mask & ~counts).any():
        raise ConfigError(f"A sample masks out action tokens by its attention mask (rollout {item.origin.rollout_id}).")
    return item.only(counts)


def truncated(item: SAWItem, length: int) -> SAWItem:
    """The first `length` tokens of a sample, with their attachments; fewer where a picture would be cut."""
    length = next((s.start for s in item.attachments.images if s.start < length < s.end), length)
    return item.only(np.arange(len(item.input_ids)) < length).with_origin(seq_len_truncated=True)


# --- which samples go together ---


PADDING_ITEM = SAWItem(np.zeros(2, dtype=np.int32), None, np.array([False, True]), 0.0)
"""The sample of a rank without samples while others still have some: as short as possible, and multiplied by zero."""


def balanced_shares(items: Sequence[SAWItem], num_shares: int, *, share_prefixes: bool = False) -> list[list[SAWItem]]:
    """Every sample in one share, and about equally many tokens in each: the longest first, always to the smallest share.

    With `share_prefixes`, samples with a common prefix go together, unless they are more than a share.
    """
    shares: list[list[SAWItem]] = [[] for _ in range(num_shares)]
    num_tokens = [0] * num_shares
    fair = sum(len(item.input_ids) for item in items) // num_shares
    for members, size in _largest_first(items, fair if share_prefixes else 0):
        smallest = num_tokens.index(min(num_tokens))
        shares[smallest] += members
        num_tokens[smallest] += size
    return shares


def split_packed(
    items: Sequence[SAWItem], micro_token_budget: int, *, share_prefixes: bool = False
) -> list[list[SAWItem]]:
    """Bins of at most `micro_token_budget` tokens: first fit, longest first; within a bin longest first.

    With `share_prefixes`, samples with a common prefix stay together and its tokens count once.
    """
    longest = max((sum(len(item.input_ids) for item in members) for members in comparisons(items)), default=0)
    if longest > micro_token_budget:
        raise ConfigError(
            f"A sample, or a comparison of samples, has {longest} tokens, more than micro_token_budget={micro_token_budget}. Raise "
            "the budget, or cut samples with fit_length first."
        )
    return first_fit(_largest_first(items, micro_token_budget if share_prefixes else 0), micro_token_budget)


def _largest_first(items: Sequence[SAWItem], max_shared: int) -> list[tuple[list[SAWItem], int]]:
    """Samples that stay together, with their number of different tokens: at most `max_shared`, or one sample; or a comparison."""
    if not max_shared or any(item.origin.comparison is not None for item in items):
        found = [(members, sum(len(item.input_ids) for item in members)) for members in comparisons(items)]
    else:
        groups = prefix_groups(token_keys(items), max_shared)
        found = [([items[i] for i in members], size) for members, size in groups]
    return sorted(found, key=lambda run: -run[1])


def token_keys(items: Sequence[SAWItem]) -> list[np.ndarray]:
    """One array per sample, equal where samples share a prefix: token ids, or numbers of (token, its experts) where experts were
    recorded, because a shared token goes to one set of experts."""
    if all(item.attachments.experts is None for item in items):
        return [item.input_ids for item in items]
    numbers: dict[tuple[int, bytes], int] = {}
    found = []
    for item in items:
        experts = item.attachments.experts
        rows = [b""] * len(item.input_ids) if experts is None else [row.tobytes() for row in experts]
        keys = zip(item.input_ids.tolist(), rows, strict=True)
        found.append(np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64))
    return found


def comparisons(items: Sequence[SAWItem]) -> list[list[SAWItem]]:
    """The samples of each comparison, in order; a sample that names none is alone."""
    found: dict[str | int, list[SAWItem]] = {}
    for index, item in enumerate(items):
        found.setdefault(index if item.origin.comparison is None else item.origin.comparison, []).append(item)
    return list(found.values())


def prefix_pair(items: Sequence[SAWItem]) -> list[SAWItem] | None:
    """Two samples with a common prefix; None if there are none."""
    ids = token_keys(items)
    order = prefix_order(ids)
    shared = shared_lengths([ids[i] for i in order])
    return next(([items[order[n - 1]], items[order[n]]] for n in range(1, len(order)) if shared[n]), None)


def split_items_by_token_budget(
    items: Sequence[SAWItem], *, micro_token_budget: int, max_seq_len: int
) -> list[list[SAWItem]]:
    """For the padded form: sorted by length, filled while longest × count fits the budget."""
    if not 0 < max_seq_len <= micro_token_budget:
        raise ConfigError(
            f"micro_token_budget={micro_token_budget} and max_seq_len={max_seq_len}: both must be above 0, and the longest sample "
            "must fit a micro-batch."
        )
    fitted = fit_length(items, max_seq_len, "truncate").items
    bins: list[list[SAWItem]] = []
    for longest, members in sorted(
        ((max(len(item.input_ids) for item in members), members) for members in comparisons(fitted)),
        key=lambda found: found[0],
    ):
        if len(members) * longest > micro_token_budget:
            raise ConfigError(
                f"A comparison of {len(members)} samples of up to {longest} tokens is larger than "
                f"micro_token_budget={micro_token_budget}. Raise the budget."
            )
        if bins and (len(bins[-1]) + len(members)) * longest <= micro_token_budget:
            bins[-1] += members
        else:
            bins.append(list(members))
    return bins


# --- tensors ---


# Letters: A action tokens of all samples, T flat tokens, B samples, L longest sample.
@dataclass(frozen=True, slots=True)
class ActionFields:
    """The facts of every action token that are known before the forward pass."""

    predictor_A: Tensor
    """Flat position of the token before it, whose hidden state predicts it."""
    target_A: Tensor
    item_A: Tensor
    """Index of its sample in the micro-batch."""
    weight_A: Tensor
    inverse_temperature_A: Tensor
    num_items: int
    candidates: CandidateMask | None = None
    """The candidates of each token, if a sampler excluded tokens."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The packed columns (`Column.is_packed`) that the samples have, one entry per token."""
    objectives: tuple[str | None, ...] = ()
    """Objective of each sample; empty if no sample names one."""
    episodes: tuple[str | None, ...] = ()
    """Episode of each sample."""
    comparisons: tuple[str | None, ...] = ()
    """Comparison of each sample; empty if no sample names one."""
    without_old_logps: tuple[int, ...] = ()
    """Samples whose old_logp_A is not known, if those of others are."""

    @property
    def num_tokens(self) -> int:
        return self.target_A.shape[0]

    @property
    def old_logp_A(self) -> Tensor | None:
        """Log-probs under the policy that sampled the tokens."""
        return self.columns.get("actor_logps")


@dataclass(frozen=True, slots=True)
class ObservationFields:
    """The same of every observation token (`SAWItem.observation_mask`); O of them."""

    predictor_O: Tensor
    target_O: Tensor
    item_O: Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Samples end to end; padded, each with the length of the longest."""

    ids_T: Tensor
    positions_T: Tensor
    lengths: list[int]
    actions: ActionFields
    items: list[SAWItem]
    paths: Sequence[np.ndarray]
    """Places of each sample's tokens in `ids_T`."""
    is_padded: bool = False
    tree: TokenTree | None = None
    """If samples share prefixes: `ids_T` and `positions_T` are its tokens, each once."""

    def tokens_T(self) -> Tensor:
        """Number of samples that each flat token belongs to: 0 for padding, several in a tree."""
        counts = np.zeros(len(self.ids_T), dtype=np.int64)
        for path, length in zip(self.paths, self.lengths, strict=True):
            counts[path[:length]] += 1
        return to_device(counts, self.ids_T.device)

    def column_T(self, name: str) -> Tensor | None:
        """A column of all tokens over the flat tokens; None if no sample has it."""
        column = next(column for column in COLUMNS if column.name == name)
        given = [getattr(item.attachments, name) for item in self.items]
        shapes = {own.shape[1:] for own in given if own is not None}
        if not shapes:
            return None
        if len(shapes) > 1:
            raise ConfigError(
                f"Samples of one batch have {name} of the shapes {sorted(map(list, shapes))} per token: they were recorded by "
                "different models."
            )
        found = np.full(
            (len(self.ids_T), *shapes.pop()),
            column.missing,
            dtype=np.int64 if column.dtype == np.int16 else column.dtype,
        )
        for path, own in zip(self.paths, given, strict=True):
            if own is not None:
                found[path[: len(own)]] = own
        return to_device(found, self.ids_T.device)

    @property
    def num_computed(self) -> int:
        """Tokens of the forward pass, padding left out."""
        return sum(self.lengths) if self.tree is None else self.tree.num_tokens

    def observations(self) -> ObservationFields:
        """The observation tokens of its samples, for losses that ask for them."""
        own = [np.flatnonzero(item.observation_mask) for item in self.items]
        where = np.concatenate([path[at - 1] for path, at in zip(self.paths, own, strict=True)])
        targets = np.concatenate([item.input_ids[at] for item, at in zip(self.items, own, strict=True)])
        device = self.ids_T.device
        return ObservationFields(
            predictor_O=to_device(where.astype(np.int64), device),
            target_O=to_device(targets.astype(np.int64), device),
            item_O=to_device(np.repeat(np.arange(len(own)), [len(at) for at in own]), device),
        )


def pack(items: Sequence[SAWItem], device: torch.device | str, *, share_prefixes: bool = False) -> PackedBatch:
    """One micro-batch without padding; with `share_prefixes`, tokens that samples have in common once."""
    device = torch.device(device)
    lengths = [len(item.input_ids) for item in items]
    tree = TokenTree.of(token_keys(items)) if share_prefixes else None
    if tree is not None and tree.num_tokens < sum(lengths):
        ids_T = np.empty(tree.num_tokens, dtype=np.int64)
        for item, path in zip(items, tree.paths, strict=True):
            ids_T[path] = item.input_ids
        tree = replace(tree, ids_T=ids_T)
        return PackedBatch(
            ids_T=to_device(tree.ids_T, device),
            positions_T=to_device(tree.positions_T, device),
            lengths=lengths,
            actions=action_fields(items, tree.paths, device),
            items=list(items),
            paths=tree.paths,
            tree=tree,
        )
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    paths = [np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]
    return PackedBatch(
        ids_T=to_device(np.concatenate([item.input_ids for item in items]).astype(np.int64), device),
        positions_T=to_device(np.concatenate([np.arange(n) for n in lengths]), device),
        lengths=lengths,
        actions=action_fields(items, paths, device),
        items=list(items),
        paths=paths,
    )


def action_fields(items: Sequence[SAWItem], paths: Sequence[np.ndarray], device: torch.device) -> ActionFields:
    """The action tokens of samples whose tokens are at these flat positions."""
    where, targets = [], []
    for item, path in zip(items, paths, strict=True):
        _check_prompt(item)
        own = np.flatnonzero(item.action_mask)
        where.append(path[own - 1])
        targets.append(item.input_ids[own])
    counts = [len(w) for w in where]
    temperatures = [item.attachments.temperature or 1.0 for item in items]
    return ActionFields(
        predictor_A=to_device(np.concatenate(where).astype(np.int64), device),
        target_A=to_device(np.concatenate(targets).astype(np.int64), device),
        item_A=to_device(np.repeat(np.arange(len(items)), counts), device),
        weight_A=to_device(np.concatenate([item.token_weights for item in items]).astype(np.float32), device),
        inverse_temperature_A=to_device((1 / np.repeat(temperatures, counts)).astype(np.float32), device),
        num_items=len(items),
        candidates=_candidates(items, device),
        columns=_packed_columns(items, device),
        objectives=_named([item.origin.objective for item in items]),
        comparisons=_named([item.origin.comparison for item in items]),
        episodes=tuple(map(episode_of, items)),
        without_old_logps=_without_logps(items),
    )


def _packed_columns(items: Sequence[SAWItem], device: torch.device) -> dict[str, Tensor]:
    for name in {item.origin.objective for item in items}:
        _check_all_or_none([item for item in items if item.origin.objective == name])
    found = {}
    for column in (column for column in COLUMNS if column.is_packed):
        given = [getattr(item.attachments, column.name) for item in items]
        num_missing = sum(value is None for value in given)
        if num_missing == len(given) or (num_missing and column.missing is None):
            continue
        arrays = [
            np.full(item.num_action_tokens, column.missing, column.dtype) if value is None else column.array(value)
            for item, value in zip(items, given, strict=True)
        ]
        found[column.name] = to_device(np.concatenate(arrays), device)
    return found


def _candidates(items: Sequence[SAWItem], device: torch.device) -> CandidateMask | None:
    given = [item.attachments.candidates for item in items]
    if all(one is None for one in given):
        return None
    whole = CandidateSets.joined(
        item.num_action_tokens if one is None else one for item, one in zip(items, given, strict=True)
    )
    rows_S = np.repeat(np.arange(len(whole)), whole.lengths)
    return CandidateMask(
        to_device(whole.ids.astype(np.int64), device), to_device(rows_S, device), (0, *whole.ends.tolist())
    )


def _check_prompt(item: SAWItem) -> None:
    if len(item.action_mask) and item.action_mask[0]:
        raise ConfigError(
            f"The first token of a sample is an action, but no token before it predicts it (rollout {item.origin.rollout_id}). A "
            "prompt needs at least one token."
        )


def episode_of(item: SAWItem) -> str | None:
    """The episode that a sample is a part of; None if it is one by itself."""
    origin = item.origin
    return origin.rollout_id if origin.episode is None else origin.episode


def _named(names: Sequence[str | None]) -> tuple[str | None, ...]:
    return tuple(names) if any(name is not None for name in names) else ()


def _without_logps(items: Sequence[SAWItem]) -> tuple[int, ...]:
    """Samples without actor log-probs, if others have them."""
    missing = tuple(i for i, item in enumerate(items) if item.actor_logps is None)
    return missing if len(missing) < len(items) else ()


def _check_all_or_none(items: Sequence[SAWItem]) -> None:
    missing = _without_logps(items)
    if missing:
        raise ValueError(f"Samples {list(missing[:5])} have no actor log-probs, but others of the same batch do.")


# --- the seeds' padded form ---


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one padded micro-batch."""

    tensors: dict[str, Tensor]
    num_items: int


def collate_saw_items(
    items: Sequence[SAWItem], *, pad_token_id: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """[B, L] tensors padded at the right, and one weight per sample."""
    _check_whole_vocabulary(items)
    if not items:
        raise ValueError("There is nothing to collate: the list of items is empty.")
    longest = max(len(item.input_ids) for item in items)
    shape = len(items), longest
    ids, attention = np.full(shape, pad_token_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    mask, weights = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    logps = np.zeros(shape, dtype=np.float32)
    _check_all_or_none(items)
    for row, item in enumerate(items):
        _check_prompt(item)
        length = len(item.input_ids)
        ids[row, :length] = item.input_ids
        attention[row, :length] = 1 if item.attention_mask is None else item.attention_mask
        mask[row, :length] = item.action_mask
        weights[row, :length][item.action_mask] = item.token_weights
        if item.actor_logps is not None:
            logps[row, :length][item.action_mask] = item.actor_logps
    numbers: dict[str | int, int] = {}
    arrays: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": attention,
        "action_mask": mask,
        "weight": np.array([item.weight for item in items], dtype=np.float32),
        "token_weight": weights,
        "episode": np.array(
            [numbers.setdefault(episode_of(item) or row, len(numbers)) for row, item in enumerate(items)]
        ),
        "inverse_temperature": np.array(
            [1 / (item.attachments.temperature or 1.0) for item in items], dtype=np.float32
        ),
    }
    if items[0].actor_logps is not None:
        arrays |= {"actor_logps": logps, "old_logp_action": logps.sum(axis=1)}
    device = torch.device(device)
    return {name: to_device(array, device) for name, array in arrays.items()}


def _check_whole_vocabulary(items: Sequence[SAWItem]) -> None:
    cut = next((item for item in items if item.attachments.candidates is not None), None)
    if cut is not None:
        raise ConfigError(
            f"A sample (rollout {cut.origin.rollout_id}) was drawn from a part of the vocabulary (top_p, top_k or min_p), "
            "which padded batches of whole logits do not support. Train with Trainer, or sample without truncation."
        )


def collate_micro_batches(
    items: Sequence[SAWItem],
    *,
    pad_token_id: int,
    device: torch.device | str,
    micro_token_budget: int,
    max_seq_len: int,
) -> list[MicroBatch]:
    """Split and collate."""
    bins = split_items_by_token_budget(items, micro_token_budget=micro_token_budget, max_seq_len=max_seq_len)
    return [MicroBatch(collate_saw_items(b, pad_token_id=pad_token_id, device=device), len(b)) for b in bins]
