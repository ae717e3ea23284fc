"""Real sandboxes at work: statuses, streams, limits, commands."""

import asyncio
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio

from ludic.types import ConfigError
from ludic_sandbox import (
    Bind,
    BubblewrapConfig,
    BubblewrapSandboxPool,
    CompileStatus,
    RunStatus,
    Sandbox,
    SubprocessSandboxPool,
    is_bubblewrap_available,
)
from ludic_sandbox.interface import CommandSandbox, SandboxPool
from plugins.sandbox.tests.sandbox_pools import podman_pool, remote_pool
from tests.extended import cases

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here"),
    pytest.mark.asyncio(loop_scope="module"),
]
ROOT = Path(__file__).parents[3]


@pytest_asyncio.fixture(
    params=cases(
        [BubblewrapSandboxPool, SubprocessSandboxPool, podman_pool, remote_pool],
        default=[BubblewrapSandboxPool, SubprocessSandboxPool, remote_pool],  # test_containers.py has podman
    ),
    scope="module",
    loop_scope="module",
)
async def sandbox(request):
    """All backends keep the same contract; the plain subprocess does not isolate."""
    async with request.param(n_workers=1) as pool:
        yield await pool.checkout()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bubblewrap():
    async with BubblewrapSandboxPool(n_workers=1) as pool:
        yield await pool.checkout()


async def test_sandboxes_and_pools_are_what_the_interface_says():
    async with BubblewrapSandboxPool(n_workers=1) as pool:
        assert isinstance(pool, SandboxPool)
        sandbox = await pool.checkout()
        assert isinstance(sandbox, Sandbox) and isinstance(sandbox, CommandSandbox)
        assert pool.python_version == sandbox.python_version == (await version(sandbox))


async def version(sandbox: Sandbox) -> str:
    return (await sandbox.execute("import sys; print('%d.%d' % sys.version_info[:2])")).stdout.strip()


# --- programs -----------------------------------------------------------------------------------------------


async def test_a_program_gets_its_input_and_gives_its_output(sandbox):
    code = "import sys\nprint(input())\nprint(len(sys.stdin.read()), file=sys.stderr)"
    result = await sandbox.execute(code, stdin="first ü\n" + "x" * 3_000_000)
    assert result.succeeded and result.exit_code == 0 and result.signal is None
    assert (result.stdout, result.stderr) == ("first ü\n", "3000000\n")


async def test_large_output_comes_back_whole(sandbox):
    result = await sandbox.execute("print('0123456789' * 400_000)\nimport sys\nprint('e' * 100_000, file=sys.stderr)")
    assert result.succeeded and not result.output_truncated
    assert result.stdout == "0123456789" * 400_000 + "\n" and result.stderr == "e" * 100_000 + "\n"


async def test_unread_input_does_not_matter(sandbox):
    result = await sandbox.execute("print('done')", stdin="x" * 5_000_000)
    assert (result.run_status, result.stdout) == (RunStatus.SUCCESS, "done\n")


async def test_input_can_be_opened_as_a_file(sandbox):
    assert (await sandbox.execute("print(open('/dev/stdin').read())", stdin="by name")).stdout == "by name\n"


async def test_a_program_is_a_separate_main_module(sandbox):
    code = """
import __main__, sys
print(__name__, __main__.__dict__ is globals(), sys.argv == [__file__], [m for m in ("ctypes", "json") if m in globals()])
class C: pass
import pickle
print(pickle.loads(pickle.dumps(C())).__class__ is C)
exit(0)
"""
    result = await sandbox.execute(code)
    assert result.stdout.splitlines() == ["__main__ True True []", "True"], result


async def test_an_error_shows_the_programs_own_lines_only(sandbox):
    result = await sandbox.execute("def f():\n    return 1 / 0\n\nf()")
    assert (result.run_status, result.exit_code) == (RunStatus.RUNTIME_ERROR, 1)
    assert result.stderr.count("File ") == 2 and "return 1 / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


async def test_the_end_of_a_program_runs_as_usual(sandbox):
    code = """
import atexit, threading, time
atexit.register(lambda: print("atexit"))
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("main", end=" ")
raise SystemExit(3)
"""
    result = await sandbox.execute(code)
    assert (result.stdout, result.exit_code) == ("main thread\natexit\n", 3)


@pytest.mark.parametrize(
    ("code", "status", "line"),
    [
        ("x = 1\nif x\n  pass", CompileStatus.SYNTAX_ERROR, 2),
        ("x = '\0'", CompileStatus.SYNTAX_ERROR, None),
        ("x = '\ud800'", CompileStatus.SYNTAX_ERROR, None),
        ('"""doc"""\nimport os\nfrom no_such_module.part import x', CompileStatus.IMPORT_ERROR, 3),
        ("x = " + "(" * 5000 + ")" * 5000, None, None),
        ("x = " + "-" * 200_000 + "1", None, None),
    ],
)
async def test_what_does_not_compile_is_not_run(bubblewrap, code, status, line):
    result = await bubblewrap.execute(code)
    assert result.run_status is RunStatus.NOT_RUN and not result.compiled and result.exit_code is None
    if status is not None:  # how a compiler gives up on deep nesting differs between versions
        assert result.compile_result.status is status and result.compile_result.error_message
    if line is not None:
        assert result.compile_result.error_line == line
    assert (await bubblewrap.compile(code)).status is result.compile_result.status


async def test_imports_that_may_not_happen_do_not_keep_a_program_from_running(sandbox):
    code = "import os\ntry:\n    import no_such_module\nexcept ImportError:\n    print('went on')"
    assert (await sandbox.execute(code)).stdout == "went on\n"


async def test_skipping_the_compile_step_makes_a_syntax_error_a_runtime_error(sandbox):
    result = await sandbox.execute("x = (", skip_compile=True)
    assert result.compiled and result.run_status is RunStatus.RUNTIME_ERROR and "SyntaxError" in result.stderr


async def test_compiling_runs_nothing(sandbox):
    result = await sandbox.compile("while True: pass", timeout_s=5.0)
    assert result.success


async def test_time_is_the_programs_own(sandbox):
    result = await sandbox.execute("import time\nprint('a', flush=True)\ntime.sleep(60)", timeout_s=2.0)
    assert result.run_status is RunStatus.TIMEOUT and result.timed_out and result.stdout == "a\n"
    assert result.cpu_time_ms is not None and result.peak_memory_bytes is not None


async def test_a_harness_that_is_busy_does_not_take_a_programs_time(bubblewrap):
    code = "import time\nprint('x' * 1_000_000, flush=True)\ntime.sleep(0.5)\nprint('in time')"
    run = asyncio.create_task(bubblewrap.execute(code, timeout_s=4.0))
    await asyncio.sleep(0.02)
    time.sleep(5.0)  # an update of the weights on the thread of the event loop, say
    result = await run
    assert result.run_status is RunStatus.SUCCESS and result.stdout.endswith("x\nin time\n")


async def test_a_signal_is_told_from_an_exit_code(sandbox):
    killed = await sandbox.execute("import os\nos.kill(os.getpid(), 11)")
    assert (killed.run_status, killed.signal, killed.exit_code) == (RunStatus.KILLED, 11, None)
    posing = await sandbox.execute("raise SystemExit(139)")
    assert (posing.run_status, posing.signal, posing.exit_code) == (RunStatus.RUNTIME_ERROR, None, 139)


async def test_memory_limits_are_per_run(sandbox):
    code = "x = bytearray(400 << 20)\nprint(len(x))"
    assert (await sandbox.execute(code, memory_limit_mb=64)).run_status is RunStatus.MEMORY_EXCEEDED
    assert (await sandbox.execute(code)).run_status is RunStatus.MEMORY_EXCEEDED
    assert (await sandbox.execute(code, memory_limit_mb=512)).stdout == f"{400 << 20}\n"


async def test_use_is_measured(sandbox):
    code = "x = bytearray(100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nwhile __import__('time').process_time() < 0.2: pass"
    result = await sandbox.execute(code)
    assert result.succeeded and result.peak_memory_bytes is not None and result.cpu_time_ms is not None
    assert 100 << 20 <= result.peak_memory_bytes <= 200 << 20 and result.cpu_time_ms >= 150
    assert 0 < result.run_duration_ms <= result.total_duration_ms


async def test_variables_are_passed_and_nothing_else_is(sandbox, monkeypatch):
    monkeypatch.setenv("LUDIC_TEST_SECRET", "s3cret")
    result = await sandbox.execute(
        "import os\nprint(os.environ.get('MINE'), 's3cret' in str(os.environ))", env_vars={"MINE": "yes"}
    )
    assert result.stdout == "yes False\n"


async def test_the_order_of_a_set_is_the_same_in_every_run(bubblewrap):
    code = "print({'a', 'b', 'c', 'd', 'e', 'f'})"
    assert len({(await bubblewrap.execute(code)).stdout for _ in range(3)}) == 1


async def test_runs_leave_nothing_to_each_other(bubblewrap):
    await bubblewrap.execute("import sys\nopen('/tmp/left', 'w').write('x')\nsys.path.append('/evil')")
    result = await bubblewrap.execute("import os, sys\nprint(os.listdir('/tmp'), '/evil' in sys.path)")
    assert result.stdout == "['main.py'] False\n"


async def test_one_sandbox_runs_several_programs_at_a_time(bubblewrap):
    results = await asyncio.gather(*(bubblewrap.execute(f"print({n} + int(input()))", stdin="1") for n in range(5)))
    assert [result.stdout for result in results] == [f"{n + 1}\n" for n in range(5)]


async def test_a_cancelled_run_leaves_a_working_sandbox(bubblewrap):
    run = asyncio.create_task(bubblewrap.execute("import time; time.sleep(60)", timeout_s=60))
    await asyncio.sleep(0.1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await bubblewrap.execute("print('next')")).stdout == "next\n"


async def test_a_reset_ends_what_runs():
    async with BubblewrapSandboxPool(n_workers=1) as pool:
        sandbox = await pool.checkout()
        run = asyncio.create_task(sandbox.execute("import time; time.sleep(60)", timeout_s=60))
        await asyncio.sleep(0.1)
        await pool.release(sandbox)
        result = await run
        assert result.run_status is RunStatus.SANDBOX_ERROR and "reset" in result.detail
        again = await pool.checkout()
        assert (await again.execute("print('next')")).stdout == "next\n"


# --- commands -----------------------------------------------------------------------------------------------


async def test_a_command_has_its_files_and_gives_its_outputs(sandbox):
    result = await sandbox.run_command(
        ["sh", "-c", 'cat; ./part/tool > made; pwd; echo "$MINE"'],
        files={"part/tool": "#!/bin/sh\nprintf '\\001binary\\377'\n"},
        outputs=["made", "part/tool", "not_there"],
        stdin=b"in\n",
        env_vars={"MINE": "yes"},
    )
    assert result.run_status is RunStatus.SUCCESS, result
    assert result.stdout.splitlines()[0] == "in" and result.stdout.splitlines()[2] == "yes"
    assert result.outputs.keys() == {"made", "part/tool"} and result.outputs["made"] == b"\x01binary\xff"


async def test_a_command_that_is_not_there_says_so(sandbox):
    result = await sandbox.run_command(["no-such-command"])
    assert (result.run_status, result.exit_code) == (RunStatus.RUNTIME_ERROR, 127) and "No such file" in result.stderr


async def test_a_bind_shows_a_folder_that_only_we_can_read(bubblewrap, tmp_path):
    folder = tmp_path / "closed"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("inside")
    tmp_path.chmod(0o700)
    bind = Bind(source=str(folder), target="/opt/closed")
    result = await bubblewrap.run_command(
        ["/bin/sh", "-c", "cat /opt/closed/deep/file; touch /opt/closed/new || echo read-only"], binds=[bind]
    )
    assert result.stdout == "insideread-only\n", result
    single = Bind(source=str(folder / "deep" / "file"), target="/opt/one")
    assert (await bubblewrap.run_command(["/bin/cat", "/opt/one"], binds=[single])).stdout == "inside"


async def test_limits_of_a_command_can_be_wider(bubblewrap):
    code = "import os\nx = bytearray(300 << 20)\nopen('/tmp/f', 'wb').write(bytes(90 << 20))\nprint('ok')"
    result = await bubblewrap.run_command(
        ["python3", "p.py"], files={"p.py": code}, memory_limit_mb=600, workspace_mb=100, max_processes=64
    )
    assert result.stdout == "ok\n", result


async def test_a_bind_that_is_not_there_is_an_error_of_the_caller(bubblewrap):
    with pytest.raises(ConfigError, match="no such file or folder"):
        await bubblewrap.run_command(["true"], binds=[Bind(source="/no/such", target="/x")])


async def test_packages_can_be_shown_to_programs(tmp_path):
    (tmp_path / "shown.py").write_text("ANSWER = 42")
    tmp_path.chmod(0o755)
    config = BubblewrapConfig(binds=(Bind(source=str(tmp_path), target="/opt/packages"),))
    async with BubblewrapSandboxPool(config, n_workers=1) as pool:
        sandbox = await pool.checkout()
        result = await sandbox.execute("import shown\nprint(shown.ANSWER)", env_vars={"PYTHONPATH": "/opt/packages"})
    assert result.stdout == "42\n", result


async def test_another_python_can_be_asked_for():
    """The one that runs this test, wherever it lives; in a home folder, for instance."""
    async with BubblewrapSandboxPool(BubblewrapConfig(python=sys.executable), n_workers=1) as pool:
        sandbox = await pool.checkout()
        result = await sandbox.execute("import sys\nprint(sys.version)")
    assert result.stdout == sys.version + "\n", result
