"""MBPP: short functions from a sentence, tested by three asserts."""

import ast
import builtins

from ludic.envs.code_exec.adapters import FUNCTION_PROMPT, Sample, TestAdapter, field_of
from ludic.envs.code_exec.assert_runner import AssertRunner
from ludic.envs.code_exec.cases import TestCase
from ludic.envs.code_exec.config import CodeExecConfig
from ludic.envs.code_exec.runner import CodeRunner
from ludic.types import ConfigError


class MBPPTestAdapter(TestAdapter):
    """Samples with `prompt` (or `text`), `test_list` and `code`; every entry of the list is a test.

    The sentence does not name the function, so the prompt shows the first `num_shown_tests` of the tests. The original
    shows all of them, with the right answers; an agent that trains on that learns to repeat them.
    """

    system_prompt = FUNCTION_PROMPT

    def __init__(self, num_shown_tests: int = 1) -> None:
        if num_shown_tests < 1:
            raise ConfigError(f"num_shown_tests={num_shown_tests}; without a test nobody knows the function's name.")
        self.num_shown_tests = num_shown_tests

    def get_tests(self, sample: Sample) -> list[TestCase]:
        setup = "\n".join([*_setup_lines(sample), *_imports(str(sample.get("code", "")))])
        tests = []
        for number, text in enumerate(field_of(sample, "test_list"), start=1):
            functions = self._functions(sample, text)
            calls = "\n".join(ast.unparse(node) for node in ast.walk(ast.parse(text)) if _called(node) in functions)
            metadata = {"functions": sorted(functions), "setup": setup}
            tests.append(TestCase(calls, str(text), id=str(number), metadata=metadata))
        return tests

    def _functions(self, sample: Sample, test: str) -> set[str]:
        called = {_called(node) for node in ast.walk(ast.parse(test))} - {""}
        defined = {
            node.name for node in ast.parse(str(sample.get("code", ""))).body if isinstance(node, ast.FunctionDef)
        }
        functions = called & defined or {name for name in called if not hasattr(builtins, name)}
        if not functions:
            raise ConfigError(f"The test {test!r} of MBPP {self.get_problem_id(sample)} calls no function of its own.")
        return functions

    def get_prompt(self, sample: Sample) -> str:
        shown = "\n".join(field_of(sample, "test_list")[: self.num_shown_tests])
        return f"{str(field_of(sample, 'prompt', 'text')).strip()}\n\nFor example:\n\n```python\n{shown}\n```"

    def get_problem_id(self, sample: Sample) -> str:
        return str(sample.get("task_id", sample.get("id", "0")))

    def get_reference(self, sample: Sample) -> str | None:
        code = sample.get("code")
        return None if code is None else str(code)

    def get_runner(self, config: CodeExecConfig) -> CodeRunner:
        return AssertRunner(default_timeout_s=config.timeout_per_test_s, memory_limit_mb=config.memory_limit_mb)


def _setup_lines(sample: Sample) -> list[str]:
    return [*sample.get("test_imports", ()), str(sample.get("test_setup_code", ""))]


def _imports(code: str) -> list[str]:
    """Some tests use a module that only the reference solution imports."""
    return [ast.unparse(node) for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]


def _called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
