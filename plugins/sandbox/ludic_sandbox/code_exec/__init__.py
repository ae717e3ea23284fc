"""Programming problems: the agent writes code, tests in a sandbox decide. See docs/envs/code_exec.md.

The registry makes the tasks (env.py). Start with env.py, then runner.py (programs by stdin) and assert_runner.py (functions).
"""

from ludic_sandbox.code_exec.assert_runner import AssertRunner
from ludic_sandbox.code_exec.batch import BatchExecutionSpec
from ludic_sandbox.code_exec.cases import (
    BatchTestResult,
    CodeExecConfig,
    Feedback,
    TestCase,
    TestResult,
    compute_hash,
    hash_tests,
)
from ludic_sandbox.code_exec.datasets import (
    APPS_SYSTEM_PROMPT,
    APPSTestAdapter,
    HumanEvalTestAdapter,
    MBPPTestAdapter,
    ProgramTestAdapter,
    TestAdapter,
)
from ludic_sandbox.code_exec.env import APPSEnv, CodeExecEnv, HumanEvalEnv, MBPPEnv, ProgrammingEnv
from ludic_sandbox.code_exec.runner import (
    CodeRunner,
    ExactMatchVerifier,
    FloatTolerantVerifier,
    OutputVerifier,
    StdinStdoutRunner,
    Verdict,
    WhitespaceNormalizedVerifier,
)

__all__ = [
    "TestCase", "TestResult", "BatchTestResult", "BatchExecutionSpec", "compute_hash", "hash_tests",
    "CodeRunner", "StdinStdoutRunner", "AssertRunner",
    "OutputVerifier", "Verdict", "ExactMatchVerifier", "WhitespaceNormalizedVerifier", "FloatTolerantVerifier",
    "TestAdapter", "ProgramTestAdapter", "APPSTestAdapter", "APPS_SYSTEM_PROMPT", "HumanEvalTestAdapter", "MBPPTestAdapter",
    "CodeExecConfig", "Feedback", "CodeExecEnv", "ProgrammingEnv", "APPSEnv", "HumanEvalEnv", "MBPPEnv",
]  # fmt: skip
