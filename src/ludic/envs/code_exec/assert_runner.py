"""Running tests that are Python asserts, without ever putting the asserts and the program into one process.

The program sits in its sandbox and is asked to make the calls; it answers with plain data. The assertions are judged
outside: expressions here (`assertions`), anything more by a test program in a sandbox run of its own, where the tested
program never was (`program_judge`). Rounds of calls go on until no judge needs another answer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludic.envs.code_exec.assertions import Answer, Call, Judgement, is_plain, judge
from ludic.envs.code_exec.batch import Served, Task, serve
from ludic.envs.code_exec.cases import BatchTestResult, TestCase, TestResult
from ludic.envs.code_exec.plain_data import decode, shown
from ludic.envs.code_exec.program_judge import judge_by_program
from ludic.envs.code_exec.runner import batch_result, ended
from ludic.envs.code_exec.verifiers import OutputVerifier
from ludic.sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus, Sandbox
from ludic.types import ConfigError

_MAX_ROUNDS = 64
"""A round asks for one call of each assert that is not decided yet."""
_MAX_ANSWER = 128 * 1024
"""Characters. Reading an answer takes time quadratic in its length where all hashes are the same, and holds everybody up."""
_NOT_ASKED = ExecutionResult(compile_result=CompileResult(status=CompileStatus.SUCCESS))


@dataclass(slots=True)
class _State:
    """What is known about one test."""

    test: TestCase
    functions: frozenset[str]
    answers: list[tuple[Call, Answer]] = field(default_factory=list)
    execution: ExecutionResult = _NOT_ASKED
    judgement: Judgement | None = None
    """None while it waits to be judged."""

    @property
    def needs_answers(self) -> bool:
        return self.judgement is not None and bool(self.judgement.needs)


@dataclass(frozen=True, kw_only=True, slots=True)
class AssertRunner:
    """Tests whose `expected` is Python: one assert statement, or a program of them.

    The names of the functions under test are in a test's metadata as `functions`; `setup` there is source that the
    assertions need (imports, helper functions). The verifier is not asked: an assertion says itself what is right.
    """

    default_timeout_s: float = 5.0
    """For a test that sets none."""
    memory_limit_mb: int = 256
    """For a test that sets none."""

    async def run_tests(
        self,
        sandbox: Sandbox,
        code: str,
        tests: Sequence[TestCase],
        *,
        verifier: OutputVerifier,
        stop_on_first_failure: bool = False,
        compile_first: bool = True,
    ) -> BatchTestResult:
        states = [_State(test, _functions(test)) for test in tests]
        for _ in range(_MAX_ROUNDS):
            for state in states:
                if state.judgement is None:
                    await _judge(sandbox, state)
            asking = [state for state in states if state.needs_answers]
            if not asking:
                break
            await self._ask(sandbox, code, asking, stop_on_first_failure)
        results = [_result(state) for state in states]
        return batch_result(code, tests, results, stop_on_first_failure=stop_on_first_failure)

    async def _ask(self, sandbox: Sandbox, code: str, states: list[_State], stop_on_first_failure: bool) -> None:
        """Have the program make the calls that the tests need, and note its answers."""
        tasks = [self._task(state) for state in states]
        served = await serve(sandbox, "calls", code, tasks, stop_on_failure=stop_on_first_failure)
        for state, one in zip(states, served, strict=False):  # shorter after an early stop
            _note(state, one)
        for state in states[len(served) :]:
            state.judgement = Judgement(details="An earlier test failed.")

    def _task(self, state: _State) -> Task:
        assert state.judgement is not None, "it has been judged, and found to need answers"
        return Task(
            timeout_s=state.test.timeout_s(self.default_timeout_s),
            memory_limit_mb=state.test.memory_limit_mb(self.memory_limit_mb),
            calls=[(call.function, call.arguments) for call in state.judgement.needs],
        )


def _functions(test: TestCase) -> frozenset[str]:
    names = test.metadata.get("functions")
    if not names or isinstance(names, str):
        raise ConfigError(
            f"Test {test.id!r} has functions={names!r} in its metadata; AssertRunner needs the list of the names of the "
            "functions under test."
        )
    return frozenset(names)


async def _judge(sandbox: Sandbox, state: _State) -> None:
    if is_plain(state.test.expected, state.functions):
        state.judgement = judge(state.test.expected, state.functions, state.answers)
        return
    state.judgement, failed = await judge_by_program(sandbox, state.test, state.functions, state.answers)
    if failed is not None:
        state.execution = failed


def _note(state: _State, served: Served) -> None:
    """Add the answers, or, if there are none, decide the test."""
    assert state.judgement is not None, "it asked"
    calls, state.judgement, state.execution = state.judgement.needs, None, served.execution
    if served.answers is None or not served.execution.succeeded:
        state.judgement = Judgement(details=ended(served.execution))
        return
    if len(served.answers) > _MAX_ANSWER:
        state.judgement = Judgement(details="Its answer is too long.")
        return
    try:
        answers = [_answer(told) for told in json.loads(served.answers)]
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        state.execution = replace(served.execution, run_status=RunStatus.KILLED)
        state.judgement = Judgement(details=f"Its answer cannot be read: {type(error).__name__}: {error}")
        return
    # Fewer answers than calls when one raised: what it would have made of the others is asked if it still matters.
    state.answers += zip(calls, answers, strict=False)


def _answer(told: dict[str, Any]) -> Answer:
    if "error" in told:
        return Answer(error=str(told["error"]), error_type=str(told["type"]))
    return Answer(value=decode(told["value"]))


def _result(state: _State) -> TestResult:
    judgement = state.judgement
    if judgement is None or judgement.needs:
        judgement = Judgement(details=f"The test was not decided after {_MAX_ROUNDS} rounds of calls.")
    execution = state.execution
    if not judgement.passed and execution.run_status is RunStatus.SUCCESS and state.answers:
        execution = replace(execution, run_status=_status_of(state.answers[-1][1]))
    return TestResult(
        test_case=state.test,
        passed=judgement.passed,
        actual=_told(state.answers),
        execution=execution,
        comparison_details=judgement.details,
    )


def _status_of(answer: Answer) -> RunStatus:
    if answer.error is None:
        return RunStatus.SUCCESS  # it ran, and is wrong
    return RunStatus.MEMORY_EXCEEDED if answer.error_type == "MemoryError" else RunStatus.RUNTIME_ERROR


def _told(answers: list[tuple[Call, Answer]]) -> str:
    """The answers, one per line."""
    return "\n".join(shown(answer.value) if answer.error is None else f"raised {answer.error}" for _, answer in answers)
