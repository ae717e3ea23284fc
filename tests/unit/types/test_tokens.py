import json

import numpy as np
import pytest

from ludic.types import TokenLog, TokenTrace, VersionRun, token_array


@pytest.mark.parametrize("bad", ["abc", b"abc", [1.5], ["a"], [[1]], 7, [True, False]])
def test_ids_that_are_not_integers_are_a_type_error(bad):
    with pytest.raises(TypeError, match="prompt_token_ids"):
        TokenTrace(bad, [1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TokenTrace([1], [2], ["x"]), TypeError, "completion_logprobs"),
        (lambda: TokenTrace([1], [2, 3], [-0.1]), ValueError, "2 completion tokens but 1 logprobs"),
        (lambda: token_array([2**31]), ValueError, "32 bits"),
        (lambda: TokenTrace.from_dict({"prompt_token_ids": [1]}), ValueError, "completion_token_ids"),
    ],
    ids=["text as log-probs", "too few log-probs", "more than 32 bits", "no completion ids"],
)
def test_wrong_ids_and_logprobs_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_version_runs_must_cover_the_completion():
    trace = TokenTrace([1], [2, 3, 4], version_runs=[(7, 1), (8, 2)])
    assert trace.version_runs == (VersionRun(7, 1), VersionRun(8, 2))
    assert trace.policy_version == 7  # staleness counts from the oldest
    with pytest.raises(ValueError, match="cover 2 tokens"):
        TokenTrace([1], [2, 3, 4], version_runs=[(7, 2)])


def test_a_trace_cannot_be_changed():
    trace = TokenTrace([1], [2])
    with pytest.raises(AttributeError):
        trace.finish_reason = "x"
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_token_ids[0] = 9


def test_views_of_a_token_log_do_not_change_with_later_appends():
    log = TokenLog([1, 2])
    early = log.view()
    log.append(list(range(1000)))
    assert early.tolist() == [1, 2] and len(log) == 1002
    assert log.view()[:4].tolist() == [1, 2, 0, 1]


def test_experts_of_a_trace_come_back_from_json_and_are_checked():
    experts = np.arange(5 * 2 * 3).reshape(5, 2, 3) - 1
    trace = TokenTrace([1, 2, 3], [4, 5], experts=experts)
    again = TokenTrace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert again == trace and again.experts.dtype == np.int16 and np.array_equal(again.experts, experts)
    assert not again.experts.flags.writeable
    assert trace != TokenTrace([1, 2, 3], [4, 5]) and "experts" not in TokenTrace([1], [2]).to_dict()
    for wrong in (experts[:4], experts[:, 0], experts - 1, experts + 40_000, experts.astype(float)):
        with pytest.raises(ValueError, match="experts"):
            TokenTrace([1, 2, 3], [4, 5], experts=wrong)
