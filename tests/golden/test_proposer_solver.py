"""Proposer and solver worked by hand: what a task is worth, who is compared with whom, value and gradient."""

import pytest

from ludic.training.algorithms import make_proposer_solver
from ludic.training.credit_assignment import ProposerSolverReturn, learnability
from ludic.types import ConfigError
from tests.golden.tokens import by_hand
from tests.unit.training.hand_made import failed, rollout, turn_weights

near = pytest.approx


def test_a_task_that_half_solve_is_worth_most():
    # 1 − |p − ½| / ½
    assert [learnability(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)] == near([0.0, 0.5, 1.0, 0.5, 0.0])
    # target ¼: the furthest rate is 1, at ¾ distance
    assert [learnability(p, target=0.25) for p in (0.0, 0.25, 1.0)] == near([2 / 3, 1.0, 0.0])
    with pytest.raises(ConfigError, match="rates"):
        learnability(1.5)


def episode(name, proposed, *solved, group=None):
    facts = {"engine": {"episode_run": name}}
    solvers = [rollout([reward], group=group, agent_id=f"solver_{n}", **facts) for n, reward in enumerate(solved)]
    return [rollout([0.0, proposed], group=group, agent_id="proposer", **facts), *solvers]


def weights_of(rollouts, **settings):
    found = ProposerSolverReturn(**settings).compute(rollouts)
    return [set(turn_weights(found, of=r)) for r in rollouts if r.failure is None]


def test_attempts_are_compared_within_their_task_and_proposals_with_each_other():
    # task a: 1 of 4 solved: mean ¼: ¾ and −¼. Task b: 3 of 4: ¼ and −¾. Proposals ½ and ½ and 0 (c, none solved): mean ⅓.
    rollouts = [
        *episode("a", 0.5, 1.0, 0.0, 0.0, 0.0),
        *episode("b", 0.5, 1.0, 1.0, 0.0, 1.0),
        *episode("c", 0.0, 0.0, 0.0, 0.0, 0.0),
        failed(),
    ]
    found = [min(own) for own in weights_of(rollouts, normalize_adv=False)]
    assert found == near([1 / 6, 0.75, -0.25, -0.25, -0.25, 1 / 6, 0.25, 0.25, -0.75, 0.25, -1 / 3, 0.0, 0.0, 0.0, 0.0])


def test_weights_are_divided_by_the_spread():
    # 1 of 4: deviation √3 / 4: √3 and −1/√3; proposals 1 and 0: ±1
    rollouts = [*episode("a", 1.0, 1.0, 0.0, 0.0, 0.0), *episode("b", 0.0, 1.0, 1.0, 1.0, 1.0)]
    found = [min(own) for own in weights_of(rollouts)]
    assert found == near([1.0, 3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5), -1.0, 0.0, 0.0, 0.0, 0.0], abs=1e-6)


def test_proposals_of_different_groups_are_not_compared():
    rollouts = [
        r for n, (g, p) in enumerate([("g", 1.0), ("g", 0.0), ("h", 1.0)]) for r in episode(f"e{n}", p, 1.0, group=g)
    ]
    proposals = [
        own
        for own, r in zip(weights_of(rollouts, normalize_adv=False), rollouts, strict=True)
        if r.agent_id == "proposer"
    ]
    assert proposals == [{0.5}, {-0.5}, {0.0}]


def test_a_trainer_of_one_role_gets_the_same_weights():
    rollouts = [*episode("a", 1.0, 1.0, 0.0), *episode("b", 0.0, 1.0, 1.0)]
    rule = ProposerSolverReturn()
    whole = rule.compute(rollouts)
    for is_proposer in (True, False):
        own = [r for r in rollouts if (r.agent_id == "proposer") is is_proposer]
        assert rule.compute(own) == {key: whole[key] for key in rule.compute(own)}


def test_attempts_at_a_dataset_are_compared_in_their_group():
    given = [rollout([reward], engine={"episode_run": f"e{n}"}) for n, reward in enumerate((1.0, 0.0))]
    assert weights_of(given, normalize_adv=False) == [{0.5}, {-0.5}]


def test_value_and_gradient_on_policy():
    # A = 1, −1 at two samples of 2 and 1 tokens, all ratios 1, sum over 2 samples: −(1 + 1 − 1) / 2, gradient −A / 2 each.
    tokens = by_hand([-1.0, -2.0, -0.5], [1.0] * 3, [1.0, 1.0, -1.0], [0, 0, 1])
    loss, _ = make_proposer_solver().loss(tokens)
    loss.backward()
    assert loss.item() == near(-0.5) and tokens.logps.grad.tolist() == near([-0.5, -0.5, 0.5])
