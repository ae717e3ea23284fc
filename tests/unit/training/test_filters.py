"""Filters of items and preprocess hooks of batches, by hand."""

import pytest

from ludic.training.filters import (
    any_of,
    apply_filter,
    combine,
    compose_preprocess,
    default_step_selector,
    drop_incomplete_completions,
    drop_parse_errors,
    drop_truncated,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    keep_agent_steps,
    keep_all,
    keep_env_steps,
    validate_actor_logps,
)
from ludic.types import ActorTokenLogps, ConfigError, SAWBatch
from tests.unit.training.hand_made import agent_step, env_step, item

CASES = [
    (drop_truncated, {"truncated": False}, {"truncated": True}),
    (drop_incomplete_completions, {"finish_reason": "stop"}, {"finish_reason": "length"}),
    (drop_parse_errors, {"num_parse_errors": 0}, {"num_parse_errors": 1}),
    (keep_env_steps, {"step_kind": "env"}, {"step_kind": "agent"}),
    (keep_agent_steps, {"step_kind": "agent"}, {"step_kind": "env"}),
]


@pytest.mark.parametrize(("keeps", "good", "bad"), CASES, ids=lambda case: repr(case))
def test_a_filter_is_a_predicate_and_a_factory_of_itself(keeps, good, bad):
    for predicate in (keeps, keeps()):
        assert predicate(item(**good)) is True
        assert predicate(item(**bad)) is False


@pytest.mark.parametrize("keeps", [keep_all, drop_truncated, drop_incomplete_completions, drop_parse_errors])
def test_missing_facts_keep_an_item(keeps):
    assert keeps(item())
    assert keeps(item(finish_reason=None))


def test_combine_keeps_what_all_keep_and_any_of_what_one_keeps():
    cut_off, unread, both, fine = (
        item(truncated=True),
        item(num_parse_errors=1),
        item(truncated=True, num_parse_errors=2),
        item(),
    )
    items = [cut_off, unread, both, fine]
    assert apply_filter(items, combine(drop_truncated(), drop_parse_errors)) == [fine]
    assert apply_filter(items, any_of(drop_truncated, drop_parse_errors())) == [cut_off, unread, fine]


def test_default_step_selector_takes_steps_that_close_a_turn():
    assert default_step_selector(env_step(0, turn="t", reward=0.0))
    assert default_step_selector(agent_step(0, turn="t", info={"parse_error": True}))
    assert not default_step_selector(agent_step(0, turn="t", info={"parse_error": False}))
    assert not default_step_selector(agent_step(0, turn="t", action_target="internal", info={"parse_error": True}))


def batch(*items, **meta):
    return SAWBatch(items=list(items), meta=meta)


# --- actor log-probs ------------------------------------------------------------------------------------------


def test_items_without_log_probs_are_named():
    mixed = batch(item(), item(logps=ActorTokenLogps([-0.1, -0.2])), item())
    with pytest.raises(ValueError, match=r"2 of 3 items \(indices 0, 2\) have no actor log-probs.*for_rl"):
        validate_actor_logps(mixed)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_log_probs_that_are_not_finite_are_named(value):
    bad = batch(item(logps=ActorTokenLogps([-0.1, -0.2])), item(logps=ActorTokenLogps([-0.1, value])))
    with pytest.raises(ValueError, match=r"indices 1\) have actor log-probs that are not finite"):
        validate_actor_logps(bad)


# --- zero weights ---------------------------------------------------------------------------------------------


def test_zero_weight_items_are_dropped_and_counted():
    below, at, above, negative = item(0.0), item(1e-4), item(2e-4), item(-1.0)
    given = batch(below, at, above, negative, source="x")
    kept = drop_zero_weight_samples(given)
    assert kept.items == [above, negative]
    assert kept.meta == {"source": "x", "zero_weight_frac": 0.5}
    assert len(given) == 4 and given.meta == {"source": "x"}


def test_token_weights_win_over_the_items_weight():
    one_counts = item(0.0, token_weights=[0.0, -0.5, 0.0])
    none_counts = item(1.0, token_weights=[0.0, 1e-5])
    no_tokens = item(1.0, token_weights=[])
    assert drop_zero_weight_samples(batch(one_counts, none_counts, no_tokens)).items == [one_counts]


# --- groups without spread ------------------------------------------------------------------------------------


def member(weight, *, rollout_id, group_id="g", **facts):
    return item(weight, group_id=group_id, rollout_id=rollout_id, **facts)


def test_group_with_equal_weights_is_dropped():
    alike = [member(0.0, rollout_id=i) for i in "ab"]
    apart = [member(w, rollout_id=i, group_id="h") for w, i in [(-1.0, "c"), (1.0, "d")]]
    kept = filter_zero_variance_groups(batch(alike[0], apart[0], alike[1], apart[1], source="x"))
    assert kept.items == apart
    assert kept.meta == {"source": "x", "zvp_filter_frac": 0.5}


def test_several_segments_of_one_rollout_are_one_member():
    # equal weights on three items, but of one rollout: there is no other to compare it with
    alone = [member(0.5, rollout_id="a") for _ in range(3)]
    assert filter_zero_variance_groups(batch(*alone)).items == alone
    # two members alike, one cut into three segments
    assert filter_zero_variance_groups(batch(*alone, member(0.5, rollout_id="b"))).items == []


def test_equal_weight_profiles_are_dropped_whatever_their_turns():
    # both rollouts got 0 then 1: in separate items, or token by token, for any number of tokens
    a = [member(0.0, rollout_id="a"), member(1.0, rollout_id="a")]
    b = [member(1.0, rollout_id="b", token_weights=[0.0, 0.0, 1.0])]
    assert filter_zero_variance_groups(batch(*a, *b)).items == []
    # 0 then 1 and 1 then 0 have the same mean, and still teach something
    c = [member(1.0, rollout_id="c"), member(0.0, rollout_id="c")]
    assert filter_zero_variance_groups(batch(*a, *c)).items == [*a, *c]
    # as has one that went on for another turn
    d = [member(0.0, rollout_id="d"), member(1.0, rollout_id="d"), member(2.0, rollout_id="d")]
    assert filter_zero_variance_groups(batch(*a, *d)).items == [*a, *d]


def test_roles_of_one_group_are_compared_separately():
    x = [member(1.0, rollout_id=i, agent_id="x") for i in "ab"]
    o = [member(w, rollout_id=i, agent_id="o") for w, i in [(1.0, "c"), (-1.0, "d")]]
    assert filter_zero_variance_groups(batch(*x, *o)).items == o


def test_zero_variance_uses_the_sample_standard_deviation():
    # of 0 and 1 it is sqrt(0.5) = 0.7071
    pair = batch(member(0.0, rollout_id="a"), member(1.0, rollout_id="b"))
    assert len(filter_zero_variance_groups(pair, eps=0.7071)) == 2
    assert len(filter_zero_variance_groups(pair, eps=0.7072)) == 0


# --- both -----------------------------------------------------------------------------------------------------


def test_hooks_run_in_order():
    hooks = compose_preprocess(drop_zero_weight_samples, validate_actor_logps)
    good = item(logps=ActorTokenLogps([-0.1, -0.2]))
    assert hooks(batch(item(0.0), good)).items == [
        good
    ]  # the one without log-probs was dropped before they were checked
    with pytest.raises(ValueError, match="no actor log-probs"):
        compose_preprocess(validate_actor_logps, drop_zero_weight_samples)(batch(item(0.0), good))


@pytest.mark.parametrize("hook", [drop_zero_weight_samples, filter_zero_variance_groups])
def test_an_empty_batch_stays_empty_and_a_bad_eps_is_refused(hook):
    assert hook(batch()).items == []
    for eps in (-1e-9, float("nan")):
        with pytest.raises(ConfigError, match="eps"):
            hook(batch(item()), eps=eps)
