"""`EpisodeCredit`: the threads of a session get the credit that one rollout with all calls would get."""

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.training.algorithms import make_grpo, with_episode_credit
from ludic.training.credit_assignment import (
    BetaValueTracker,
    EpisodeCredit,
    EpisodicReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    LeaveOneOutReturn,
    MonteCarloReturn,
    PerStepReward,
    TrackedValueReturn,
    TurnGroupReturn,
)
from ludic.types import FollowsDrift, Rollout, StopReason
from tests.unit.training.hand_made import failed, rollout, session

pytestmark = pytest.mark.slow

near = pytest.approx
GRPO = GroupNormalizedReturn(3, normalize_adv=True)


def call_weights(rule, *sessions):
    """Per session: time of a call → its weight, which is that of its turn's last step."""
    weights = rule.compute([thread for threads in sessions for thread in threads])
    return [
        {turn.steps[0].ts_ns: weights[thread.id, turn.last.index] for thread in threads for turn in thread.turns()}
        for threads in sessions
    ]


# --- one advantage per session ------------------------------------------------------------------------------


def test_sessions_with_one_two_and_three_threads_get_the_advantages_of_single_ones():
    rewards = (0.0, 1.0, 2.0)
    forked = [session(0.0, [0, 1]), session(1.0, [0, 3], [1, 2]), session(2.0, [0, 9], [1, 5], [2])]
    single = [session(reward, [0]) for reward in rewards]
    # mean 1, population variance 2/3 -> -sqrt(3/2), 0, sqrt(3/2), on every call of every thread
    top = 1.5**0.5
    found = call_weights(EpisodeCredit(GRPO), *forked)
    assert found == [near({0: -top, 1: -top}), near({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}), near({0: top, 9: top, 1: top, 5: top, 2: top})]  # fmt: skip
    alone = call_weights(GRPO, *single)
    assert [set(weights.values()) for weights in found] == [set(weights.values()) for weights in alone]


def test_rewards_of_threads_count_for_their_session():
    # session a: 1 + 0.5 (a call of its thread) = 1.5; session b: 0 -> mean 0.75
    a = session(1.0, [0, 2], [1], call_rewards={1: 0.5})
    found = call_weights(EpisodeCredit(GroupNormalizedReturn(2)), a, session(0.0, [0]))
    assert found == [near({0: 0.75, 1: 0.75, 2: 0.75}), near({0: -0.75})]


def test_without_it_a_forked_session_is_refused():
    with pytest.raises(ValueError, match="group_size=2"):
        GroupNormalizedReturn(2).compute([*session(1.0, [0], [1]), *session(0.0, [0])])


# --- turn by turn -------------------------------------------------------------------------------------------


def test_monte_carlo_discounts_over_the_calls_of_all_threads_in_time_order():
    # calls at 0 1 2 3; the reward 8 ends the main thread's last call, at 3
    found = call_weights(EpisodeCredit(MonteCarloReturn(gamma=0.5)), session(8.0, [0, 3], [1, 2]))
    assert found == [near({0: 1.0, 1: 2.0, 2: 4.0, 3: 8.0})]


def test_calls_get_what_followed_them_in_any_thread():
    # call 1 earns 4, call 2 earns 2, the session 1: G_3 = 1, G_2 = 3, G_1 = 7, G_0 = 7
    found = call_weights(EpisodeCredit(MonteCarloReturn()), session(1.0, [0, 3], [1, 2], call_rewards={1: 4.0, 2: 2.0}))
    assert found == [near({0: 7.0, 1: 7.0, 2: 3.0, 3: 1.0})]


def test_a_thread_that_goes_on_after_the_main_ones_last_call_still_earns_the_sessions_reward():
    # the main thread's last turn lasts until the reward, so it is the last one: G = 8 at 1, 4 at 3, 2 at 2, 1 at 0
    found = call_weights(EpisodeCredit(MonteCarloReturn(gamma=0.5)), session(8.0, [0, 1], [2, 3]))
    assert found == [near({0: 1.0, 2: 2.0, 3: 4.0, 1: 8.0})]


def test_per_step_rules_keep_each_steps_own_reward():
    found = call_weights(EpisodeCredit(PerStepReward()), session(1.0, [0, 3], [1, 2], call_rewards={2: -0.5}))
    assert found == [{0: 0.0, 1: 0.0, 2: -0.5, 3: 1.0}]


def test_turn_groups_compare_calls_by_their_number_in_the_session():
    # returns-to-go: a 1 1 1 (threads [0 2] [1]), b 0 0 0 (one thread): means 0.5 at each of three calls
    found = call_weights(EpisodeCredit(TurnGroupReturn(2)), session(1.0, [0, 2], [1]), session(0.0, [0, 1, 2]))
    assert found == [near({0: 0.5, 1: 0.5, 2: 0.5}), near({0: -0.5, 1: -0.5, 2: -0.5})]


# --- which rollouts are one ---------------------------------------------------------------------------------


def test_policies_of_one_session_are_credited_apart():
    a = [*session(1.0, [0, 3], [2], run="a", policy="p"), *session(5.0, [1], run="a", policy="q")]
    b = [*session(3.0, [0], run="b", policy="p"), *session(9.0, [1], [2], run="b", policy="q", agent_id="other")]
    found = call_weights(EpisodeCredit(EpisodicReturn()), a, b)
    assert found == [{0: 1.0, 3: 1.0, 2: 1.0, 1: 5.0}, {0: 3.0, 1: 9.0, 2: 9.0}]


def test_players_and_sub_tasks_of_an_engines_episode_stay_apart():
    facts = {"engine": {"episode_run": "e"}, "model": "p"}
    players = [rollout([1.0], agent_id="X", **facts), rollout([-1.0], agent_id="O", **facts)]
    helper = rollout([0.25], agent_id="X", delegate="searcher", parent_step_id="s", **facts)
    batch = [*players, helper, rollout([3.0]), rollout([4.0])]
    assert EpisodeCredit(MonteCarloReturn()).compute(batch) == MonteCarloReturn().compute(batch)


def test_the_merged_rollout_has_the_main_ones_meta_and_stop():
    seen = []

    class Looks:
        def compute(self, rollouts):
            seen.extend(rollouts)
            return {(r.id, step.index): 0.0 for r in rollouts for step in r.steps}

    threads = session(1.0, [0, 3], [1, 2], stop=StopReason.MAX_STEPS)
    before = copy.deepcopy(threads)
    EpisodeCredit(Looks()).compute(threads[::-1])
    (merged,) = seen
    assert (merged.id, merged.meta, merged.stop) == (threads[0].id, threads[0].meta, StopReason.MAX_STEPS)
    assert [step.ts_ns for step in merged.steps] == [0, 1, 2, 3, 1_000]
    assert [step.index for step in merged.steps] == [0, 1, 2, 3, 4] and len(merged.turns()) == 4
    assert threads == before, "the rollouts themselves are left as they were"


def test_a_failed_thread_gets_no_weight_and_its_session_counts():
    a, b = session(1.0, [0], [1]), session(0.0, [0])
    broken = Rollout.failed(RuntimeError("cut"), meta=a[1].meta)
    weights = EpisodeCredit(GroupNormalizedReturn(2)).compute([*a, broken, *b])
    assert weights == {(a[0].id, 0): 0.5, (a[0].id, 1): 0.5, (a[1].id, 0): 0.5, (b[0].id, 0): -0.5, (b[0].id, 1): -0.5}


def test_threads_of_a_failed_main_rollout_get_zero_and_join_no_group():
    a, b, c = session(1.0, [0], [1]), session(0.0, [0]), session(2.0, [0], [1])
    broken = Rollout.failed(RuntimeError("the reward raised"), meta=a[0].meta)
    weights = EpisodeCredit(GroupNormalizedReturn(2)).compute([broken, a[1], *b, *c])
    assert weights[a[1].id, 0] == 0.0
    assert (weights[b[0].id, 0], weights[c[0].id, 0], weights[c[1].id, 0]) == (-1.0, 1.0, 1.0)
    assert EpisodeCredit(EpisodicReturn()).compute([failed()]) == {}


# --- properties ---------------------------------------------------------------------------------------------

TREES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 1.0, -2.0]), st.lists(st.integers(0, 3), min_size=1, max_size=8)),
    min_size=2,
    max_size=4,
)


def sessions_of(trees):
    """The call at time t is of thread tree[t]; the first call and the last are the main thread's."""
    found = []
    for reward, tree in trees:
        owners = [0, *tree, 0]
        threads = [[t for t, own in enumerate(owners) if own == number] for number in sorted(set(owners))]
        found.append((session(reward, *threads), session(reward, range(len(owners)))))
    return found


@given(TREES, st.integers(0, 10**6))
@pytest.mark.parametrize(
    "make",
    [
        lambda n: GroupNormalizedReturn(n, normalize_adv=True),
        HybridNormalizedReturn,
        LeaveOneOutReturn,
        lambda n: MonteCarloReturn(0.7),
        lambda n: TurnGroupReturn(n, 0.7),
    ],
)
def test_any_split_into_threads_and_any_order_gives_the_credit_of_one_thread(make, trees, seed):
    pairs = sessions_of(trees)
    rule = EpisodeCredit(make(len(pairs)))
    shuffled = [thread for threads, _ in pairs for thread in threads]
    random.Random(seed).shuffle(shuffled)
    weights = rule.compute(shuffled)
    assert weights.keys() == {(thread.id, step.index) for thread in shuffled for step in thread.steps}
    found = [
        {turn.steps[0].ts_ns: weights[t.id, turn.last.index] for t in threads for turn in t.turns()}
        for threads, _ in pairs
    ]
    for own, expected in zip(found, call_weights(rule.inner, *[single for _, single in pairs]), strict=True):
        assert own == near(expected)


# --- rules around it ----------------------------------------------------------------------------------------


def test_a_rule_that_follows_drift_is_told_and_saved_and_others_are_not_asked():
    tracker = BetaValueTracker()
    rule = EpisodeCredit(TrackedValueReturn(tracker, key=lambda r: "prompt"))
    assert isinstance(rule, FollowsDrift) and not isinstance(EpisodeCredit(EpisodicReturn()), FollowsDrift)
    rule.notify_drift(0.25)
    weights = rule.compute(session(1.0, [0, 2], [1]))
    assert set(weights.values()) == {0.5}, "an unknown prompt is worth one half"
    assert tracker.drift == 0.25 and len(tracker) == 1
    other = EpisodeCredit(TrackedValueReturn(BetaValueTracker(), key=lambda r: "prompt"))
    other.load_state_dict(rule.state_dict())
    assert other.state_dict() == rule.state_dict()


def test_with_episode_credit_wraps_an_algorithms_rule_once():
    algorithm = make_grpo(group_size=4)
    wrapped = with_episode_credit(algorithm)
    assert wrapped.credit_assigner == EpisodeCredit(algorithm.credit_assigner)
    assert wrapped.credit_assigner.group_size == 4 and wrapped.loss is algorithm.loss
    assert with_episode_credit(wrapped) is wrapped
