"""Runs tests that are Python asserts; the asserts and the program are never in one process.

The program runs in its sandbox, makes the calls and answers with plain data. The assertions are judged
outside: expressions here (`assertions`), anything more by a test program in a separate sandbox run, where the tested
program never was (`program_judge`). Rounds of calls go on until no judge needs another answer.
"""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ludic.envs import worker
from ludic.envs.code_exec.assertions import Call, Judgement, is_plain, judge_told
from ludic.envs.code_exec.batch import Served, Task, serve
from ludic.envs.code_exec.cases import BatchTestResult, TestCase, TestResult
from ludic.envs.code_exec.plain_data import decode, shown, to_json
from ludic.envs.code_exec.program_judge import judge_by_program
from ludic.envs.code_exec.runner import batch_result, ended
from ludic.envs.code_exec.verifiers import OutputVerifier
from ludic.sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus, Sandbox
from ludic.types import ConfigError

_MAX_ROUNDS = 64
"""A round asks for one call of each assert that is not decided yet."""
_MAX_ANSWER = 128 * 1024
"""Characters of what the calls of one test return."""
_MAX_READ_HERE = 4 * 1024
"""Characters of answers that are read and judged in this process, where even the worst take a millisecond or two. Reading an
answer, and a test that makes a set of it, take time quadratic in its length where all hashes are the same."""
_JUDGE_S = 5.0
_JUDGES = "ludic.envs.code_exec.assertions"
_WAITING = ThreadPoolExecutor(64, "ludic-judging")
"""Threads that wait for a worker process."""
_NOT_ASKED = ExecutionResult(compile_result=CompileResult(status=CompileStatus.SUCCESS))


@dataclass(slots=True)
class _State:
    """What is known about one test."""

    test: TestCase
    functions: frozenset[str]
    answers: list[tuple[Call, dict[str, Any]]] = field(default_factory=list)
    """As the program sent them: a hostile one may take long to read."""
    num_chars: int = 0
    """Of the answers."""
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
        here = state.num_chars <= _MAX_READ_HERE
        told = (state.test.expected, state.functions, state.answers)
        state.judgement = judge_told(*told) if here else await _judge_apart(*told)
        return
    state.judgement, failed = await judge_by_program(sandbox, state.test, state.functions, state.answers)
    if failed is not None:
        state.execution = failed


async def _judge_apart(assertion: str, functions: frozenset[str], told: list[tuple[Call, dict[str, Any]]]) -> Judgement:
    """`judge_told` in a worker process, which a time limit ends."""
    question = {
        "assertion": assertion,
        "functions": sorted(functions),
        "told": [[call.function, call.arguments, answer] for call, answer in told],
    }
    judges = worker.worker_of_this_process(_JUDGES, _make_judges)
    text = json.dumps(question["told"])
    ask = partial(judges.ask, question, answer=text, reference=assertion, timeout_s=_JUDGE_S)
    verdict = await asyncio.get_running_loop().run_in_executor(_WAITING, ask)
    if verdict is None:
        return Judgement(details=f"Its answer could not be compared within {_JUDGE_S:g} s.")
    needs = tuple(Call(function, arguments) for function, arguments in verdict["needs"])
    return Judgement(passed=verdict["passed"], details=verdict["details"], needs=needs)


def _make_judges() -> worker.Workers:
    return worker.Workers(partial(worker.Worker, _JUDGES), num=2, quick_s=1.0)


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
        answers = json.loads(served.answers)
        if not all(isinstance(told, dict) and ("error" in told or "value" in told) for told in answers):
            raise ValueError("an answer is a value or an error")
        if len(served.answers) <= _MAX_READ_HERE:  # a longer one is read by the judge
            for told in answers:
                decode(told.get("value"))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        state.execution = replace(served.execution, run_status=RunStatus.KILLED)
        state.judgement = Judgement(details=f"Its answer cannot be read: {type(error).__name__}: {error}")
        return
    # Fewer answers than calls when one raised: what it would have made of the others is asked if it still matters.
    state.answers += zip(calls, answers, strict=False)
    state.num_chars += len(served.answers)


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
        actual=_told(state),
        execution=execution,
        comparison_details=judgement.details,
    )


def _status_of(answer: dict[str, Any]) -> RunStatus:
    if "error" not in answer:
        return RunStatus.SUCCESS  # it ran, and is wrong
    return RunStatus.MEMORY_EXCEEDED if answer.get("type") == "MemoryError" else RunStatus.RUNTIME_ERROR


def _told(state: _State) -> str:
    """The answers, one per line."""
    return "\n".join(_shown(answer, is_short=state.num_chars <= _MAX_READ_HERE) for _, answer in state.answers)


def _shown(answer: dict[str, Any], *, is_short: bool) -> str:
    if "error" in answer:
        return f"raised {answer['error']}"
    try:
        return shown(decode(answer["value"])) if is_short else f"{to_json(answer['value']):.200}…"
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return "what cannot be read"
