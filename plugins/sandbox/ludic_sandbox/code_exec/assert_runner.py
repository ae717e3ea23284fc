"""Runs tests that are Python asserts; the asserts and the candidate program are never in one process.

The candidate runs in its sandbox, makes the calls and answers with plain data. The assertions are judged without it: expressions
outside the sandbox (`assertions`), anything more (loops, helpers, random inputs) by a test program in a separate sandbox run
(`inside/check_program.py`). Rounds of calls continue until no judge needs another answer.
"""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ludic.types import BrokenSample, ConfigError
from ludic.util import worker
from ludic.util.files import parse_json
from ludic_sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus, Sandbox
from ludic_sandbox.code_exec.assertions import UNREADABLE, Call, Judgement, is_plain, judge
from ludic_sandbox.code_exec.batch import Served, Task, program, serve
from ludic_sandbox.code_exec.cases import BatchTestResult, TestCase, TestResult
from ludic_sandbox.code_exec.plain_data import decode, shown, to_json
from ludic_sandbox.code_exec.runner import OutputVerifier, batch_result, ended

_MAX_ROUNDS = 64
"""A round asks for one call of each assert that is not decided yet."""
_MAX_ANSWER = 128 * 1024
"""Characters of what the calls of one test return."""
_MAX_READ_HERE = 4 * 1024
"""Characters of answers that are read and judged in this process, where even the worst take a millisecond or two. Reading an
answer, and a test that makes a set of it, take time quadratic in its length where all hashes are the same."""
_JUDGE_S = 5.0
_JUDGES = "ludic_sandbox.code_exec.assertions"
_WAITING = ThreadPoolExecutor(64, "ludic-judging")
"""Threads that wait for a worker process."""
_PROGRAM_S, _PROGRAM_MB = 10.0, 512
"""Limits of a test program."""
_NOT_ASKED = ExecutionResult(compile_result=CompileResult(status=CompileStatus.SUCCESS))


@dataclass(slots=True)
class _State:
    """One test while it is decided."""

    test: TestCase
    functions: frozenset[str]
    answers: list[tuple[Call, dict[str, Any]]] = field(default_factory=list)
    """Not decoded: hostile answers may take long to read."""
    num_chars: int = 0
    """Length of the answers."""
    execution: ExecutionResult = _NOT_ASKED
    judgement: Judgement | None = None
    """None while it waits to be judged."""

    @property
    def is_short(self) -> bool:
        return self.num_chars <= _MAX_READ_HERE


@dataclass(frozen=True, kw_only=True, slots=True)
class AssertRunner:
    """Tests whose `expected` is Python: one assert statement, or a program of them.

    A test's metadata names the functions under test (`functions`) and may hold source that the assertions need (`setup`:
    imports, helper functions). The verifier is not asked: an assertion says itself what is right.
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
            asking = [state for state in states if state.judgement is not None and state.judgement.needs]
            if not asking:
                break
            await self._ask(sandbox, code, asking, stop_on_first_failure)
        results = [_result(state) for state in states]
        return batch_result(code, tests, results, stop_on_first_failure=stop_on_first_failure)

    async def _ask(self, sandbox: Sandbox, code: str, states: list[_State], stop_on_first_failure: bool) -> None:
        """Have the candidate make the calls that the tests need, and note its answers."""
        tasks = [
            Task(
                timeout_s=state.test.timeout_s(self.default_timeout_s),
                memory_limit_mb=state.test.memory_limit_mb(self.memory_limit_mb),
                calls=[(call.function, call.arguments) for call in state.judgement.needs] if state.judgement else (),
            )
            for state in states
        ]
        served = await serve(sandbox, "calls", code, tasks, stop_on_failure=stop_on_first_failure)
        for state, one in zip(states, served, strict=False):  # shorter after an early stop
            _note(state, one)
        for state in states[len(served) :]:
            state.judgement = Judgement(details="An earlier test failed.")


def _functions(test: TestCase) -> frozenset[str]:
    names = test.metadata.get("functions")
    if not names or isinstance(names, str):
        raise ConfigError(
            f"Test {test.id!r} has functions={names!r} in its metadata; AssertRunner needs the list of the names of the "
            "functions under test."
        )
    return frozenset(names)


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
        answers = parse_json(served.answers)
        if not all(isinstance(answer, dict) and ("error" in answer or "value" in answer) for answer in answers):
            raise ValueError("an answer is a value or an error")
        if len(served.answers) <= _MAX_READ_HERE:  # a longer one is read by the judge
            for answer in answers:
                decode(answer.get("value"))
    except UNREADABLE as error:
        state.execution = replace(served.execution, run_status=RunStatus.KILLED)
        state.judgement = Judgement(details=f"Its answer cannot be read: {type(error).__name__}: {error}")
        return
    # Fewer answers than calls when one raised: the remaining calls are made if they still matter.
    state.answers += zip(calls, answers, strict=False)
    state.num_chars += len(served.answers)


def _result(state: _State) -> TestResult:
    judgement, execution = state.judgement, state.execution
    if judgement is None or judgement.needs:
        judgement = Judgement(details=f"The test was not decided after {_MAX_ROUNDS} rounds of calls.")
    last = state.answers[-1][1] if state.answers else {}
    if not judgement.passed and execution.run_status is RunStatus.SUCCESS and "error" in last:
        ran_out = last.get("type") == "MemoryError"
        status = RunStatus.MEMORY_EXCEEDED if ran_out else RunStatus.RUNTIME_ERROR
        execution = replace(execution, run_status=status)
    return TestResult(
        test_case=state.test,
        passed=judgement.passed,
        actual="\n".join(_shown(answer, is_short=state.is_short) for _, answer in state.answers),
        execution=execution,
        comparison_details=judgement.details,
    )


def _shown(answer: dict[str, Any], *, is_short: bool) -> str:
    if "error" in answer:
        return f"raised {answer['error']}"
    try:
        return shown(decode(answer["value"])) if is_short else f"{to_json(answer['value']):.200}…"
    except UNREADABLE:
        return "an unreadable value"


# --- the judges: this process, a worker process, a test program in a sandbox ---


async def _judge(sandbox: Sandbox, state: _State) -> None:
    test = state.test.expected
    if not is_plain(test, state.functions):
        state.judgement, failed = await _judge_by_program(sandbox, state)
        state.execution = failed or state.execution
    elif state.is_short:
        state.judgement = judge(test, state.functions, state.answers)
    else:
        state.judgement = await _judge_in_worker(state)


async def _judge_in_worker(state: _State) -> Judgement:
    judges = worker.worker_of_this_process(_JUDGES, _make_judges)
    test, answers = state.test.expected, _as_lists(state)
    question = {"assertion": test, "functions": sorted(state.functions), "answers": answers}
    ask = partial(judges.ask, question, answer=json.dumps(answers), reference=test, timeout_s=_JUDGE_S)
    verdict = await asyncio.get_running_loop().run_in_executor(_WAITING, ask)
    if verdict is None:
        return Judgement(details=f"Its answer could not be compared within {_JUDGE_S:g} s.")
    return _judgement(verdict)


def _make_judges() -> worker.Workers:
    return worker.Workers(partial(worker.Worker, _JUDGES), num=2, quick_s=1.0)


def _as_lists(state: _State) -> list[Any]:
    return [[call.function, call.arguments, answer] for call, answer in state.answers]


def _judgement(verdict: dict[str, Any]) -> Judgement:
    needs = tuple(Call(function, arguments) for function, arguments in verdict["needs"])
    return Judgement(passed=verdict["passed"] and not needs, details=verdict["details"], needs=needs)


_MAX_REMEMBERED = 4096
_first_calls: dict[tuple[str, str, frozenset[str]], Judgement] = {}
"""The first calls of each test program, before it knows any answer; they are the same for every candidate."""


async def _judge_by_program(sandbox: Sandbox, state: _State) -> tuple[Judgement, ExecutionResult | None]:
    """The verdict of a test program or the calls that it needs, and the run if the sandbox failed."""
    test, setup = state.test.expected, str(state.test.metadata.get("setup", ""))
    key = (setup, test, state.functions)
    if not state.answers and key in _first_calls:
        return _first_calls[key], None
    job = {"setup": setup, "test": test, "functions": sorted(state.functions), "answers": _as_lists(state)}
    result = await sandbox.execute(
        program("check_program", sandbox.python_version),
        stdin=ascii(job),
        skip_compile=True,
        timeout_s=_PROGRAM_S,
        memory_limit_mb=_PROGRAM_MB,
    )
    if result.run_status in (RunStatus.SANDBOX_ERROR, RunStatus.TIMEOUT):  # neither says that the answers are wrong
        return Judgement(details="The judge did not finish."), result
    if result.run_status is not RunStatus.SUCCESS:
        return _not_finished(state, result), None
    judgement = _judgement(parse_json(result.stdout))
    if not state.answers:
        if len(_first_calls) >= _MAX_REMEMBERED:
            _first_calls.clear()
        _first_calls[key] = judgement
    return judgement, None


def _not_finished(state: _State, result: ExecutionResult) -> Judgement:
    why = f"{result.run_status}: {result.stderr.strip().rpartition(chr(10))[2]}"
    if not state.answers:
        raise BrokenSample(
            f"The test program of {state.test.id!r} fails before any answer is known ({why}). Look at the sample's test, and at "
            "`setup` in its metadata."
        )
    return Judgement(details=f"The test program did not finish over these answers ({why}).")
