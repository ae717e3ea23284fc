"""From a dataset's sample to a problem: what is asked, which tests decide, how an answer becomes a program."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ludic.envs.code_exec.cases import TestCase, hash_tests
from ludic.envs.code_exec.config import CodeExecConfig
from ludic.envs.code_exec.runner import CodeRunner, StdinStdoutRunner
from ludic.envs.code_exec.verifiers import ExactMatchVerifier, OutputVerifier
from ludic.types import ConfigError

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
    """Knows the form of one dataset."""

    __test__: ClassVar[bool] = False  # pytest collects classes by their name
    system_prompt: str | None = None
    verifier: OutputVerifier = ExactMatchVerifier()

    @abstractmethod
    def get_tests(self, sample: Sample) -> list[TestCase]: ...

    @abstractmethod
    def get_prompt(self, sample: Sample) -> str: ...

    @abstractmethod
    def get_problem_id(self, sample: Sample) -> str: ...

    def hash_tests(self, tests: Sequence[TestCase]) -> str:
        return hash_tests(tests)

    def get_program(self, sample: Sample, code: str) -> str:
        """What is run: the code that an agent handed in, with what the problem already gave it."""
        return code

    def get_reference(self, sample: Sample) -> str | None:
        """A solution, where the dataset has one."""
        return None

    def get_runner(self, config: CodeExecConfig) -> CodeRunner:
        return StdinStdoutRunner(default_timeout_s=config.timeout_per_test_s, memory_limit_mb=config.memory_limit_mb)


class ProgramTestAdapter(TestAdapter):
    """Samples of your own: `{"question": …, "tests": [{"input": …, "expected": …}], "solution": …}`.

    A test may also have `id`, `weight`, `timeout_s` and `memory_limit_mb`; `id` and `solution` of a sample are optional.
    """

    system_prompt = PROGRAM_PROMPT

    def get_tests(self, sample: Sample) -> list[TestCase]:
        return [self._test(test, number, sample) for number, test in enumerate(field_of(sample, "tests"), start=1)]

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
        return str(field_of(sample, "question"))

    def get_problem_id(self, sample: Sample) -> str:
        return str(sample.get("id", "0"))

    def get_reference(self, sample: Sample) -> str | None:
        solution = sample.get("solution")
        return None if solution is None else str(solution)


def field_of(sample: Sample, *names: str) -> Any:
    """The first of these fields that the sample has."""
    for name in names:
        if name in sample:
            return sample[name]
    raise ConfigError(f"The sample has no {' or '.join(map(repr, names))}; it has {', '.join(sorted(sample))}.")


def as_text(value: Any) -> str:
    """Some datasets hold inputs and outputs as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
