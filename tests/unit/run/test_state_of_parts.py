"""Credit rules, losses and scorers of a user that change while a run trains: what a resumed run knows of them."""

import logging
from collections import defaultdict

import pytest
import torch

import ludic.run
from ludic.rewards import Rewards, as_scorer
from ludic.training import RLAlgorithm
from ludic.training.credit_assignment.combine import ScaledCredit
from ludic.training.loggers import read_metrics
from ludic.training.losses import Loss, Needs
from ludic.training.losses.composite import CompositeLoss, LossTerm
from ludic.types import StopReason
from ludic.types.interfaces import UnsavedState, own_parts


class Counts:
    num = 0


class Saved:
    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = state["num"]


class Rule(Counts):
    """Every batch weighs more than the one before."""

    def compute(self, rollouts):
        self.num += 1
        return {(r.id, step.index): self.num * (1 + r.total_reward) for r in rollouts for step in r.steps}


class Shrinking(Counts, Loss):
    needs = Needs(old_logps=False)

    def __call__(self, tokens):
        self.num += 1
        loss = -(tokens.weights * tokens.logps).sum() / tokens.facts.num_tokens / self.num
        return loss, {}


class Rising(Counts):
    """A reward function that pays more in every batch of 8."""

    __name__ = "rising"

    def __call__(self, rollout):
        self.num += 1
        return float((self.num - 1) // 8)


class SavedRule(Saved, Rule):
    pass


class SavedLoss(Saved, Shrinking):
    pass


class SavedReward(Saved, Rising):
    pass


def run_with(rule, loss, reward, folder):
    algo = RLAlgorithm(
        name="mine",
        credit_assigner=ScaledCredit(rule(), 0.5),
        loss=CompositeLoss([LossTerm(name="only", loss=loss())]),
    )
    return ludic.run.build(
        env="tic_tac_toe", model="tiny", algo=algo, reward=reward(), name="run", runs=folder, max_tokens=1, group_size=1,
        rollouts_per_update=8, steps=4, logger=(), save_rollouts=False, max_steps=1,
    )  # fmt: skip


def rows(folder):
    found = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if "train/loss" in row]
    return [(row["train/loss"], row["train/reward/rising"], row["train/avg_total_reward"]) for row in found]


def in_two_parts(parts, folder):
    with run_with(*parts, folder) as run:
        run.train(steps=2)
    with run_with(*parts, folder) as run:
        run.resume(steps=2)
    return rows(folder)


@pytest.mark.parametrize("parts", [(SavedRule, SavedLoss, SavedReward), (Rule, Shrinking, Rising)])
def test_a_resumed_run_has_the_state_of_rule_loss_and_scorer_or_says_that_it_has_not(parts, tmp_path, caplog):
    with run_with(*parts, tmp_path / "whole") as run:
        run.train()
    caplog.clear()
    resumed = in_two_parts(parts, tmp_path / "parts")
    warned = [r.getMessage() for r in caplog.records if "has no state_dict" in r.getMessage()]
    is_saved = parts[0] is SavedRule
    assert (resumed == rows(tmp_path / "whole")) is is_saved
    names = [] if is_saved else ["Rule", "Shrinking", "rising"]
    assert sorted(text.partition(" has changed since the start (num)")[0] for text in warned) == sorted(names * 2)


class Slotted:
    __slots__ = ("num",)

    def __init__(self):
        self.num = 0


class Holding:
    def __init__(self, value):
        self.value = value


def warnings_after(part, change, caplog):
    noticed = UnsavedState([part])
    change(part)
    with caplog.at_level(logging.WARNING):
        noticed.warn()
    return [r.getMessage() for r in caplog.records if "has no state_dict" in r.getMessage()]


def itself():
    held = {}
    held["itself"] = held
    return held


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (Slotted(), lambda part: setattr(part, "num", 1)),
        (Holding(defaultdict(lambda: 0)), lambda part: part.value.update(a=1)),
        (Holding(itself()), lambda part: part.value.update(a=1)),
        (Holding([1.5]), lambda part: part.value.append(2.5)),
    ],
)
def test_a_change_of_any_attribute_is_noticed(part, change, caplog):
    assert len(warnings_after(part, change, caplog)) == 1


@pytest.mark.parametrize("value", [defaultdict(lambda: 0), itself(), torch.zeros(2), torch.nn.Linear(2, 2)])
def test_what_did_not_change_is_not_warned_of(value, caplog):
    assert not warnings_after(Holding(value), lambda part: None, caplog)


def test_an_equal_list_of_other_objects_is_no_change(caplog):
    same = "".join(["a", "b"])
    assert not warnings_after(Holding([same, same]), lambda part: setattr(part, "value", ["ab", "".join("ab")]), caplog)


def test_own_parts_are_found_in_a_mapping_that_contains_itself_and_enums_and_classes_are_none():
    held = itself() | {"why": StopReason.TERMINATED, "kind": Rule, "rule": (rule := Rule())}
    held["itself"] = held
    assert [part for part in own_parts(held, "x").values() if hasattr(part, "__dict__")] == [rule]


def test_weights_of_a_reward_model_are_no_state_of_the_run():
    class RewardModel(torch.nn.Linear):
        __name__ = "model"

    assert Rewards([as_scorer(RewardModel(2, 2), "model")]).state_dict() == {}
