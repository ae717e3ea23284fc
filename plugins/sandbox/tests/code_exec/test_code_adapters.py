import json

import pytest

from ludic import registry
from ludic.types import ConfigError
from ludic_sandbox.code_exec import (
    APPSTestAdapter,
    HumanEvalTestAdapter,
    MBPPTestAdapter,
    ProgramTestAdapter,
    WhitespaceNormalizedVerifier,
)

HUMANEVAL = registry.envs.spec("humaneval").example["sample"]
MBPP = registry.envs.spec("mbpp").example["sample"]


# --- programs ---


def test_a_sample_of_your_own_brings_its_tests_with_weights_and_limits():
    sample = {
        "id": 7,
        "question": "Double it.",
        "tests": [
            {"input": 1, "expected": 2},
            {"input": "2", "expected": "4", "id": "b", "weight": 3, "timeout_s": 1.5},
        ],
        "solution": "print(2 * int(input()))",
    }
    adapter = ProgramTestAdapter()
    one, two = adapter.get_tests(sample)
    assert (one.input, one.expected, one.id, one.weight) == ("1", "2", "1", 1.0)
    assert (two.id, two.weight, two.timeout_s(5.0)) == ("b", 3.0, 1.5)
    assert adapter.get_prompt(sample) == "Double it." and adapter.get_problem_id(sample) == "7"
    assert adapter.get_reference(sample) == sample["solution"]


@pytest.mark.parametrize("test", [{"input": "1"}, {"input": "1", "expected": "2", "time": 3}])
def test_a_test_with_missing_or_unknown_fields_is_named(test):
    with pytest.raises(ConfigError, match="Test 1 of sample 'x' has"):
        ProgramTestAdapter().get_tests({"id": "x", "question": "", "tests": [test]})


def test_a_missing_field_of_a_sample_is_named_with_those_it_has():
    with pytest.raises(ConfigError, match="The sample has no 'tests'; it has id, question"):
        ProgramTestAdapter().get_tests({"id": 1, "question": ""})


def test_apps_is_read_from_lists_and_from_the_json_of_the_original():
    lists = {"problem_id": 3, "question": "q", "inputs": ["1\n", ["2", "3"]], "outputs": ["a\n", ["b"]]}
    packed = {"problem_id": 3, "question": "q", "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["a\n"]}),
              "solutions": json.dumps(["first", "second"])}  # fmt: skip
    adapter = APPSTestAdapter()
    assert [(t.input, t.expected) for t in adapter.get_tests(lists)] == [("1\n", "a\n"), ("2\n3", "b")]
    assert [(t.input, t.expected, t.id) for t in adapter.get_tests(packed)] == [("1\n", "a\n", "1")]
    assert adapter.get_reference(packed) == "first" and adapter.get_reference(lists) is None
    assert adapter.get_problem_id(packed) == "3" and isinstance(adapter.verifier, WhitespaceNormalizedVerifier)


def test_apps_takes_other_names_of_fields():
    adapter = APPSTestAdapter(question_key="task", inputs_key="given", outputs_key="wanted", problem_id_key="key")
    sample = {"task": "q", "given": ["1"], "wanted": ["2"], "key": "k"}
    assert adapter.get_prompt(sample) == "q" and adapter.get_problem_id(sample) == "k"
    assert adapter.get_tests(sample)[0].expected == "2"


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"input_output": json.dumps({"fn_name": "solve", "inputs": [[1]], "outputs": [1]})}, "asks for a function"),
        ({"question": "q"}, "no 'input_output' or 'inputs'"),
    ],
)
def test_an_apps_problem_that_cannot_be_graded_says_why(sample, named):
    with pytest.raises(ValueError, match=named):
        APPSTestAdapter().get_tests(sample)


# --- functions ---


def test_each_plain_assert_of_humaneval_is_a_test_under_the_function_s_own_name():
    tests = HumanEvalTestAdapter().get_tests(HUMANEVAL)
    assert [t.expected for t in tests] == [
        "assert without_vowels('Anna') == 'nn'",
        "assert without_vowels('') == ''",
        "assert not without_vowels('aEiOu')",
    ]
    assert tests[0].input == "without_vowels('Anna')" and tests[0].metadata["functions"] == ["without_vowels"]


def test_asserts_that_call_nothing_are_no_tests():
    sample = {**HUMANEVAL, "test": "def check(candidate):\n    assert True\n    assert candidate('x') == 'x'\n"}
    assert len(HumanEvalTestAdapter().get_tests(sample)) == 1


def test_a_check_with_a_loop_is_one_test_that_brings_the_prompt_along():
    body = "def check(candidate):\n    for word in ['a']:\n        assert candidate(word) == ''\n"
    (test,) = HumanEvalTestAdapter().get_tests({**HUMANEVAL, "test": body})
    assert test.expected.startswith(body) and test.expected.rstrip().endswith("check(without_vowels)")
    assert test.metadata["setup"] == HUMANEVAL["prompt"] and "assert" not in test.input


def test_a_humaneval_test_without_check_is_refused():
    with pytest.raises(ConfigError, match=r"defines no check\(candidate\)"):
        HumanEvalTestAdapter().get_tests({**HUMANEVAL, "test": "assert True"})


@pytest.mark.parametrize(
    "code", ["    return text", "def without_vowels(text):\n    return text", "without_vowels = lambda text: text"]
)
def test_a_body_and_a_whole_function_both_become_the_same_program(code):
    namespace: dict = {}
    exec(HumanEvalTestAdapter().get_program(HUMANEVAL, code), namespace)
    assert namespace["without_vowels"]("abc") == "abc"


def test_every_entry_of_mbpp_is_a_test_and_the_prompt_shows_the_first():
    adapter = MBPPTestAdapter()
    tests = adapter.get_tests(MBPP)
    assert [t.expected for t in tests] == MBPP["test_list"] and tests[2].input == "digit_sum(-19)"
    prompt = adapter.get_prompt(MBPP)
    assert MBPP["test_list"][0] in prompt and MBPP["test_list"][1] not in prompt
    assert MBPP["test_list"][2] in MBPPTestAdapter(num_shown_tests=3).get_prompt(MBPP)


def test_mbpp_knows_the_function_under_test_from_the_reference_or_from_what_is_no_builtin():
    sample = {"prompt": "", "test_list": ["assert set(mine((1, 2))) == set([1])"], "test_imports": ["import math"]}
    (test,) = MBPPTestAdapter().get_tests(sample)
    assert test.metadata["functions"] == ["mine"] and "import math" in test.metadata["setup"]
    shadow = {**sample, "code": "import sys\ndef set(x): return x", "test_list": ["assert set(1) == 1"]}
    (test,) = MBPPTestAdapter().get_tests(shadow)
    assert test.metadata["functions"] == ["set"] and "import sys" in test.metadata["setup"]


def test_the_setup_of_an_mbpp_problem_may_use_a_class_of_the_reference():
    sample = {
        "prompt": "",
        "code": "class Node:\n    def __init__(self, x): self.x = x\ndef value(node): return node.x",
        "test_setup_code": "root = Node(1)",
        "test_list": ["assert value(root) == 1"],
    }
    (test,) = MBPPTestAdapter().get_tests(sample)
    names: dict = {}
    exec(test.metadata["setup"], names)
    assert names["root"].x == 1 and "value" not in names


def test_mbpp_refuses_what_cannot_be_asked():
    with pytest.raises(ConfigError, match="calls no function of the program"):
        MBPPTestAdapter().get_tests({"prompt": "", "test_list": ["assert len([]) == 0"]})
    with pytest.raises(ConfigError, match="num_shown_tests=0"):
        MBPPTestAdapter(num_shown_tests=0)
