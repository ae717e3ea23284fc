"""The registered tasks: an env from a dataset's adapter and a sample."""

from collections.abc import Mapping
from typing import Any

from ludic.envs.code_exec.config import CodeExecConfig
from ludic.envs.code_exec.datasets import (
    APPSTestAdapter,
    HumanEvalTestAdapter,
    MBPPTestAdapter,
    ProgramTestAdapter,
    Sample,
    TestAdapter,
)
from ludic.envs.code_exec.env import CodeExecEnv
from ludic.sandbox import SandboxPool

Config = CodeExecConfig | Mapping[str, Any] | None


class ProgrammingEnv(CodeExecEnv):
    """Write a program that reads stdin and passes the tests of your own sample."""

    def __init__(
        self, sample: Sample, *, test_adapter: TestAdapter | None = None, sandbox_pool: SandboxPool | None = None,
        config: Config = None, system_prompt: str | None = None,
    ) -> None:  # fmt: skip
        adapter = test_adapter or ProgramTestAdapter()
        super().__init__(
            sample, test_adapter=adapter, sandbox_pool=sandbox_pool, config=config, system_prompt=system_prompt
        )


class APPSEnv(CodeExecEnv):
    """APPS: write a program that reads stdin, for a problem of a programming contest."""

    def __init__(
        self, sample: Sample, *, sandbox_pool: SandboxPool | None = None, config: Config = None,
        system_prompt: str | None = None,
    ) -> None:  # fmt: skip
        adapter = APPSTestAdapter()
        super().__init__(
            sample, test_adapter=adapter, sandbox_pool=sandbox_pool, config=config, system_prompt=system_prompt
        )


class HumanEvalEnv(CodeExecEnv):
    """HumanEval: complete a Python function from its docstring."""

    def __init__(
        self, sample: Sample, *, sandbox_pool: SandboxPool | None = None, config: Config = None,
        system_prompt: str | None = None,
    ) -> None:  # fmt: skip
        adapter = HumanEvalTestAdapter()
        super().__init__(
            sample, test_adapter=adapter, sandbox_pool=sandbox_pool, config=config, system_prompt=system_prompt
        )


class MBPPEnv(CodeExecEnv):
    """MBPP: write a short Python function from a sentence and an example."""

    def __init__(
        self, sample: Sample, *, num_shown_tests: int = 1, sandbox_pool: SandboxPool | None = None,
        config: Config = None, system_prompt: str | None = None,
    ) -> None:  # fmt: skip
        adapter = MBPPTestAdapter(num_shown_tests)
        super().__init__(
            sample, test_adapter=adapter, sandbox_pool=sandbox_pool, config=config, system_prompt=system_prompt
        )
