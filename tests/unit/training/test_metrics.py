"""Stats: independent of the split, named by rule, once per rollout."""

import math

import numpy as np
import pytest
import torch

from ludic.training.causes import LearningWatch, why_nothing_was_learned
from ludic.training.learner.metrics import MetricSums, batch_stats, prefixed
from ludic.types import ConfigError, SAWItem
from tests.origins import meta_and_origin

# --- names ------------------------------------------------------------------------------------------------------


def test_names_get_their_prefix():
    named = prefixed(
        {
            "loss": 1,
            "gpu_mem_alloc_mb": 2,
            "tokens_per_s": 3,
            "backward_s": 4,
            "eval_accuracy": 5,
            "eval/x": 6,
            "perf/y": 7,
        }
        | {"loss/kl": 8, "eval_s": 9, "reward/tokens_s": 10, "score/eval_x": 11}
    )
    assert named == {
        "train/loss": 1, "perf/gpu_mem_alloc_mb": 2, "perf/tokens_per_s": 3, "perf/backward_s": 4, "eval/accuracy": 5,
        "eval/x": 6, "perf/y": 7, "train/loss/kl": 8, "perf/eval_s": 9, "train/reward/tokens_s": 10, "train/score/eval_x": 11,
    }  # fmt: skip


def test_two_stats_with_one_name_are_refused():
    with pytest.raises(ConfigError, match="'train/loss'"):
        prefixed({"loss": 1, "train/loss": 2})


# --- sums -------------------------------------------------------------------------------------------------------

VALUES = [1.0, 2.0, 3.0, 10.0, 0.5, 0.25]


@pytest.mark.parametrize("splits", [[6], [1, 5], [2, 2, 2], [1] * 6, [5, 0, 1]])
@pytest.mark.parametrize("as_cell", [float, torch.tensor], ids=["floats", "tensors"])
def test_means_do_not_depend_on_how_the_batch_was_split(splits, as_cell):
    sums = MetricSums()
    rest = list(VALUES)
    for size in splits:
        part, rest = rest[:size], rest[size:]
        sums.add({"kl": (as_cell(float(sum(part))), as_cell(float(len(part))))})
        if part:
            sums.add_max({"ratio_max": as_cell(max(part))})
    assert sums.means() == {"kl": 16.75 / 6, "ratio_max": 10.0}


def test_tensors_and_numbers_are_summed_exactly():
    sums = MetricSums()
    sums.add({"x": (torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor(2**24 + 1)), "y": (1, 2)})
    sums.add({"x": (2.5, 2), "y": (torch.tensor(True), torch.tensor(1, dtype=torch.int32))})
    assert sums.means() == {"x": 4.0 / (2**24 + 3), "y": 2 / 3}


def test_mean_over_a_count_of_zero_is_left_out():
    sums = MetricSums()
    sums.add({"clip_fraction": (torch.tensor(0.0), 0), "loss": (1.0, 1)})
    assert sums.means() == {"loss": 1.0}


def test_nan_is_not_lost_in_a_maximum():
    sums = MetricSums()
    sums.add({"loss": (math.nan, 1)})
    sums.add_max({"norm": 1.0})
    sums.add_max({"norm": math.nan})
    sums.add_max({"norm": 2.0})
    means = sums.means()
    assert math.isnan(means["loss"]) and math.isnan(means["norm"])


def test_stat_holds_no_autograd_graph():
    weight = torch.ones((), requires_grad=True)
    sums = MetricSums()
    sums.add({"loss": (weight * 2, 1)})
    ((total, _),) = sums._pairs["loss"]
    assert isinstance(total, torch.Tensor) and total.grad_fn is None


def test_means_copies_once_from_the_device(monkeypatch):
    sums = MetricSums()
    for _ in range(3):
        sums.add({"a": (torch.ones(()), torch.ones(())), "b": (torch.ones(()), 1)})
        sums.add_max({"c": torch.ones(())})
    copies = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: copies.append(self.shape) or to_list(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("fetched one by one"))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: pytest.fail("fetched one by one"))
    assert sums.means() == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert copies == [(12,)]


# --- batches ----------------------------------------------------------------------------------------------------


def item(mask: list[int], weight: float = 1.0, **facts) -> SAWItem:
    return SAWItem(np.arange(len(mask)), None, np.array(mask), weight, **meta_and_origin(**facts))


ITEMS = [
    item([0, 0, 1, 1], rollout_id="a", total_reward=1.0, num_parse_errors=1, finish_reason="stop"),
    item([0, 1], rollout_id="a", total_reward=1.0, truncated=True, finish_reason="length"),
    item([0, 0, 0, 1, 1, 1], weight=0.0, rollout_id="b", total_reward=0.0, num_parse_errors=0, finish_reason="stop"),
]


def test_batch_stats_match_values_worked_by_hand():
    assert batch_stats(ITEMS, {}) == {
        "num_samples": 3, "num_rollouts": 2, "num_tokens": 12, "num_action_tokens": 6,
        "avg_completion_length": 2.0, "avg_prompt_length": 2.0,
        "avg_total_reward": 0.5,  # rollout a has two items, and counts once
        "total_reward_std": 0.5,
        "truncated_rate": 0.5, "parse_error_rate": 0.5, "zero_weight_rate": 1 / 3,
        "over_limit_rate": 0.5, "unreadable_rate": 0.5,
        "completion_truncated_rate": 1 / 3, "seq_len_truncated_rate": 0.0,
    }  # fmt: skip


def test_reply_that_was_cut_off_counts_as_over_limit_and_not_unreadable():
    cut_off = item([0, 1], rollout_id="a", num_parse_errors=1, num_cut_off=1)
    unreadable = item([0, 1], rollout_id="b", num_parse_errors=1, num_cut_off=0)
    both = item([0, 1], rollout_id="c", num_parse_errors=2, num_cut_off=1)
    stats = batch_stats([cut_off, unreadable, both, item([0, 1], rollout_id="d", num_parse_errors=0)])
    assert (stats["parse_error_rate"], stats["unreadable_rate"], stats["over_limit_rate"]) == (0.75, 0.5, 0.5)


def test_env_results_are_shares_of_all_rollouts():
    def ended(*results):
        return batch_stats([item([0, 1], rollout_id=str(n), result=result) for n, result in enumerate(results)])

    games = ended("win", "win", None, "loss")
    assert (games["win_rate"], games["draw_rate"], games["loss_rate"]) == (0.5, 0.0, 0.25)
    assert ended("solved", None)["solved_rate"] == 0.5
    assert not [name for name in ended(None, {"not": "text"}) if name == "None_rate"]
    assert "text 3_rate" not in ended(*(f"text {n}" for n in range(20))), "free text is no result"


def test_components_are_means_over_rollouts_and_known_before_their_weights():
    components = {"env": 1.0, "judge": 0.5}
    first = {
        "rollout_id": "a",
        "total_reward": 1.5,
        "reward_components": components,
        "scores": {"env": 1.0, "judge": 1.0},
    }
    items = [
        item([0, 1], **first),
        item([0, 1], **first),  # rollout a has two items, and counts once
        item([0, 1], rollout_id="b", total_reward=0.5, reward_components={"env": 0.5}),
        item([0, 1], rollout_id="c", total_reward=1.0),  # not known
    ]
    stats = {name: value for name, value in batch_stats(items).items() if name.startswith(("reward/", "score/"))}
    assert stats == {"reward/env": 0.75, "reward/judge": 0.25, "score/judge": 0.5}
    assert batch_stats(items, {"reward/env": 0.25})["reward/env"] == 0.25


def test_averages_of_the_source_win_and_counts_are_those_of_the_items():
    meta = {"avg_total_reward": 0.125, "num_samples": 99, "num_failed": 4, "source": "offline", "done": True}
    stats = batch_stats(ITEMS, meta)
    assert (stats["avg_total_reward"], stats["num_samples"], stats["num_failed"]) == (0.125, 3, 4)
    assert not {"source", "done"} & stats.keys()


# --- what a run comes to ----------------------------------------------------------------------------------------


def update(norm=0.0, **stats):
    """A logged update; by default one that had no gradient, because all its episodes earned 1."""
    usual = {
        "parse_error_rate": 0,
        "unreadable_rate": 0,
        "zero_weight_rate": 1,
        "total_reward_std": 0,
        "avg_total_reward": 1,
    }
    return {"train/grad_norm": norm} | {f"train/{name}": value for name, value in (usual | stats).items()}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([update()] * 3, "in every update (3). All episodes earned the same reward, 1, so none"),
        ([update(), update(avg_total_reward=2)], "All episodes earned the same reward within each update"),
        ([update(parse_error_rate=1, unreadable_rate=0.5)], "replies that the parser could not read"),
        (
            [update(parse_error_rate=1, unreadable_rate=0.3)],
            "from them. In 30% were replies that the parser could not read. Comp",
        ),
        ([update(parse_error_rate=1, unreadable_rate=0.3)] * 2, "Give more with --max-tokens"),
        ([update(parse_error_rate=0.9, unreadable_rate=0.1)], "Most episodes had replies that ran out of tokens"),
        ([update(parse_error_rate=1, unreadable_rate=0.6)], "Every episode had replies that the parser could not read"),
        ([update(parse_error_rate=0.5, unreadable_rate=0.5)], "All episodes earned the same reward"),
        ([update(parse_error_rate=1)], "ran out of tokens before they ended"),
        ([update(total_reward_std=0.3)], "never between the rollouts of one task"),
        ([update(total_reward_std=0.3, same_reply_rate=0)], "the reward seems to ignore the reply"),
        ([update(total_reward_std=0.3, same_reply_rate=0.1)] * 3, "the reward seems to ignore the reply"),
        ([update(same_reply_rate=1)], "All replies to one task were the same"),
        ([update(0.5, entropy=4.6), update(entropy=0.0008), update(entropy=0.0007)], "from 4.6 to 0.0007 nats"),
        ([update(0.5, parse_error_rate=1, unreadable_rate=1)] * 2, "replies that the parser could not read"),
        ([update(total_reward_std=0.3, zero_weight_rate=0.5)], "the loss dropped every sample"),
        ([update(), update(), update(norm=0.5)], "Little was learned: the gradient was zero in 2 of 3 updates. All"),
    ],
)
def test_run_without_gradients_gets_the_likely_cause(rows, message):
    evaluation = {"step": 1, "eval/accuracy": 0.5}
    assert message in (why_nothing_was_learned([*rows, evaluation]) or "")


def test_a_run_that_learns_nothing_says_so_while_it_runs(caplog):
    watch = LearningWatch()
    for entropy in (4.6, 0.9, 0.0008, 0.0007):
        watch.note(update(norm=float(entropy > 0.1), entropy=entropy))
    assert [record.message.split(", so")[0] for record in caplog.records] == [
        "Nothing is being learned. Entropy has collapsed from 4.6 to 0.0008 nats per token"
    ]


def test_updates_with_gradients_between_others_are_no_reason_to_warn(caplog):
    watch = LearningWatch()
    for norm in (0, 0, 1, 0, 0, 1):
        watch.note(update(norm=norm, entropy=1.0))
    assert not caplog.records
    for _ in range(4):
        watch.note(update(entropy=1.0))
    assert len(caplog.records) == 1 and "All episodes earned the same reward" in caplog.text


def test_a_solved_run_is_not_told_that_it_learns_nothing(caplog):
    watch = LearningWatch()
    rows = [update(1.0, avg_total_reward=0.3, total_reward_std=0.4, entropy=3.0)]
    rows += [update(1.0, avg_total_reward=0.9, total_reward_std=0.3, entropy=0.5), *[update(entropy=0.02)] * 6]
    for row in rows:
        watch.note(row)
    assert not caplog.records and why_nothing_was_learned(rows) is None


def test_a_cause_is_warned_of_once(caplog):
    watch = LearningWatch()
    for norm in (1, 0, 1, 0, 1, 0):
        watch.note(update(norm, entropy=0.01 if not norm else 3.0, avg_total_reward=0))
    assert len(caplog.records) == 1


def test_unread_replies_of_a_run_with_gradients_are_not_called_learning_nothing(caplog):
    watch = LearningWatch()
    for reward in (0.1, 0.2, 0.3):
        watch.note(update(0.7, parse_error_rate=1, unreadable_rate=1, avg_total_reward=reward, total_reward_std=0.2))
    assert [record.message[:36] for record in caplog.records] == ["Every episode had replies that the p"]
