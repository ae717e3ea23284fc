"""`CodeExecEnv`: the agent submits a program, and tests in a sandbox grade it. Its subclasses are the registered tasks."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import ConfigError, Info, Observation, StepOutcome
from ludic_sandbox import RunStatus, SandboxError, SandboxPool, shared_pool
from ludic_sandbox.code_exec.cases import BatchTestResult, CodeExecConfig, Feedback, TestResult, as_config, compute_hash
from ludic_sandbox.code_exec.datasets import (
    APPSTestAdapter,
    HumanEvalTestAdapter,
    MBPPTestAdapter,
    ProgramTestAdapter,
    Sample,
    TestAdapter,
)
from ludic_sandbox.code_exec.runner import CodeRunner, OutputVerifier, ended

# --- observations ---

_LINE = re.compile(r'(File "solution\.py", line )(\d{1,9})(?!\d)')


def observation(
    result: BatchTestResult | None, config: CodeExecConfig, *, attempts_left: int, lines_before: int = 0
) -> str:
    """`result` is None for an empty program; `lines_before` counts the lines that the env put before the agent's."""
    failure = None if result is None else result.first_failure
    if result is not None and failure is None:
        return f"All {result.total_count} tests passed."
    if result is None or failure is None:
        text = "There is no program in the reply."
    else:
        text = _what_failed(result, _in_own_lines(failure, lines_before), config)
    if attempts_left > 0:
        text += f"\n\nCorrect the program and hand it in again. Attempts left: {attempts_left}."
    return text


def _in_own_lines(failure: TestResult, lines_before: int) -> TestResult:
    """The failure with the line numbers of the agent's own code."""
    execution, compiled = failure.execution, failure.execution.compile_result
    line = compiled.error_line if compiled.error_line is None else max(1, compiled.error_line - lines_before)
    stderr = _LINE.sub(lambda found: f"{found[1]}{max(1, int(found[2]) - lines_before)}", execution.stderr)
    shown = replace(execution, compile_result=replace(compiled, error_line=line), stderr=stderr)
    details = failure.comparison_details if compiled.success else ended(shown)
    return replace(failure, execution=shown, comparison_details=details)


def _what_failed(result: BatchTestResult, failure: TestResult, config: CodeExecConfig) -> str:
    test, execution, how = failure.test_case, failure.execution, ended(failure.execution)
    if not failure.compiled:
        return _cut(how, config)
    if config.feedback is Feedback.NOTHING:
        return "The program did not pass all tests."
    count = f"{result.passed_count} of {result.total_count} tests passed."
    if config.feedback is Feedback.STATUS:
        return f"{count} Test {test.id}: {'The output is wrong.' if failure.ran else how}"
    parts = [f"{count} The first that failed is test {test.id}."]
    parts += [f"Input:\n{_cut(test.input, config)}", f"Expected:\n{_cut(test.expected, config)}"]
    if failure.ran:
        parts.append(f"Got:\n{_cut(failure.actual, config)}")
    if details := failure.comparison_details or ("" if failure.ran else how):
        parts.append(_cut(details, config))
    if config.include_stderr_in_obs and (stderr := execution.stderr.strip()):
        limit = config.max_error_length  # the end of a traceback says what happened
        parts.append(f"Error output:\n{stderr if len(stderr) <= limit else '…' + stderr[-limit:]}")
    return "\n".join(parts)


def _cut(text: str, config: CodeExecConfig) -> str:
    text = text.rstrip("\n")
    return text if len(text) <= config.max_error_length else text[: config.max_error_length] + "…"


# --- the env ---

_NOT_CACHED = (RunStatus.SANDBOX_ERROR, RunStatus.TIMEOUT)
"""The first says nothing about the program; a busy machine may cause the second."""


class CodeExecEnv(SingleAgentEnv):
    """One programming problem. The action is the code; an agent may have several attempts.

    Without a `sandbox_pool` it uses the shared one (`ludic_sandbox.shared_pool`). A failure of the sandbox itself raises
    SandboxError: the episode fails and is not graded.
    """

    default_adapter: ClassVar[type[TestAdapter] | None] = None
    """The adapter of a subclass that is for one dataset."""

    def __init__(
        self,
        sample: Sample,
        *,
        test_adapter: TestAdapter | None = None,
        sandbox_pool: SandboxPool | None = None,
        code_runner: CodeRunner | None = None,
        verifier: OutputVerifier | None = None,
        config: CodeExecConfig | Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        super().__init__()
        self.sample = sample
        self.config = as_config(config)
        if test_adapter is None:
            if self.default_adapter is None:
                raise ConfigError(f"{type(self).__name__} needs test_adapter=…, which reads the samples of a dataset.")
            test_adapter = self.default_adapter()
        self.problem_id = test_adapter.get_problem_id(sample)
        self.tests = tuple(test_adapter.get_tests(sample)[: self.config.max_tests])
        if not self.tests:
            raise ConfigError(f"Problem {self.problem_id} has no tests, so no program could pass them.")
        self.last_result: BatchTestResult | None = None
        """The last attempt's result, with times and outputs, which vary between runs and so are left out of the info."""
        self._adapter = test_adapter
        self._pool = sandbox_pool
        self._runner = code_runner or test_adapter.get_runner(self.config)
        self._verifier = verifier or test_adapter.verifier
        self._prompt = test_adapter.get_prompt(sample)
        self._system_prompt = system_prompt if system_prompt is not None else test_adapter.system_prompt
        self._tests_hash = test_adapter.hash_tests(self.tests)
        self._num_attempts = 0
        self._python_version = ""
        self._obs = ""
        self.full_reward = None if test_adapter.get_reference(sample) is None else 1.0

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    def reference_action(self, agent_id: str) -> str | None:
        return self._adapter.get_reference(self.sample)

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._num_attempts = 0
        self.last_result = None
        self._obs = self._prompt
        return self._prompt, {"problem_id": self.problem_id}

    def env_current_obs(self) -> Observation:
        return self._obs

    async def async_env_step(self, action: str) -> StepOutcome:
        self._num_attempts += 1
        code = action.strip("\n")
        program = self._adapter.get_program(self.sample, code)
        result = await self._graded(program) if code.strip() else None
        self.last_result = result
        passed = result is not None and result.all_passed
        is_over = passed or self._num_attempts >= self.config.max_attempts
        self._obs = observation(
            result,
            self.config,
            attempts_left=self.config.max_attempts - self._num_attempts,
            lines_before=program[: program.rfind(code)].count("\n"),
        )
        # Only the last attempt is rewarded.
        reward = self._reward(result) if is_over else 0.0
        return StepOutcome(self._obs, reward, terminated=is_over, info=self._info(result))

    def _reward(self, result: BatchTestResult | None) -> float:
        if result is None or result.compile_failed:
            return self.config.compile_failure_reward
        if result.all_passed:
            return 1.0
        return result.pass_rate if self.config.partial_credit else 0.0

    # --- grading ---

    async def _graded(self, program: str) -> BatchTestResult:
        pool = self._pool if self._pool is not None else await shared_pool()
        self._python_version = pool.python_version
        code_hash, grading_hash = compute_hash(program), self._grading_hash(pool)
        uses_cache = self.config.use_cache and _shows_its_settings(self._runner) and _shows_its_settings(self._verifier)
        cached = pool.get_cached(code_hash, grading_hash) if uses_cache else None
        if isinstance(cached, BatchTestResult):
            return cached
        result = await self._run(pool, program)
        broken = next((r for r in result.results if r.execution.run_status is RunStatus.SANDBOX_ERROR), None)
        if broken is not None:
            raise SandboxError(f"The sandbox failed on problem {self.problem_id}: {broken.execution.detail}")
        if uses_cache and all(r.execution.run_status not in _NOT_CACHED for r in result.results):
            pool.put_cached(code_hash, grading_hash, result)
        return result

    async def _run(self, pool: SandboxPool, program: str) -> BatchTestResult:
        sandbox = await pool.checkout(self.config.sandbox_wait_s)
        try:
            return await self._runner.run_tests(
                sandbox,
                program,
                self.tests,
                verifier=self._verifier,
                stop_on_first_failure=self.config.stops_early,
                compile_first=self.config.compile_first,
            )
        finally:
            await pool.release(sandbox)

    def _grading_hash(self, pool: SandboxPool) -> str:
        """Hash of all that a result depends on: one pool may serve envs of different settings."""
        how = (self._runner, self._verifier, self.config.stops_early, self.config.compile_first, pool.python_version)
        return compute_hash(f"{self._tests_hash} {how!r}")

    def _info(self, result: BatchTestResult | None) -> Info:
        all_passed = result is not None and result.all_passed
        info: Info = {
            "problem_id": self.problem_id,
            "attempt": self._num_attempts,
            "tests_hash": self._tests_hash,
            "total": len(self.tests),
            "compile_failed": result is None or result.compile_failed,
            "all_passed": all_passed,
            "correct": all_passed,
            "passed": 0 if result is None else result.passed_count,
            "pass_rate": 0.0 if result is None else result.pass_rate,
        }
        if result is not None:
            info |= {"code_hash": result.code_hash, "python_version": self._python_version}
            info["tests"] = [
                {"id": r.test_case.id, "passed": r.passed, "status": str(r.execution.run_status)}
                for r in result.results
            ]
        return info


def _shows_its_settings(part: object) -> bool:
    """True if the part's repr shows its settings, as a dataclass's does. The default repr is an address, which may be reused."""
    return type(part).__repr__ is not object.__repr__


# --- registered tasks ---


class ProgrammingEnv(CodeExecEnv):
    """Write a program that reads stdin and passes the tests of your own sample."""

    default_adapter = ProgramTestAdapter


class APPSEnv(CodeExecEnv):
    """APPS: write a program that reads stdin, for a problem of a programming contest."""

    default_adapter = APPSTestAdapter


class HumanEvalEnv(CodeExecEnv):
    """HumanEval: complete a Python function from its docstring."""

    default_adapter = HumanEvalTestAdapter


class MBPPEnv(CodeExecEnv):
    """MBPP: write a short Python function from a sentence and an example."""

    def __init__(
        self, sample: Sample, *, num_shown_tests: int = 1, sandbox_pool: SandboxPool | None = None,
        config: CodeExecConfig | Mapping[str, Any] | None = None, system_prompt: str | None = None,
    ) -> None:  # fmt: skip
        adapter = MBPPTestAdapter(num_shown_tests)
        super().__init__(
            sample, test_adapter=adapter, sandbox_pool=sandbox_pool, config=config, system_prompt=system_prompt
        )
