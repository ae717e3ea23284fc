"""Settings of program runs and rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from ludic.types import ConfigError


class Feedback(StrEnum):
    """What an agent is told after an attempt that failed."""

    TEST = "test"
    """The first failing test with its input, the expected and the actual output. An agent that may try again could
    hard-code what it is shown."""
    STATUS = "status"
    """How many tests passed and how the first failing one ended (wrong, crash, time-out), without its contents."""
    NOTHING = "nothing"
    """That it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeExecConfig:
    """Settings of a CodeExecEnv."""

    timeout_per_test_s: float = 5.0
    """For tests that set none."""
    memory_limit_mb: int = 256
    """For tests that set none."""
    max_tests: int | None = None
    """Take the first so many tests; None takes all."""
    stop_on_first_failure: bool = True
    """Run no tests after the first that fails. Partial credit needs them all, and runs them."""
    compile_first: bool = True
    """Tell programs that do not compile from those that fail; without it, a syntax error is a failed test. Functions that
    are tested by asserts are always compiled first."""
    partial_credit: bool = False
    """Pay the share of tests that pass, by weight, instead of all or nothing."""
    compile_failure_reward: float = -0.1
    """Also for an empty program."""
    include_stderr_in_obs: bool = True
    max_error_length: int = 500
    """Characters of each part of an observation: an error, an input, an output."""
    use_cache: bool = True
    """Grade the same program on the same tests once."""
    sandbox_wait_s: float = 1800.0
    """How long an episode waits for a free sandbox before it fails: many episodes share few of them."""
    max_attempts: int = 1
    """How often an agent may hand in a program; after a failure it is told `feedback` and may try again. The last
    attempt is the one that is paid."""
    feedback: Feedback = Feedback.TEST

    def __post_init__(self) -> None:
        for name, value in {
            "timeout_per_test_s": self.timeout_per_test_s,
            "memory_limit_mb": self.memory_limit_mb,
            "max_tests": self.max_tests,
            "max_error_length": self.max_error_length,
            "sandbox_wait_s": self.sandbox_wait_s,
            "max_attempts": self.max_attempts,
        }.items():
            if value is not None and not value > 0:
                raise ConfigError(f"CodeExecConfig.{name}={value!r}; it must be above 0.")
        if self.feedback not in list(Feedback):
            raise ConfigError(
                f"CodeExecConfig.feedback={str(self.feedback)!r}; use one of {', '.join(map(str, Feedback))}."
            )
        object.__setattr__(self, "feedback", Feedback(self.feedback))  # it may come as plain text, from a file

    @property
    def stops_early(self) -> bool:
        return self.stop_on_first_failure and not self.partial_credit


def as_config(config: CodeExecConfig | Mapping[str, Any] | None) -> CodeExecConfig:
    """A config as it is, or made of plain settings: the form in which a command line or a file has them."""
    if config is None or isinstance(config, CodeExecConfig):
        return config or CodeExecConfig()
    known = [field.name for field in fields(CodeExecConfig)]
    unknown = sorted(set(config) - set(known))
    if unknown:
        raise ConfigError(f"CodeExecConfig has no {', '.join(unknown)}. It has: {', '.join(known)}.")
    return CodeExecConfig(**config)
