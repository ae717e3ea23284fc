"""Both ends of a run: the job as it is sent, and the status, from what was seen of the run."""

import marshal
import signal

import pytest

from ludic.types import ConfigError
from ludic_sandbox import CompileResult, CompileStatus, RunStatus, SandboxLimits
from ludic_sandbox.process_sandbox import compile_verdict, run_verdict, termination
from ludic_sandbox.runner.runner_process import BASE_ENV, ExitFacts, Job, RawRun, read_compile_record, read_exit_facts

GOOD = CompileResult(status=CompileStatus.SUCCESS)


def ending(status: int = 0, **facts: bool) -> ExitFacts:
    flags = {"memory_error": False, "overflow": False, "timed_out": False, **facts}
    return ExitFacts(status=status, run_ms=1.0, cpu_ms=1.0, peak=1, **flags)


def exited(code: int) -> int:
    return code << 8


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (RawRun(compiled=GOOD, ending=ending()), RunStatus.SUCCESS),
        (RawRun(compiled=GOOD, ending=ending(exited(1))), RunStatus.RUNTIME_ERROR),
        (RawRun(compiled=GOOD, ending=ending(exited(137))), RunStatus.RUNTIME_ERROR),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGSEGV)), RunStatus.KILLED),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGXCPU)), RunStatus.TIMEOUT),
        (RawRun(compiled=GOOD, ending=ending(exited(1), memory_error=True)), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=GOOD, ending=ending(0, memory_error=True)), RunStatus.SUCCESS),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGKILL), killed_for_memory=True), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=GOOD, ending=ending(), killed_for_memory=True), RunStatus.SUCCESS),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGKILL), memory_limit=1), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGKILL), memory_limit=2), RunStatus.KILLED),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGSEGV), memory_limit=1), RunStatus.KILLED),
        (RawRun(compiled=GOOD, timed_out=True), RunStatus.TIMEOUT),
        (RawRun(compiled=GOOD, timed_out=True, isolation_error="conmon died"), RunStatus.SANDBOX_ERROR),
        (RawRun(compiled=GOOD, isolation_error="conmon died"), RunStatus.SANDBOX_ERROR),
        (RawRun(compiled=GOOD, isolation_error="conmon died", killed_for_memory=True), RunStatus.MEMORY_EXCEEDED),
        (
            RawRun(compiled=GOOD, ending=ending(signal.SIGKILL, timed_out=True), timed_out=True, memory_limit=1),
            RunStatus.TIMEOUT,
        ),
        (RawRun(compiled=GOOD, timed_out=True, killed_for_memory=True), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGKILL, overflow=True)), RunStatus.KILLED),
        (RawRun(compiled=GOOD, ending=ending(0, overflow=True)), RunStatus.KILLED),
        (RawRun(compiled=GOOD), RunStatus.KILLED),
        (RawRun(compiled=GOOD, killed_for_memory=True), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=CompileResult(status=CompileStatus.SYNTAX_ERROR), ending=ending()), RunStatus.NOT_RUN),
        (RawRun(timed_out=True), RunStatus.NOT_RUN),
        (RawRun(ending=ending(signal.SIGSEGV)), RunStatus.NOT_RUN),
        (RawRun(killed_for_memory=True), RunStatus.NOT_RUN),
        (RawRun(), RunStatus.SANDBOX_ERROR),
    ],
)
def test_each_way_to_end_has_its_status(seen, status):
    assert run_verdict(seen)[0] is status


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (RawRun(compiled=GOOD), CompileStatus.SUCCESS),
        (RawRun(timed_out=True), CompileStatus.TIMEOUT),
        (RawRun(ending=ending(signal.SIGSEGV)), CompileStatus.UNKNOWN_ERROR),
        (RawRun(killed_for_memory=True), CompileStatus.UNKNOWN_ERROR),
        (RawRun(), CompileStatus.UNKNOWN_ERROR),
    ],
)
def test_each_way_to_compile_has_its_status(seen, status):
    assert compile_verdict(seen).status is status


def test_a_sandbox_error_passes_on_what_the_launcher_said():
    assert run_verdict(RawRun(launcher_error="bwrap: no such thing")) == (
        RunStatus.SANDBOX_ERROR,
        "bwrap: no such thing",
    )


def test_exit_code_and_signal_exclude_each_other():
    assert termination(RawRun(ending=ending(exited(7)))) == (7, None)
    assert termination(RawRun(ending=ending(signal.SIGKILL))) == (None, 9)
    assert termination(RawRun()) == (None, None)


def test_frames_are_read_as_plain_values_and_nothing_else():
    record = read_compile_record(b"('syntax_error', \"it's\", 3, None, 1.5)")
    assert (record.status, record.error_message, record.error_line) == (CompileStatus.SYNTAX_ERROR, "it's", 3)
    with pytest.raises(ValueError):
        read_exit_facts(b"__import__('os').abort()")


# --- jobs ---

LIMITS = SandboxLimits(memory_mb=100, max_processes=7, workspace_mb=3)


def decoded(job: Job, *, limit_processes: bool = True) -> dict:
    data = job.encode("/work", limit_processes=limit_processes)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    return marshal.loads(data[4:])


def test_a_job_is_encoded_with_files_env_and_limits():
    job = Job(files={"main.py": b"pass"}, limits=LIMITS, timeout_s=2.0, env={"A": "b"}, stdin=b"not here")
    message = decoded(job)
    assert message["program"] == "/work/main.py" and message["cwd"] == "/work" and message["argv"] == []
    assert message["env"] == {**BASE_ENV, "HOME": "/work", "A": "b"} and message["files"] == [("main.py", b"pass")]
    assert message["rlimits"]["RLIMIT_AS"] == (100 + 64) << 20 and message["rlimits"]["RLIMIT_FSIZE"] == 3 << 20
    assert message["rlimits"]["RLIMIT_NPROC"] == 7 and message["rlimits"]["RLIMIT_CORE"] == 0
    assert "RLIMIT_NPROC" not in decoded(job, limit_processes=False)["rlimits"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "", "a\0b"])
@pytest.mark.parametrize("where", ["files", "outputs"])
def test_paths_stay_in_the_workspace(path, where):
    settings = {"files": {path: b""}} if where == "files" else {"files": {}, "outputs": [path]}
    with pytest.raises(ConfigError, match="no path inside the workspace"):
        Job(limits=LIMITS, timeout_s=1.0, **settings)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_the_time_limit_must_be_positive_and_finite(timeout_s):
    with pytest.raises(ConfigError, match="timeout_s"):
        Job(files={}, limits=LIMITS, timeout_s=timeout_s)


@pytest.mark.parametrize("name", ["memory_mb", "max_processes", "max_output_bytes", "workspace_mb", "max_open_files"])
def test_limits_must_be_positive(name):
    with pytest.raises(ConfigError, match=name):
        SandboxLimits(**{name: 0})
    with pytest.raises(ConfigError, match="Python itself needs"):
        SandboxLimits(memory_mb=8)


@pytest.mark.parametrize(
    "settings", [{"env": {"A=B": "c"}}, {"env": {"": "c"}}, {"env": {"A": "\0"}}, {"argv": ["a\0b"]}]
)
def test_invalid_arguments_and_variables_are_refused(settings):
    with pytest.raises(ConfigError, match="null byte|name of a variable"):
        Job(files={}, limits=LIMITS, timeout_s=1.0, **settings)
