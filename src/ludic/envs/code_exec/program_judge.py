"""The second judge: a test program (loops, helpers, random inputs), run over a candidate's answers in the sandbox.

The candidate itself is not in that run, only the plain data that it answered; so nothing it did can reach the verdict.
`assertions` is the first judge, for tests that are one expression.
"""

import json

from ludic.envs.code_exec.assertions import Call, Judgement, Told
from ludic.envs.code_exec.batch import program
from ludic.envs.code_exec.cases import TestCase
from ludic.sandbox import ExecutionResult, RunStatus, Sandbox
from ludic.types import ConfigError

_TIMEOUT_S = 10.0
_MEMORY_MB = 512
_MAX_REMEMBERED = 4096
_first_calls: dict[tuple[str, str, frozenset[str]], Judgement] = {}
"""What a test program asks before it knows any answer: the same for every candidate."""


async def judge_by_program(
    sandbox: Sandbox, test: TestCase, functions: frozenset[str], answers: Told
) -> tuple[Judgement, ExecutionResult | None]:
    """Its verdict, or the calls that it needs; and, where the sandbox failed, what that said."""
    setup = str(test.metadata.get("setup", ""))
    key = (setup, test.expected, functions)
    if not answers and key in _first_calls:
        return _first_calls[key], None
    job = {
        "setup": setup,
        "test": test.expected,
        "functions": sorted(functions),
        "answers": [[call.function, call.arguments, answer] for call, answer in answers],
    }
    result = await sandbox.execute(
        program("check_program", sandbox.python_version),
        stdin=ascii(job),
        skip_compile=True,
        timeout_s=_TIMEOUT_S,
        memory_limit_mb=_MEMORY_MB,
    )
    if result.run_status in (RunStatus.SANDBOX_ERROR, RunStatus.TIMEOUT):  # neither says that the answers are wrong
        return Judgement(details="The judge did not finish."), result
    if result.run_status is not RunStatus.SUCCESS:
        return _not_finished(test, answers, result), None
    verdict = json.loads(result.stdout)
    needs = tuple(Call(function, arguments) for function, arguments in verdict["needs"])
    judgement = Judgement(passed=verdict["passed"] and not needs, details=verdict["details"], needs=needs)
    if not answers:
        if len(_first_calls) >= _MAX_REMEMBERED:
            _first_calls.clear()
        _first_calls[key] = judgement
    return judgement, None


def _not_finished(test: TestCase, answers: Told, result: ExecutionResult) -> Judgement:
    last_line = result.stderr.strip().rpartition("\n")[2]
    if not answers:
        raise ConfigError(
            f"The test program of {test.id!r} fails by itself, before any answer is known ({result.run_status}: "
            f"{last_line}). Look at the sample's test, and at `setup` in its metadata."
        )
    return Judgement(details=f"The test program did not finish over these answers ({result.run_status}: {last_line}).")
