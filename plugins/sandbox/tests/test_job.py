import marshal

import pytest

from ludic.types import ConfigError
from ludic_sandbox import SandboxLimits
from ludic_sandbox.runner.runner_process import BASE_ENV, Job

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
