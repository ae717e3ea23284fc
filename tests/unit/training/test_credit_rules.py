from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.interaction import SingleAgentProtocol
from ludic.training import credit_assignment
from ludic.training.credit_assignment import (
    GAE,
    BetaValueTracker,
    ComponentNormalizedReturn,
    ConstantCredit,
    EpisodeCredit,
    EpisodicReturn,
    FoldedReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    LeaveOneOutReturn,
    MaximumLikelihoodReturn,
    MonteCarloReturn,
    PerStepReward,
    PotentialShaping,
    ProposerSolverReturn,
    Relabelled,
    RoleBaselineReturn,
    RoutedCredit,
    ScaledCredit,
    StateGroupReturn,
    TrackedValueReturn,
    TurnGroupReturn,
    TurnLeaveOneOutReturn,
    gae,
    returns_to_go,
)
from ludic.types import ConfigError, FollowsDrift, Rollout, Stateful, StopReason
from tests.fakes import CountingEnv, make_agent
from tests.unit.training.hand_made import agent_step, env_step, failed, rollout, turn_weights

pytestmark = pytest.mark.slow


def no_values(rollout):
    cut_off = rollout.stop is not None and rollout.stop.is_truncation
    return [0.0] * (len(rollout.turns()) + cut_off)


RULES = {
    "MonteCarloReturn": MonteCarloReturn(0.9),
    "EpisodicReturn": EpisodicReturn(),
    "PerStepReward": PerStepReward(),
    "ConstantCredit": ConstantCredit(),
    "GroupNormalizedReturn": GroupNormalizedReturn(2, normalize_adv=True),
    "HybridNormalizedReturn": HybridNormalizedReturn(2),
    "LeaveOneOutReturn": LeaveOneOutReturn(2),
    "MaximumLikelihoodReturn": MaximumLikelihoodReturn(2),
    "ProposerSolverReturn": ProposerSolverReturn(),
    "FoldedReturn": FoldedReturn(2),
    "ComponentNormalizedReturn": ComponentNormalizedReturn(2),
    "TurnGroupReturn": TurnGroupReturn(2),
    "TurnLeaveOneOutReturn": TurnLeaveOneOutReturn(2),
    "StateGroupReturn": StateGroupReturn(2),
    "RoleBaselineReturn": RoleBaselineReturn(),
    "Relabelled": Relabelled(MonteCarloReturn(0.9), PotentialShaping(lambda r: [0.5] * len(r.turns()), gamma=0.9)),
    "RoutedCredit": RoutedCredit({"rl": MonteCarloReturn(0.9)}, default="rl"),
    "ScaledCredit": ScaledCredit(MonteCarloReturn(0.9), 0.5),
    "EpisodeCredit": EpisodeCredit(GroupNormalizedReturn(2)),
    "TrackedValueReturn": TrackedValueReturn(BetaValueTracker(low=-10.0, high=10.0), key=lambda r: r.meta["agent_id"]),
    "GAE": GAE(0.9, 0.8, no_values),
}
GROUPED = [
    "GroupNormalizedReturn", "HybridNormalizedReturn", "LeaveOneOutReturn", "MaximumLikelihoodReturn",
    "ComponentNormalizedReturn", "TurnGroupReturn", "TurnLeaveOneOutReturn", "StateGroupReturn", "EpisodeCredit",
]  # fmt: skip
GROUP_RULES = [
    GroupNormalizedReturn, HybridNormalizedReturn, LeaveOneOutReturn, MaximumLikelihoodReturn,
    ComponentNormalizedReturn, TurnGroupReturn, TurnLeaveOneOutReturn, partial(StateGroupReturn, comparison="others"),
]  # fmt: skip


# --- the contract of every rule -------------------------------------------------------------------------------


def test_every_exported_rule_is_in_the_contract_table():
    rules = {name for name in credit_assignment.__all__ if hasattr(getattr(credit_assignment, name), "compute")}
    assert rules == RULES.keys()


@pytest.mark.parametrize("name", RULES)
def test_every_step_of_every_finished_rollout_gets_a_finite_weight(name):
    batch = [
        rollout([0.0, 1.0], calls=3),
        rollout([-0.1], stop=StopReason.MAX_STEPS),
        failed(),
        rollout([1.0, 2.0, 3.0], group="other"),
        rollout([], group="other"),
    ]
    weights = RULES[name].compute(batch)
    expected = {(r.id, step.index) for r in batch if r.failure is None for step in r.steps}
    assert weights.keys() == expected
    assert all(type(w) is float and np.isfinite(w) for w in weights.values())


@pytest.mark.parametrize("name", RULES)
def test_an_empty_batch_has_no_weights(name):
    assert RULES[name].compute([]) == {}
    assert RULES[name].compute([failed()]) == {}


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_rollouts_does_not_matter(name):
    batch = [rollout([0.0, 1.0]), rollout([2.0]), rollout([3.0], group="b"), rollout([5.0, 1.0], group="b")]
    # a rule that learns from batches must meet both as it was
    forward, backward = deepcopy(RULES[name]), deepcopy(RULES[name])
    assert backward.compute(batch[::-1]) == pytest.approx(forward.compute(batch))


@pytest.mark.parametrize("name", RULES)
def test_two_rollouts_with_one_id_are_refused(name):
    once = rollout([1.0])
    with pytest.raises(ValueError, match="more than once"):
        RULES[name].compute([once, once])


# --- rules around rules ---------------------------------------------------------------------------------------

WRAPPERS = {
    "ScaledCredit": lambda inner: ScaledCredit(inner, 1.0),
    "Relabelled": lambda inner: Relabelled(inner, lambda rollout: rollout),
    "RoutedCredit": lambda inner: RoutedCredit({"rl": inner}, default="rl"),
    "EpisodeCredit": EpisodeCredit,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_saves_and_loads_the_state_of_its_inner_rule(name):
    wrapped, bare = WRAPPERS[name](RoleBaselineReturn()), RoleBaselineReturn()
    first, second = [rollout([1.0]), rollout([3.0])], [rollout([2.0])]
    assert wrapped.compute(first) == bare.compute(first)
    resumed = WRAPPERS[name](RoleBaselineReturn())
    assert isinstance(wrapped, Stateful)
    resumed.load_state_dict(wrapped.state_dict())
    assert set(resumed.compute(second).values()) == set(bare.compute(second).values()) == {0.0}


@pytest.mark.parametrize("name", sorted(WRAPPERS.keys() - {"EpisodeCredit"}))
def test_a_wrapper_refuses_a_rule_that_follows_drift(name):
    assert not isinstance(WRAPPERS[name](MonteCarloReturn()), FollowsDrift)
    with pytest.raises(ConfigError, match=r"polic"):
        WRAPPERS[name](TrackedValueReturn(BetaValueTracker()))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_of_a_stateless_rule_has_no_state(name):
    wrapped = WRAPPERS[name](MonteCarloReturn())
    assert wrapped.state_dict() == {}
    wrapped.load_state_dict({})


async def test_rollouts_of_a_real_protocol_are_covered():
    batch = []
    for _ in range(2):
        protocol = SingleAgentProtocol(make_agent(["<a>inc</a>", "what?", "<a>inc</a>"]))
        batch += await protocol.run(env=CountingEnv(2), max_steps=5)
    for r in batch:
        r.meta["request_meta"] = {"group_id": "g"}
    for rule in RULES.values():
        assert len(rule.compute(batch)) == sum(len(r.steps) for r in batch)
    # earned, with 0.1 for a readable reply and -1 for another: 0.1, -1, 1.1
    weights = MonteCarloReturn().compute(batch)
    assert turn_weights(weights, of=batch[0]) == pytest.approx([0.2, 0.1, 1.1])


# --- turns ----------------------------------------------------------------------------------------------------


def test_a_step_without_a_turn_id_is_a_separate_turn():
    r = Rollout(steps=[agent_step(0, turn=None), env_step(1, turn=None, reward=1.0)])
    weights = MonteCarloReturn(0.5).compute([r])
    assert weights == {(r.id, 0): 0.5, (r.id, 1): 1.0}


def test_the_penalty_of_a_tool_call_counts_for_its_turn():
    steps = [
        agent_step(0, turn="t0", reward=-1.0, action_target="internal"),
        agent_step(1, turn="t0"),
        env_step(2, turn="t0", reward=3.0),
        agent_step(3, turn="t1", reward=-0.5, info={"parse_error": True}),
    ]
    r = Rollout(steps=steps)
    assert turn_weights(MonteCarloReturn(0.5).compute([r]), of=r) == [1.75, -0.5]


@given(st.lists(st.floats(-5, 5), max_size=6), st.floats(0, 1))
def test_returns_to_go_are_the_discounted_sums(rewards, gamma):
    sums = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    assert returns_to_go(rewards, gamma) == pytest.approx(sums, abs=1e-9)


# --- groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPED)
def test_agents_of_one_episode_are_compared_with_their_own_role_only(name):
    batch = [rollout([reward], agent_id=role) for role, reward in [("x", 1.0), ("o", -1.0), ("x", 1.0), ("o", -1.0)]]
    assert set(RULES[name].compute(batch).values()) == {0.0}


@pytest.mark.parametrize("name", GROUPED)
def test_a_sub_agent_is_not_compared_with_its_parent(name):
    parents = [rollout([1.0]), rollout([1.0])]
    children = [rollout([0.0], delegate="searcher"), rollout([0.0], delegate="searcher")]
    assert set(RULES[name].compute([*parents, *children]).values()) == {0.0}


@pytest.mark.parametrize("name", GROUPED)
def test_a_rollout_without_a_group_is_refused_with_advice(name):
    with pytest.raises(ValueError, match=r"group_id'\] is missing.*GRPORequestStrategy"):
        RULES[name].compute([rollout([1.0], group=None), rollout([1.0], group=None)])


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("size", [1, 3])
def test_a_group_of_another_size_is_refused_with_advice(name, size):
    with pytest.raises(ValueError, match=f"has {size} finished rollouts, but group_size=2.*allow_partial"):
        RULES[name].compute([rollout([1.0]) for _ in range(size)])


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_partial_groups_may_be_allowed_and_failed_members_do_not_count(rule):
    low, high = rollout([0.0]), rollout([2.0])
    weights = rule(3, allow_partial=True).compute([low, failed(), high])
    assert weights[(low.id, 0)] == -weights[(high.id, 0)] < 0


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_a_rollout_alone_in_its_group_gets_zero(rule):
    assert set(rule(2, allow_partial=True).compute([rollout([5.0, 1.0])]).values()) == {0.0}


def test_turn_group_without_a_size_takes_groups_of_any_size():
    weights = TurnGroupReturn().compute([rollout([0.0]), rollout([3.0]), rollout([3.0])])
    assert sorted(weights.values()) == [-2.0, -2.0, 1.0, 1.0, 1.0, 1.0]


@given(st.lists(st.sampled_from([0.0, 1.0, 0.3, -2.0]), min_size=2, max_size=6))
def test_leave_one_out_is_the_group_mean_scaled(rewards):
    n = len(rewards)
    batch = [rollout([reward]) for reward in rewards]
    center, others = GroupNormalizedReturn(n).compute(batch), LeaveOneOutReturn(n).compute(batch)
    assert others == pytest.approx({key: w * n / (n - 1) for key, w in center.items()}, abs=1e-9)


@pytest.mark.parametrize(
    "rule",
    [GroupNormalizedReturn(3, normalize_adv=True), HybridNormalizedReturn(3), TurnGroupReturn(3, normalize=True)],
)
def test_equal_members_get_zero(rule):
    assert max(map(abs, rule.compute([rollout([0.1]) for _ in range(3)]).values())) < 1e-6


# --- values ---------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=6), st.floats(0, 1))
def test_gae_with_lambda_one_is_the_return_minus_the_value(pairs, gamma):
    rewards, values = [r for r, _ in pairs], [v for _, v in pairs]
    expected = returns_to_go(rewards, gamma) - np.array(values)
    assert gae(rewards, values, gamma=gamma, lam=1.0) == pytest.approx(expected, abs=1e-9)


def test_gae_with_perfect_values_is_zero_for_every_lambda():
    rewards, gamma = [1.0, 0.0, 2.0], 0.9
    for lam in (0.0, 0.5, 1.0):
        assert gae(rewards, returns_to_go(rewards, gamma), gamma=gamma, lam=lam) == pytest.approx([0, 0, 0])


def test_gae_refuses_another_number_of_values():
    with pytest.raises(ValueError, match="2 rewards and 1 values"):
        gae([1.0, 2.0], [1.0], gamma=1.0, lam=1.0)


@pytest.mark.parametrize(
    ("stop", "num_values", "advice"),
    [(StopReason.MAX_STEPS, 2, "was truncated.*one more"), (StopReason.TERMINATED, 3, "was not truncated")],
)
def test_gae_needs_a_bootstrap_value_exactly_for_truncated_episodes(stop, num_values, advice):
    rule = GAE(1.0, 1.0, lambda r: [0.0] * num_values)
    with pytest.raises(ValueError, match=advice):
        rule.compute([rollout([1.0, 1.0], stop=stop)])


def test_without_a_stop_reason_a_truncated_last_step_means_truncated():
    r = Rollout(steps=[agent_step(0, turn="t"), env_step(1, turn="t", reward=1.0, truncated=True)])
    assert GAE(1.0, 1.0, lambda r: [0.0, 7.0]).compute([r])[(r.id, 1)] == 8.0


# --- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: MonteCarloReturn(1.1),
        lambda: MonteCarloReturn(float("nan")),
        lambda: TurnGroupReturn(gamma=-0.1),
        lambda: TurnGroupReturn(1),
        lambda: GAE(1.0, 1.5, no_values),
        lambda: GroupNormalizedReturn(1),
        lambda: HybridNormalizedReturn(0),
        lambda: HybridNormalizedReturn(2, eps=0.0),
        lambda: LeaveOneOutReturn(1),
        lambda: TurnLeaveOneOutReturn(1),
        lambda: TurnLeaveOneOutReturn(gamma=2.0),
        lambda: StateGroupReturn(1),
        lambda: StateGroupReturn(2, step_weight=-1.0),
        lambda: StateGroupReturn(2, comparison="median"),
        lambda: RoleBaselineReturn(decay=1.0),
        lambda: PotentialShaping(no_values, gamma=1.5),
        lambda: ConstantCredit(float("inf")),
    ],
)
def test_settings_that_cannot_work_are_refused(make):
    with pytest.raises(ConfigError, match="="):
        make()
