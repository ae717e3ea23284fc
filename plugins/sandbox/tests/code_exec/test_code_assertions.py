from typing import Any

import pytest

from ludic_sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus
from ludic_sandbox.code_exec import assert_runner
from ludic_sandbox.code_exec.assert_runner import _judge, _note, _result, _State
from ludic_sandbox.code_exec.assertions import Call, calls_in, is_plain, judge
from ludic_sandbox.code_exec.batch import Served
from ludic_sandbox.code_exec.cases import TestCase
from ludic_sandbox.code_exec.plain_data import Opaque, dumps, encode, to_json

pytestmark = pytest.mark.slow

F = frozenset({"f"})
F1 = Call("f", dumps(((1,), {})))


def answered(*values, args=((1,),)):
    """Answers to f(1), or to calls with the given positional arguments."""
    calls = [Call("f", dumps((each, {}))) for each in (args if len(args) == len(values) else args * len(values))]
    return [(call, {"value": encode(value)}) for call, value in zip(calls, values, strict=True)]


@pytest.mark.parametrize(
    ("assertion", "value", "passes"),
    [
        ("assert f(1) == 2", 2, True),
        ("assert f(1) == 2", 3, False),
        ("assert f(1) == (1, 2)", [1, 2], False),  # as in Python
        ("assert f(1) == [1, 2], 'message'", [1, 2], True),
        ("assert f(1)", Opaque("Match", True), True),
        ("assert not f(1)", Opaque("range", False), True),
        ("assert f(1) is None", None, True),
        ("assert f(1) is True", 1, False),
        ("assert abs(f(1) - 0.33) < 1e-6", 0.33 + 1e-9, True),
        ("assert abs(f(1) - 0.33) < 1e-6", "text", False),  # a TypeError is a failure
        ("assert set(f(1)) == {1, 2}", (2, 1, 1), True),
        ("assert set(f(1)) == {1, 2}", [[1]], False),
        ("assert math.isclose(f(1), 1.0, rel_tol=0.1)", 1.05, True),
        ("assert tuple(f(1)) == tuple([1, 2])", [1, 2], True),
        ("assert f(1) == {'a': [1], 2: {3}}", {"a": [1], 2: {3}}, True),
        ("assert f(1)[0] == 'x' and len(f(1)) == 1", "x", True),
        ("assert 1 < f(1) <= 3 != 4", 3, True),
        ("assert f(1) == 3 * 5 ** 2 - -1 // 1 % 7", 69, True),
        ("assert f(1) in [1, 2] or f(1) == 9", 9, True),
        ("assert f(1) == 1", Opaque("Liar", True), False),
    ],
)
def test_an_assertion_is_judged_over_the_answers(assertion, value, passes):
    assert is_plain(assertion, F)
    num_calls = len(calls_in(assertion, F))
    judgement = judge(assertion, F, answered(*[value] * num_calls))
    assert judgement.passed is passes and not judgement.needs
    assert passes or "f(1) returned" in judgement.details


def test_calls_without_an_answer_are_asked_for_in_the_order_of_evaluation():
    assertion = "assert f(f(1)) == 3"
    first = judge(assertion, F, [])
    assert first.needs == (F1,) and not first.passed
    second = judge(assertion, F, answered(2))
    assert second.needs == (Call("f", dumps(((2,), {}))),)
    assert judge(assertion, F, answered(2, 3, args=((1,), (2,)))).passed


def test_keyword_arguments_are_part_of_the_call():
    assert judge("assert f(1, key=[2])", F, []).needs == (Call("f", dumps(((1,), {"key": [2]}))),)


def test_an_exception_of_the_candidate_fails_the_assertion_and_is_reported():
    judgement = judge("assert f(1) == 2", F, [(F1, {"error": "ValueError: no", "type": "ValueError"})])
    assert not judgement.passed and judgement.details == "f(1) raised ValueError: no"


@pytest.mark.parametrize(
    "assertion",
    [
        "assert open('/etc/passwd') == f(1)",
        "assert f(1).__class__ == int",
        "assert [x for x in f(1)]",
        "assert eval('f(1)')",
        "assert (lambda: f(1))() == 1",
        "assert f(*[1])",
        "assert f(**{'x': 1})",
        "assert {**f(1)}",
        "assert sys.getsizeof(f(1)) == 1",
        "assert undefined == f(1)",
        "x = f(1)",
        "assert f(1); assert f(2)",
        "assert f(",
        "for i in f(1): assert i",
    ],
)
def test_anything_beyond_expressions_over_plain_data_is_left_to_the_test_program(assertion):
    assert not is_plain(assertion, F)


@pytest.mark.parametrize(
    ("assertion", "value"),
    [
        ("assert f(1) * f(1) > 0", 1 << 200_000),
        ("assert f(1) ** f(1) > 0", 10**6),
        ("assert f(1) * 100000000", "ab"),
        ("assert 100000000 * f(1)", [1, 2]),
        ("assert f(1) % 5 == ''", "%999999999d"),
    ],
    ids=["product", "power", "text", "list", "format"],
)
def test_no_answer_makes_the_judge_compute_endlessly(assertion, value):
    assert not judge(assertion, F, answered(*[value] * assertion.count("f(1)"))).passed


def test_a_function_under_test_may_have_the_name_of_a_builtin():
    mine = frozenset({"sum"})
    call = Call("sum", dumps((([1, 2],), {})))
    assert not judge("assert sum([1, 2]) == 3", mine, [(call, {"value": 4})]).passed


# --- long answers ---

MODULUS = 2**61 - 1
"""Of Python's hash of an integer: its multiples all have the hash 0."""


def told(data: Any, test: str) -> _State:
    """A test whose program has answered f(1) with `data`, as it is after its first round."""
    return noted(to_json([{"value": data}]), test)


def noted(answers: str, test: str) -> _State:
    state = _State(TestCase(input="", expected=test, id="t", metadata={"functions": ["f"]}), F)
    state.judgement = judge(test, F, [])
    ran = ExecutionResult(compile_result=CompileResult(status=CompileStatus.SUCCESS), run_status=RunStatus.SUCCESS)
    _note(state, Served(execution=ran, answers=answers))
    return state


COLLIDING = [number * MODULUS for number in range(1, 5000)]


@pytest.mark.parametrize(
    ("data", "test"),
    [
        ({"set": COLLIDING}, "assert f(1) == {1}"),
        ({"dict": [[number, 0] for number in COLLIDING[:4000]]}, "assert f(1) == {1: 1}"),
        (COLLIDING, "assert set(f(1)) == {1}"),
        ([[1]] * 30_000, "assert sum(f(1), []) == [1]"),
    ],
)
async def test_a_long_answer_is_judged_in_a_worker_and_has_a_time_limit(data, test, monkeypatch):
    def not_here(*args: object) -> None:
        raise AssertionError("it was judged on the event loop")

    monkeypatch.setattr(assert_runner, "judge", not_here)
    monkeypatch.setattr(assert_runner, "_JUDGE_S", 1.0)
    state = told(data, test)
    await _judge(None, state)
    assert state.judgement is not None and not state.judgement.passed
    assert not _result(state).passed


@pytest.mark.parametrize(("length", "passed"), [(5000, True), (5001, False)])
async def test_an_honest_long_answer_gets_its_verdict(length, passed):
    state = told(encode(list(range(length))), f"assert f(1) == {list(range(5000))}")
    await _judge(None, state)
    assert state.judgement.passed is passed and (passed or "f(1) returned [0, 1," in state.judgement.details)


@pytest.mark.parametrize(
    "answers", ['["value"]', "[1]", '[{"values": 1}]', "{}", '[{"value": {"no": 1}}]', '[{"value": {"set": [[1]]}}]']
)
async def test_an_answer_of_another_form_fails_its_test(answers):
    state = noted(answers, "assert f(1) == 1")
    if state.judgement is None:
        await _judge(None, state)
    assert not _result(state).passed
