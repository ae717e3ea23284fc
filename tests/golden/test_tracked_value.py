"""SPO by hand: the tracker against closed sums, the credit rule against enumeration, the loss with its gradient."""

import json
from math import log

import pytest
import torch

from ludic.training import BetaValueTracker, TrackedValueReturn, collate_saw_items, make_spo
from ludic.types import ActorTokenLogps, ConfigError, SampleAttachments, SAWItem
from tests.unit.training.hand_made import failed, rollout, turn_weights

near = pytest.approx


def visit(prompt, *rewards):
    return rollout(list(rewards), group=None, request_meta={"sample_index": prompt})


# --- the tracker ----------------------------------------------------------------------------------------------


def test_an_unseen_prompt_has_the_value_one_half():
    assert BetaValueTracker().value_of("new") == 0.5
    assert BetaValueTracker(low=-1.0, high=3.0).value_of("new") == 1.0


@pytest.mark.parametrize("kl", [0.0, 0.01, 0.015, 5.0])
def test_counts_are_geometric_sums_with_the_forgetting_of_the_kl_between_visits(kl):
    # 2^(-0.01 / 0.1) = 0.9330 and 2^(-0.015 / 0.1) = 0.9013 are within the bounds; 0 and 5 hit 0.96 and 0.875.
    # The first visit finds the prior at the policy of that moment: no KL, so rho_max.
    rho = {0.0: 0.96, 0.01: 2**-0.1, 0.015: 2**-0.15, 5.0: 0.875}[kl]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.25]
    tracker = BetaValueTracker()
    for reward in rewards:
        tracker.observe("x", reward)
        tracker.notify_drift(kl)
    n = len(rewards)
    prior = 0.96 * rho ** (n - 1)
    wins = prior + sum(rho ** (n - 1 - i) * reward for i, reward in enumerate(rewards))
    losses = prior + sum(rho ** (n - 1 - i) * (1 - reward) for i, reward in enumerate(rewards))
    assert tracker.state_dict()["beliefs"]["x"][:2] == near([wins, losses])
    assert tracker.value_of("x") == near(wins / (wins + losses))
    assert tracker.rho_of("x") == near(rho)


def test_a_prompts_kl_is_what_was_added_since_its_own_last_visit():
    tracker = BetaValueTracker(rho_min=0.1)
    tracker.observe("seen often", 1.0)
    tracker.observe("seen once", 1.0)
    for _ in range(3):
        tracker.notify_drift(0.05)
        tracker.observe("seen often", 1.0)
    tracker.notify_drift(0.05)
    assert tracker.drift == near(0.2)
    assert tracker.rho_of("seen often") == near(2**-0.5)  # 0.05 of 0.1
    assert tracker.rho_of("seen once") == near(2**-2)  # 0.20 of 0.1


def test_forgetting_leaves_the_value_and_widens_the_belief():
    tracker = BetaValueTracker(rho_min=0.25)
    tracker.initialise("x", [1.0, 0.0, 0.0, 0.0])
    tracker.notify_drift(10.0)
    assert tracker.value_of("x") == 0.25
    # N0 = 1 / (1 - 0.25) = 4/3 counts, a quarter of them kept: (1/12 + 1) / (1/3 + 1)
    tracker.observe("x", 1.0)
    assert tracker.value_of("x") == near((1 / 12 + 1) / (1 / 3 + 1))


def test_the_first_value_is_the_mean_of_the_samples_counted_eight_times():
    tracker = BetaValueTracker()
    assert tracker.initial_count == 8.0
    tracker.initialise("x", [1.0, 0.0, 0.0, 0.0])
    assert tracker.state_dict()["beliefs"]["x"][:2] == near([2.0, 6.0])
    # In the reward's own units: -1 and 3 are shares 0 and 1, their mean 1 is one half.
    wide = BetaValueTracker(low=-1.0, high=3.0)
    wide.initialise("x", [-1.0, 3.0, 3.0, -1.0])
    assert (wide.value_of("x"), wide.success_of("x")) == (1.0, 0.5)


def test_a_state_survives_json_exactly():
    whole, resumed = BetaValueTracker(), BetaValueTracker()
    for i in range(6):
        whole.observe(f"p{i % 2}", i / 6)
        whole.notify_drift(0.013)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for tracker in (whole, resumed):
        tracker.observe("p0", 1.0)
    assert whole.state_dict() == resumed.state_dict() and len(resumed) == 2


def test_a_reward_outside_the_range_is_refused_and_counts_for_nothing():
    tracker = BetaValueTracker()
    with pytest.raises(ConfigError, match=r"'x' earned -0\.1.*from 0\.0 to 1\.0.*low=…"):
        tracker.observe("x", -0.1)
    with pytest.raises(ConfigError, match="at least one reward"):
        tracker.initialise("x", [])
    assert len(tracker) == 0


# --- the credit rule ------------------------------------------------------------------------------------------


def test_credit_is_the_total_reward_minus_the_value_before_the_batch():
    tracker = BetaValueTracker()
    tracker.initialise("sample_index=7", [1.0, 0.0, 0.0, 0.0])
    rule = TrackedValueReturn(tracker)
    known, again, new, broken = visit(7, 0.0, 1.0), visit(7, 0.0), visit(8, 1.0), failed()
    weights = rule.compute([known, again, new, broken])
    # Both of prompt 7 are compared with 0.25; the second does not see the first.
    assert turn_weights(weights, known) == near([0.75, 0.75])
    assert turn_weights(weights, again) == near([-0.25])
    assert turn_weights(weights, new) == near([0.5])
    assert {id for id, _ in weights} == {known.id, again.id, new.id}
    # Afterwards: 2, 6 -> 0.96 * 2 + 1 = 2.92, 5.76 -> 0.96 * 2.92 = 2.8032, 0.96 * 5.76 + 1 = 6.5296
    assert tracker.state_dict()["beliefs"]["sample_index=7"][:2] == near([2.8032, 6.5296])


@pytest.mark.parametrize("history", [[], [0.0], [1.0, 1.0, 0.0], [0.0] * 20])
def test_the_gradient_is_unbiased_whatever_the_tracker_believes(history):
    # A coin with P(1) = 0.3 and reward = the coin: the gradient of E[R] in the logit is p (1 - p) = 0.21. By enumeration.
    p, found, counted_first = 0.3, 0.0, 0.0
    for action, chance in ((0, 1 - p), (1, p)):
        tracker = BetaValueTracker()
        for reward in history:
            tracker.observe("sample_index=0", reward)
        total = sum(tracker.state_dict()["beliefs"].get("sample_index=0", [1.0, 1.0])[:2])
        of = visit(0, float(action))
        found += chance * (action - p) * turn_weights(TrackedValueReturn(tracker).compute([of]), of)[0]
        counted_first += chance * (action - p) * (action - tracker.value_of("sample_index=0"))
    assert found == near(0.21)
    # The value after the update holds the reward itself, with weight 1 / (rho n + 1): the gradient shrinks by the rest.
    assert counted_first == near(0.21 * 0.96 * total / (0.96 * total + 1))


def test_first_values_come_from_rollouts_played_before():
    rule = TrackedValueReturn(BetaValueTracker())
    rule.initialise([visit(1, 1.0), visit(2, 0.0), visit(1, 0.0), failed(), visit(2, 0.0)])
    assert [rule.tracker.value_of(f"sample_index={i}") for i in (1, 2, 3)] == [0.5, 0.0, 0.5]


def test_a_prompt_without_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"\['group_id'\].*task_index and sample_index"):
        TrackedValueReturn(BetaValueTracker()).compute([rollout([1.0])])


def test_roles_may_have_separate_values():
    rule = TrackedValueReturn(BetaValueTracker(), key=lambda r: r.meta["agent_id"])
    x, o = rollout([1.0], agent_id="x"), rollout([0.0], agent_id="o")
    rule.compute([x, o])
    assert rule.tracker.value_of("x") == near(1.96 / 2.92) and rule.tracker.value_of("o") == near(0.96 / 2.92)


# --- the loss -------------------------------------------------------------------------------------------------


def test_the_loss_normalises_over_the_batch_and_means_over_tokens():
    # Weights 0.75, -0.25, -0.25, -0.25: mean 0, variance (9 + 3) / 64 = 3/16, so sqrt(3) and three times -1/sqrt(3).
    # Two words alike; on-policy the gradient is -A (onehot - 1/2) / 4 tokens for the row of each sample's prompt.
    algo, _ = make_spo()
    attached = SampleAttachments(actor_logps=ActorTokenLogps([-log(2)]))
    weights = [0.75, -0.25, -0.25, -0.25]
    items = [SAWItem([0, 1], None, [0, 1], weight, {}, attached) for weight in weights]
    logits = torch.zeros(4, 2, 2, requires_grad=True)
    loss, _ = algo.loss.compute(logits, collate_saw_items(items, pad_token_id=0))
    loss.backward()
    scaled = torch.tensor([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])
    assert loss.item() == near(0.0, abs=1e-6)  # -mean(A) at ratio 1
    expected = torch.stack([scaled / 8, -scaled / 8], dim=1)
    torch.testing.assert_close(logits.grad[:, 0], expected, atol=1e-5, rtol=1e-5)
