import numpy as np
import pytest

from ludic.types import TokenLog, TokenTrace, VersionRun, token_array


def test_a_trace_stores_compact_arrays():
    trace = TokenTrace([1, 2], [3, 4], [-0.5, -1.0], "stop")
    assert trace.prompt_token_ids.dtype == np.int32 and trace.prompt_token_ids.tolist() == [1, 2]
    assert trace.completion_logprobs.dtype == np.float32
    assert trace.finish_reason == "stop" and trace.policy_version is None


@pytest.mark.parametrize("bad", ["abc", b"abc", [1.5], ["a"], [[1]], 7, [True, False]])
def test_ids_that_are_not_integers_are_a_type_error(bad):
    with pytest.raises(TypeError, match="prompt_token_ids"):
        TokenTrace(bad, [1])


def test_logprobs_that_are_not_numbers_are_a_type_error():
    with pytest.raises(TypeError, match="completion_logprobs"):
        TokenTrace([1], [2], ["x"])


def test_as_many_logprobs_as_completion_tokens_are_required():
    with pytest.raises(ValueError, match="2 completion tokens but 1 logprobs"):
        TokenTrace([1], [2, 3], [-0.1])


def test_ids_beyond_32_bits_are_refused_instead_of_wrapped():
    with pytest.raises(ValueError, match="32 bits"):
        token_array([2**31])


def test_version_runs_must_cover_the_completion():
    trace = TokenTrace([1], [2, 3, 4], version_runs=[(7, 1), (8, 2)])
    assert trace.version_runs == (VersionRun(7, 1), VersionRun(8, 2))
    assert trace.policy_version == 7  # staleness counts from the oldest
    with pytest.raises(ValueError, match="cover 2 tokens"):
        TokenTrace([1], [2, 3, 4], version_runs=[(7, 2)])


def test_a_trace_survives_its_dictionary():
    trace = TokenTrace([1, 2], [3], [-0.1], "stop", [(4, 1)], 0.7)
    assert TokenTrace.from_dict(trace.to_dict()) == trace
    assert TokenTrace([1, 2], [3]) != trace


def test_a_dictionary_without_ids_is_refused():
    with pytest.raises(ValueError, match="completion_token_ids"):
        TokenTrace.from_dict({"prompt_token_ids": [1]})


def test_a_trace_cannot_be_changed():
    trace = TokenTrace([1], [2])
    with pytest.raises(AttributeError):
        trace.finish_reason = "x"
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_token_ids[0] = 9


def test_earlier_views_of_a_log_do_not_see_later_tokens():
    log = TokenLog([1, 2])
    early = log.view()
    log.append(list(range(1000)))
    assert early.tolist() == [1, 2] and len(log) == 1002
    assert log.view()[:4].tolist() == [1, 2, 0, 1]
