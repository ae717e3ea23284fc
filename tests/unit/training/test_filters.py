import pytest

from ludic.training import filters
from ludic.training.filters import (
    any_of,
    apply_filter,
    combine,
    default_step_selector,
    drop_incomplete_completions,
    drop_parse_errors,
    drop_truncated,
    keep_agent_steps,
    keep_all,
    keep_env_steps,
)
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
def test_what_an_item_does_not_say_does_not_drop_it(keeps):
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


def test_combining_nothing_is_the_neutral_filter():
    assert combine()(item()) is True
    assert any_of()(item()) is False


def test_filters_say_their_name_and_purpose():
    named = [value for value in vars(filters).values() if isinstance(value, filters.NamedFilter)]
    assert len(named) == 6
    for each in named:
        assert vars(filters)[repr(each)] is each and each.__doc__


def test_the_default_selector_takes_the_steps_that_close_a_turn():
    assert default_step_selector(env_step(0, turn="t", reward=0.0))
    assert default_step_selector(agent_step(0, turn="t", info={"parse_error": True}))
    assert not default_step_selector(agent_step(0, turn="t", info={"parse_error": False}))
    assert not default_step_selector(agent_step(0, turn="t", action_target="internal", info={"parse_error": True}))
