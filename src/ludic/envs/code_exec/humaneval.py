"""HumanEval: complete a function from its signature and docstring."""

import ast
import re

from ludic.envs.code_exec.adapters import FUNCTION_PROMPT, Sample, TestAdapter, field_of
from ludic.envs.code_exec.assert_runner import AssertRunner
from ludic.envs.code_exec.assertions import calls_in, is_plain
from ludic.envs.code_exec.cases import TestCase
from ludic.envs.code_exec.config import CodeExecConfig
from ludic.envs.code_exec.runner import CodeRunner
from ludic.types import ConfigError


class HumanEvalTestAdapter(TestAdapter):
    """Samples with `prompt`, `entry_point`, `test` (which defines `check(candidate)`) and `canonical_solution`.

    Where `check` is a list of asserts that can be judged as expressions, each is a test of its own; else the whole of
    `check` is one test.
    """

    system_prompt = FUNCTION_PROMPT

    def get_tests(self, sample: Sample) -> list[TestCase]:
        function, source = str(field_of(sample, "entry_point")), str(field_of(sample, "test"))
        check = self._check(sample, source)
        functions = frozenset({function})
        asserts = [ast.unparse(_Renamed(check.args.args[0].arg, function).visit(node)) for node in _statements(check)]
        if all(is_plain(text, functions) for text in asserts):
            tested = [(text, calls) for text in asserts if (calls := calls_in(text, functions))]  # not `assert True`
            return [
                TestCase("\n".join(calls), text, id=str(number), metadata={"functions": [function]})
                for number, (text, calls) in enumerate(tested, start=1)
            ]
        # The prompt goes before it: some tests use its helper functions.
        metadata = {"functions": [function], "setup": str(sample["prompt"])}
        return [TestCase(f"check({function})", f"{source}\n\ncheck({function})\n", id="check", metadata=metadata)]

    def _check(self, sample: Sample, source: str) -> ast.FunctionDef:
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name == "check" and len(node.args.args) == 1:
                return node
        raise ConfigError(f"The test of {self.get_problem_id(sample)} defines no check(candidate).")

    def get_prompt(self, sample: Sample) -> str:
        return f"Complete this function:\n\n```python\n{str(field_of(sample, 'prompt')).strip()}\n```"

    def get_problem_id(self, sample: Sample) -> str:
        return str(sample.get("task_id", sample.get("id", "0")))

    def get_program(self, sample: Sample, code: str) -> str:
        """A whole function, after the imports and helpers of the prompt; or what continues the prompt."""
        prompt = str(sample["prompt"])
        defines_it = re.search(
            rf"^(?:def\s+{sample['entry_point']}\s*\(|{sample['entry_point']}\s*=)", code, re.MULTILINE
        )
        return f"{prompt.rstrip()}\n    pass\n\n{code}" if defines_it else prompt + code

    def get_reference(self, sample: Sample) -> str | None:
        solution = sample.get("canonical_solution")
        return None if solution is None else f"{sample['prompt']}{solution}"

    def get_runner(self, config: CodeExecConfig) -> CodeRunner:
        return AssertRunner(default_timeout_s=config.timeout_per_test_s, memory_limit_mb=config.memory_limit_mb)


def _statements(check: ast.FunctionDef) -> list[ast.stmt]:
    """Without docstrings and `pass`."""
    return [
        node
        for node in check.body
        if not isinstance(node, ast.Pass) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


class _Renamed(ast.NodeTransformer):
    """The candidate under its own name, which is what people know it by."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self.new, node.ctx), node) if node.id == self.old else node
