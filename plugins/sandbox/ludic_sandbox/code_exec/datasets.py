"""Dataset adapters: a sample gives the prompt, the tests, and the program around the agent's code."""

import ast
import builtins
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ludic.types import ConfigError
from ludic.util.files import parse_json
from ludic_sandbox.code_exec.assert_runner import AssertRunner
from ludic_sandbox.code_exec.assertions import calls_in, is_plain
from ludic_sandbox.code_exec.cases import CodeExecConfig, TestCase, hash_tests
from ludic_sandbox.code_exec.runner import (
    CodeRunner,
    ExactMatchVerifier,
    OutputVerifier,
    StdinStdoutRunner,
    WhitespaceNormalizedVerifier,
)

Sample = Mapping[str, Any]

PROGRAM_PROMPT = (
    "Write a Python program that reads from standard input and writes to standard output. "
    "Reason briefly, then give the whole program in one ```python block."
)
FUNCTION_PROMPT = (
    "Write the Python function that is asked for. Reason briefly, then give it whole, with the imports that it needs, "
    "in one ```python block."
)


class TestAdapter(ABC):
    """Reads the samples of one dataset."""

    __test__: ClassVar[bool] = False  # pytest collects classes by their name
    system_prompt: str | None = None
    verifier: OutputVerifier = ExactMatchVerifier()
    runner: ClassVar[type[StdinStdoutRunner | AssertRunner]] = StdinStdoutRunner
    solution_key: str | None = None
    """The field with a solution."""

    @abstractmethod
    def get_tests(self, sample: Sample) -> list[TestCase]: ...

    @abstractmethod
    def get_prompt(self, sample: Sample) -> str: ...

    @abstractmethod
    def get_problem_id(self, sample: Sample) -> str: ...

    def hash_tests(self, tests: Sequence[TestCase]) -> str:
        return hash_tests(tests)

    def get_program(self, sample: Sample, code: str) -> str:
        """The program to run: the agent's code together with the code that the problem gives."""
        return code

    def get_reference(self, sample: Sample) -> str | None:
        """A solution, where the dataset has one."""
        solution = None if self.solution_key is None else sample.get(self.solution_key)
        return None if solution is None else str(solution)

    def get_runner(self, config: CodeExecConfig) -> CodeRunner:
        return self.runner(default_timeout_s=config.timeout_per_test_s, memory_limit_mb=config.memory_limit_mb)


class ProgramTestAdapter(TestAdapter):
    """Your own samples: `{"question": …, "tests": [{"input": …, "expected": …}], "solution": …}`.

    A test may also have `id`, `weight`, `timeout_s` and `memory_limit_mb`; `id` and `solution` of a sample are optional.
    """

    system_prompt = PROGRAM_PROMPT
    solution_key = "solution"

    def get_tests(self, sample: Sample) -> list[TestCase]:
        return [self._test(test, number, sample) for number, test in enumerate(_field_of(sample, "tests"), start=1)]

    def _test(self, test: Mapping[str, Any], number: int, sample: Sample) -> TestCase:
        limits = {name: test[name] for name in ("timeout_s", "memory_limit_mb") if name in test}
        unknown = test.keys() - {"input", "expected", "id", "weight", "timeout_s", "memory_limit_mb"}
        if unknown or not {"input", "expected"} <= test.keys():
            raise ConfigError(
                f"Test {number} of sample {self.get_problem_id(sample)!r} has {sorted(test)}; it should have input and "
                "expected, and may have id, weight, timeout_s and memory_limit_mb."
            )
        return TestCase(
            as_text(test["input"]),
            as_text(test["expected"]),
            id=str(test.get("id", number)),
            weight=float(test.get("weight", 1.0)),
            metadata=limits,
        )

    def get_prompt(self, sample: Sample) -> str:
        return str(_field_of(sample, "question"))

    def get_problem_id(self, sample: Sample) -> str:
        return str(sample.get("id", "0"))


def _field_of(sample: Sample, *names: str) -> Any:
    """The first of these fields that the sample has."""
    for name in names:
        if name in sample:
            return sample[name]
    raise ConfigError(f"The sample has no {' or '.join(map(repr, names))}; it has {', '.join(sorted(sample))}.")


def as_text(value: Any) -> str:
    """Some datasets hold inputs and outputs as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# --- APPS: programs that read stdin, from competitive programming sites ---

APPS_SYSTEM_PROMPT = PROGRAM_PROMPT


class APPSTestAdapter(TestAdapter):
    """Reads inputs and outputs as two lists of the sample, or from the `input_output` JSON of the original dataset."""

    system_prompt = APPS_SYSTEM_PROMPT
    verifier: OutputVerifier = WhitespaceNormalizedVerifier()
    """The comparison of the sites that the problems come from."""

    def __init__(
        self,
        question_key: str = "question",
        inputs_key: str = "inputs",
        outputs_key: str = "outputs",
        problem_id_key: str = "problem_id",
    ) -> None:
        self.question_key = question_key
        self.inputs_key = inputs_key
        self.outputs_key = outputs_key
        self.problem_id_key = problem_id_key

    def get_tests(self, sample: Sample) -> list[TestCase]:
        inputs, outputs = self._inputs_and_outputs(sample)
        if len(inputs) != len(outputs):
            raise ConfigError(
                f"APPS problem {self.get_problem_id(sample)} has {len(inputs)} inputs and {len(outputs)} outputs; each "
                "input needs its output."
            )
        pairs = enumerate(zip(inputs, outputs, strict=True), start=1)
        return [TestCase(as_text(given), as_text(wanted), id=str(number)) for number, (given, wanted) in pairs]

    def _inputs_and_outputs(self, sample: Sample) -> tuple[Sequence[Any], Sequence[Any]]:
        if self.inputs_key in sample:
            return sample[self.inputs_key], _field_of(sample, self.outputs_key)
        unpacked = self._unpacked(sample, _field_of(sample, "input_output", self.inputs_key))
        if unpacked.get("fn_name"):
            raise ConfigError(
                f"APPS problem {self.get_problem_id(sample)} asks for a function ({unpacked['fn_name']}) and not for a "
                "program. Leave such problems out: keep the samples whose input_output has no fn_name."
            )
        return unpacked["inputs"], unpacked["outputs"]

    def get_prompt(self, sample: Sample) -> str:
        return str(_field_of(sample, self.question_key))

    def get_problem_id(self, sample: Sample) -> str:
        return str(sample.get(self.problem_id_key, sample.get("id", "0")))

    def get_reference(self, sample: Sample) -> str | None:
        """The first of the dataset's solutions; some of them are wrong, or written for Python 2."""
        unpacked = self._unpacked(sample, sample.get("solutions") or [])
        return str(unpacked[0]) if unpacked else None

    def _unpacked(self, sample: Sample, packed: Any) -> Any:
        try:
            return parse_json(packed) if isinstance(packed, str) else packed
        except ValueError as error:
            raise ConfigError(f"APPS problem {self.get_problem_id(sample)} cannot be read: {error}.") from error


# --- HumanEval: complete a function from its signature and docstring ---


class HumanEvalTestAdapter(TestAdapter):
    """Samples with `prompt`, `entry_point`, `test` (which defines `check(candidate)`) and `canonical_solution`.

    Where `check` is a list of asserts that can be judged as expressions, each is a separate test; else the whole of
    `check` is one test.
    """

    system_prompt = FUNCTION_PROMPT
    runner = AssertRunner

    def get_tests(self, sample: Sample) -> list[TestCase]:
        function, source = str(_field_of(sample, "entry_point")), str(_field_of(sample, "test"))
        check = self._check(sample, source)
        functions = frozenset({function})
        asserts = [ast.unparse(_Renamed(check.args.args[0].arg, function).visit(node)) for node in _statements(check)]
        if all(is_plain(text, functions) for text in asserts):
            tested = [(text, calls) for text in asserts if (calls := calls_in(text, functions))]  # not `assert True`
            return [
                TestCase("\n".join(calls), text, id=str(number), metadata={"functions": [function]})
                for number, (text, calls) in enumerate(tested, start=1)
            ]
        # Some tests use helper functions of the prompt.
        metadata = {"functions": [function], "setup": str(sample["prompt"])}
        return [TestCase(f"check({function})", f"{source}\n\ncheck({function})\n", id="check", metadata=metadata)]

    def _check(self, sample: Sample, source: str) -> ast.FunctionDef:
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name == "check" and len(node.args.args) == 1:
                return node
        raise ConfigError(f"The test of {self.get_problem_id(sample)} defines no check(candidate).")

    def get_prompt(self, sample: Sample) -> str:
        return f"Complete this function:\n\n```python\n{str(_field_of(sample, 'prompt')).strip()}\n```"

    def get_problem_id(self, sample: Sample) -> str:
        return str(sample.get("task_id", sample.get("id", "0")))

    def get_program(self, sample: Sample, code: str) -> str:
        """A whole function follows the imports and helpers of the prompt; other code continues the prompt."""
        prompt, name = str(sample["prompt"]), sample["entry_point"]
        defines_it = re.search(rf"^(?:def\s+{name}\s*\(|{name}\s*=)", code, re.MULTILINE)
        return f"{prompt.rstrip()}\n    pass\n\n{code}" if defines_it else prompt + code

    def get_reference(self, sample: Sample) -> str | None:
        solution = sample.get("canonical_solution")
        return None if solution is None else f"{sample['prompt']}{solution}"


def _statements(check: ast.FunctionDef) -> list[ast.stmt]:
    """Without docstrings and `pass`."""
    return [
        node
        for node in check.body
        if not isinstance(node, ast.Pass) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


class _Renamed(ast.NodeTransformer):
    """The candidate function under its own name."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self.new, node.ctx), node) if node.id == self.old else node


# --- MBPP: short functions from a sentence, tested by three asserts ---


class MBPPTestAdapter(TestAdapter):
    """Samples with `prompt` (or `text`), `test_list` and `code`; every entry of the list is a test.

    The sentence does not name the function, so the prompt shows the first `num_shown_tests` tests. The original shows all of them
    with the right answers, which an agent would learn to repeat. Problem 123 (amicable_numbers_sum) computes for seconds: give it a
    `timeout_per_test_s` above 5 on a slow machine.
    """

    system_prompt = FUNCTION_PROMPT
    runner = AssertRunner
    solution_key = "code"

    def __init__(self, num_shown_tests: int = 1) -> None:
        if num_shown_tests < 1:
            raise ConfigError(
                f"num_shown_tests={num_shown_tests}; without a test the model cannot know the function's name."
            )
        self.num_shown_tests = num_shown_tests

    def get_tests(self, sample: Sample) -> list[TestCase]:
        setup = [*sample.get("test_imports", ()), str(sample.get("test_setup_code", ""))]
        # Some tests use a module that only the reference solution imports, and some setups a class of it.
        reference = ast.parse(str(sample.get("code", ""))).body
        needed = (ast.Import, ast.ImportFrom, ast.ClassDef)
        setup = [ast.unparse(node) for node in reference if isinstance(node, needed)] + setup
        tests = []
        for number, text in enumerate(_field_of(sample, "test_list"), start=1):
            functions = self._functions(sample, text)
            calls = "\n".join(ast.unparse(node) for node in ast.walk(ast.parse(text)) if _called(node) in functions)
            metadata = {"functions": sorted(functions), "setup": "\n".join(setup)}
            tests.append(TestCase(calls, str(text), id=str(number), metadata=metadata))
        return tests

    def _functions(self, sample: Sample, test: str) -> set[str]:
        called = {_called(node) for node in ast.walk(ast.parse(test))} - {""}
        defined = {
            node.name for node in ast.parse(str(sample.get("code", ""))).body if isinstance(node, ast.FunctionDef)
        }
        functions = called & defined or {name for name in called if not hasattr(builtins, name)}
        if not functions:
            raise ConfigError(
                f"The test {test!r} of MBPP {self.get_problem_id(sample)} calls no function of the program."
            )
        return functions

    def get_prompt(self, sample: Sample) -> str:
        shown = "\n".join(_field_of(sample, "test_list")[: self.num_shown_tests])
        return f"{str(_field_of(sample, 'prompt', 'text')).strip()}\n\nFor example:\n\n```python\n{shown}\n```"

    def get_problem_id(self, sample: Sample) -> str:
        return str(sample.get("task_id", sample.get("id", "0")))


def _called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
