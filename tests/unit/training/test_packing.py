"""From samples to tensors: what is too long, which samples go together, and where each action token is."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.training.learner import packing
from ludic.training.learner.packing import (
    balanced_shares,
    collate_saw_items,
    fit_length,
    pack,
    split_items_by_token_budget,
    split_packed,
    truncated,
    without_padding,
)
from ludic.types import (
    ActorTokenLogps,
    ConfigError,
    FloatArray,
    SampleAttachments,
    SampleOrigin,
    SAWItem,
    VersionRun,
    samples,
)
from ludic.types.columns import COLUMNS, Column


def sample(mask, *, first_id=10, weight=1.0, logps=True, token_weights=None, attention=None, runs=(), temperature=None):
    """Token ids first_id, first_id + 1, …; the i-th action token has log-prob −(i + 1) / 10."""
    num_actions = sum(mask)
    attached = SampleAttachments(
        actor_logps=ActorTokenLogps([-(i + 1) / 10 for i in range(num_actions)]) if logps else None,
        token_weights=token_weights,
        temperature=temperature,
        version_runs=runs,
    )
    ids = range(first_id, first_id + len(mask))
    return SAWItem(list(ids), attention, mask, weight, {"task": 1}, attached, SampleOrigin(rollout_id=f"r{first_id}"))


def of_length(length, **facts):
    return sample([0] + [1] * (length - 1), **facts)


def lengths_of(bins):
    return [[len(item.input_ids) for item in b] for b in bins]


# --- too long -------------------------------------------------------------------------------------------------

TWO_TURNS = [0, 0, 1, 1, 0, 1, 1, 1]


def two_turns():
    """Versions: three tokens of 4, two of 5; turns credited 1 and −2."""
    return sample(TWO_TURNS, token_weights=[1, 1, -2, -2, -2], runs=[(4, 3), (5, 2)], temperature=0.7)


def test_truncation_keeps_the_attachments_of_the_remaining_tokens():
    cut = truncated(two_turns(), 7)
    assert cut.input_ids.tolist() == list(range(10, 17))
    assert cut.action_mask.tolist() == [bool(x) for x in TWO_TURNS[:7]]
    assert cut.actor_logps.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert cut.token_weights.tolist() == [1, 1, -2, -2]
    assert cut.attachments.version_runs == (VersionRun(4, 3), VersionRun(5, 1))
    assert cut.attachments.temperature == 0.7
    assert cut.meta == {"task": 1} and cut.origin == SampleOrigin(rollout_id="r10", seq_len_truncated=True)


def test_fit_length_raises_by_default():
    with pytest.raises(ConfigError, match=r"8 tokens.*max_seq_len=7.*r10.*too_long='truncate'"):
        fit_length([of_length(3), two_turns()], 7)
    assert fit_length([two_turns()], 8).items[0].input_ids.tolist() == list(range(10, 18))


def test_fit_length_truncates_and_drops_samples_without_action_tokens():
    only_late = sample([0] * 6 + [1, 1], first_id=50)
    fitted = fit_length([of_length(3), two_turns(), only_late], 6, "truncate")
    assert [len(item.input_ids) for item in fitted.items] == [3, 6]
    assert (fitted.num_truncated, fitted.num_dropped) == (1, 1)
    assert [item.origin.seq_len_truncated for item in fitted.items] == [False, True]


def test_padding_does_not_count_as_length():
    padded = sample([0, 0, 1, 1, 0], attention=[0, 1, 1, 1, 0])
    (item,) = fit_length([padded], 3).items
    assert item.input_ids.tolist() == [11, 12, 13] and item.action_mask.tolist() == [False, True, True]
    assert item.actor_logps.tolist() == pytest.approx([-0.1, -0.2]) and item.attention_mask.all()


def test_padding_of_action_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"action tokens by its attention mask.*r10"):
        without_padding(sample([0, 1, 1], attention=[1, 1, 0]))


# --- which samples go together --------------------------------------------------------------------------------


def identities(bins):
    return sorted(id(item) for b in bins for item in b)


@given(lengths=st.lists(st.integers(2, 20), max_size=30), budget=st.integers(20, 60))
def test_packed_bins_stay_within_the_budget_and_keep_every_sample(lengths, budget):
    items = [of_length(n) for n in lengths]
    bins = split_packed(items, budget)
    assert all(0 < sum(own) <= budget for own in lengths_of(bins))
    assert identities(bins) == sorted(map(id, items))
    # First fit: no two bins could have been one.
    totals = sorted(sum(own) for own in lengths_of(bins))
    assert len(totals) < 2 or totals[0] + totals[1] > budget


def group(prompt, replies):
    """Samples with different replies to the same prompt."""
    items = []
    for n, length in enumerate(replies):
        ids = [*range(1000, 1000 + prompt), *range(100 * (n + 1), 100 * (n + 1) + length)]
        items.append(SAWItem(ids, None, [0] * prompt + [1] * length, 1.0))
    return items


def test_samples_with_a_common_prefix_share_a_bin_and_its_tokens_count_once():
    items = [*group(20, [5, 5, 5]), of_length(15)]
    assert lengths_of(split_packed(items, 50, share_prefixes=True)) == [[25, 25, 25, 15]]
    assert lengths_of(split_packed(items, 50)) == [[25, 25], [25, 15]]
    assert lengths_of(split_packed(items, 30, share_prefixes=True)) == [[25, 25], [25], [15]]


def test_shares_keep_samples_with_a_common_prefix_together():
    items = [*group(20, [4, 4]), of_length(30), of_length(10)]
    assert lengths_of(balanced_shares(items, 2, share_prefixes=True)) == [[30], [24, 24, 10]]


def test_padded_bins_are_filled_by_longest_times_count():
    # Sorted 2 2 3 5 6, budget 9: 2·2 = 4 and 3·3 = 9 fit, 4·5 does not; 2·6 does not.
    items = [of_length(n) for n in (6, 2, 5, 3, 2)]
    bins = split_items_by_token_budget(items, micro_token_budget=9, max_seq_len=6)
    assert lengths_of(bins) == [[2, 2, 3], [5], [6]]
    assert [bins[0][0], bins[0][1]] == [items[1], items[4]]  # stable


@given(lengths=st.lists(st.integers(2, 12), max_size=30), budget=st.integers(8, 40))
def test_padded_bins_stay_within_the_budget_padding_included(lengths, budget):
    bins = split_items_by_token_budget([of_length(n) for n in lengths], micro_token_budget=budget, max_seq_len=8)
    assert all(max(own) * len(own) <= budget for own in lengths_of(bins))
    assert sorted(n for own in lengths_of(bins) for n in own) == sorted(min(n, 8) for n in lengths)


@pytest.mark.parametrize(("budget", "longest"), [(0, 1), (-1, 8), (8, 0), (7, 8)])
def test_budget_below_max_seq_len_is_refused(budget, longest):
    with pytest.raises(ConfigError, match=f"micro_token_budget={budget}"):
        split_items_by_token_budget([of_length(3)], micro_token_budget=budget, max_seq_len=longest)
    assert split_items_by_token_budget([of_length(3)], micro_token_budget=8, max_seq_len=8)


# --- packed tensors -------------------------------------------------------------------------------------------


def test_predictor_of_an_action_token_is_the_position_before_it():
    a, b = sample([0, 1, 1], weight=2.0), sample([0, 0, 1, 0, 1], first_id=20, token_weights=[0.5, -0.5])
    batch = pack([a, b], "cpu")
    # Flat: 10 11 12 | 20 21 22 23 24, actions at 1, 2, 5, 7.
    assert batch.ids_T.tolist() == [10, 11, 12, 20, 21, 22, 23, 24]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.lengths == [3, 5] and batch.items == [a, b]
    actions = batch.actions
    assert actions.predictor_A.tolist() == [0, 1, 4, 6]
    assert actions.target_A.tolist() == [11, 12, 22, 24]
    assert actions.item_A.tolist() == [0, 0, 1, 1]
    assert actions.weight_A.tolist() == [2.0, 2.0, 0.5, -0.5]
    assert actions.old_logp_A.tolist() == pytest.approx([-0.1, -0.2, -0.1, -0.2])
    assert (actions.num_items, actions.num_tokens) == (2, 4)


@given(masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
def test_predictors_stay_within_their_sample(masks):
    items = [sample([False, *mask], first_id=100 * (n + 1)) for n, mask in enumerate(masks)]
    batch = pack(items, "cpu")
    actions = batch.actions
    assert (batch.ids_T[actions.predictor_A + 1] == actions.target_A).all()
    assert (batch.positions_T[actions.predictor_A + 1] > 0).all()
    assert (actions.target_A // 100 - 1 == actions.item_A).all()
    assert actions.num_tokens == sum(map(sum, masks)) and actions.num_items == len(masks)


def test_log_probs_are_taken_at_the_sampling_temperature():
    items = [sample([0, 1, 1], temperature=0.5), sample([0, 1]), sample([0, 1], temperature=2.0)]
    assert pack(items, "cpu").actions.inverse_temperature_A.tolist() == [2.0, 2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "tensors", [lambda items: pack(items, "cpu"), lambda items: collate_saw_items(items, pad_token_id=0)]
)
def test_action_at_the_first_position_is_refused(tensors):
    with pytest.raises(ConfigError, match=r"no token before it.*r30.*at least one token"):
        tensors([sample([0, 1]), sample([1, 1], first_id=30)])


@pytest.mark.parametrize(
    "tensors", [lambda items: pack(items, "cpu"), lambda items: collate_saw_items(items, pad_token_id=0)]
)
def test_log_probs_of_some_samples_only_are_refused(tensors):
    with pytest.raises(ValueError, match=r"Samples \[1\] have no actor log-probs"):
        tensors([sample([0, 1]), sample([0, 1], logps=False)])


# --- padded tensors -------------------------------------------------------------------------------------------


def test_collate_pads_at_the_right():
    items = [sample([0, 1, 1], weight=2.0), sample([0, 0, 1, 0, 1], first_id=20, weight=0.0, token_weights=[0.5, -0.5])]
    batch = collate_saw_items(items, pad_token_id=7)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 7, 7], [20, 21, 22, 23, 24]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["action_mask"].tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 0, 1]]
    assert batch["weight"].tolist() == [2.0, 0.0]
    assert batch["token_weight"].tolist() == [[0, 2, 2, 0, 0], [0, 0, 0.5, 0, -0.5]]
    np.testing.assert_allclose(batch["actor_logps"], [[0, -0.1, -0.2, 0, 0], [0, 0, -0.1, 0, -0.2]])
    np.testing.assert_allclose(batch["old_logp_action"], [-0.3, -0.3])
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    assert batch["action_mask"].dtype == batch["weight"].dtype == torch.float32


# --- a column more ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WithSurprise(SampleAttachments):
    surprise: FloatArray | None = None


def test_a_new_fact_of_every_token_is_a_field_and_an_entry_of_the_table(monkeypatch):
    for module in (samples, packing):
        monkeypatch.setattr(module, "COLUMNS", (*COLUMNS, Column("surprise", is_packed=True)))
    item = SAWItem([1, 2, 3], None, [0, 1, 1], 1.0, attachments=WithSurprise(surprise=[0.5, 1.5]))
    assert truncated(item, 2).attachments.surprise.tolist() == [0.5]
    assert pack([item, truncated(item, 2)], "cpu").actions.columns["surprise"].tolist() == [0.5, 1.5, 0.5]
    with pytest.raises(ValueError, match="'surprise': 1"):
        SAWItem([1, 2, 3], None, [0, 1, 1], 1.0, attachments=WithSurprise(surprise=[0.5]))


def test_sample_larger_than_the_budget_is_refused():
    with pytest.raises(ConfigError, match=r"11 tokens, more than micro_token_budget=10"):
        split_packed([of_length(11)], 10)


def test_fit_length_drop_keeps_the_others_in_order():
    items = [of_length(3, first_id=1), two_turns(), of_length(6, first_id=2)]
    fitted = fit_length(items, 6, "drop")
    assert fitted.items == [items[0], items[2]]
    assert (fitted.num_truncated, fitted.num_dropped) == (0, 1)
