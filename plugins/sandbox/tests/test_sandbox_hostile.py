"""Programs that mean harm, under real bubblewrap: each is contained, is judged rightly, and leaves the pool healthy."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from ludic_sandbox import (
    BubblewrapConfig,
    BubblewrapSandboxPool,
    ExecutionResult,
    RunStatus,
    SandboxLimits,
    is_bubblewrap_available,
)
from ludic_sandbox.runner.cgroup import memory_groups

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here"),
    pytest.mark.asyncio(loop_scope="module"),
]
LIMITS = SandboxLimits(memory_mb=128, max_output_bytes=1 << 20, workspace_mb=16)
Run = Callable[..., Awaitable[ExecutionResult]]
Said = Callable[..., Awaitable[list[str]]]
NEEDS_GROUP = pytest.mark.skipif(memory_groups() is None, reason="needs a memory cgroup (root)")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    """One pool of one sandbox for all of them: whatever the first leaves, the last would meet."""
    async with BubblewrapSandboxPool(BubblewrapConfig(limits=LIMITS), n_workers=1) as pool:
        yield pool
        await pool.drain_pending_resets()
        assert pool.available == 1
    groups = Path("/sys/fs/cgroup/memory/ludic-sandbox").glob(f"{os.getpid()}-*/cgroup.procs")
    assert not [procs.read_text() for procs in groups if procs.read_text()], "nothing of a closed pool is left"


@pytest.fixture
def run(pool) -> Run:
    """Runs the program, then an honest one in its place, which must not notice anything."""

    async def run(code: str, *, timeout_s: float = 10.0) -> ExecutionResult:
        sandbox = await pool.checkout()
        result = await sandbox.execute(code, timeout_s=timeout_s)
        await pool.release(sandbox)
        sandbox = await pool.checkout()
        healthy = await sandbox.execute("import os; print(input(), os.listdir('/tmp'))", stdin="well\n")
        await pool.release(sandbox)
        assert (healthy.run_status, healthy.stdout) == (RunStatus.SUCCESS, "well ['main.py']\n"), healthy
        return result

    return run


@pytest.fixture
def said(run) -> Said:
    """The lines of a program that must come to its own end."""

    async def said(code: str, *, timeout_s: float = 10.0) -> list[str]:
        result = await run(code, timeout_s=timeout_s)
        assert result.run_status is RunStatus.SUCCESS, result
        return result.stdout.splitlines()

    return said


# --- resources ----------------------------------------------------------------------------------------------


async def test_a_fork_bomb_meets_the_process_limit_and_ends_with_its_time(run):
    bomb = """
import os
print("go", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    result = await run(bomb, timeout_s=2.0)
    assert result.run_status in (RunStatus.TIMEOUT, RunStatus.MEMORY_EXCEEDED) and "go" in result.stdout


async def test_the_process_limit_counts_this_sandbox_only(said):
    count = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(30)
        children += 1
except OSError:
    print(children)
"""
    # Process 1 and the program itself are of the 32.
    assert await said(count) == ["30"]


async def test_a_memory_bomb_is_called_one(run):
    result = await run("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert result.run_status is RunStatus.MEMORY_EXCEEDED
    assert result.peak_memory_bytes is not None and result.peak_memory_bytes < 256 << 20


@NEEDS_GROUP
async def test_many_processes_share_one_memory_limit(run):
    swarm = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        x = bytearray(40 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(1)
statuses = [os.wait()[1] for _ in range(20)]
raise SystemExit(3)
"""
    result = await run(swarm, timeout_s=60.0)
    assert result.run_status is RunStatus.MEMORY_EXCEEDED
    assert result.peak_memory_bytes is not None and result.peak_memory_bytes <= 128 << 20


async def test_memory_outside_the_address_space_cannot_be_had(said):
    tries = """
import os, ctypes
try:
    os.memfd_create("x")
except OSError as e:
    print("memfd", e.errno)
libc = ctypes.CDLL(None, use_errno=True)
print("shmget", libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno())
try:
    open("/dev/shm/x", "w")
except OSError as e:
    print("shm", e.errno)
"""
    assert await said(tries) == ["memfd 1", "shmget -1 1", "shm 30"]


async def test_an_endless_loop_is_stopped(run):
    assert (await run("while True: pass", timeout_s=0.5)).run_status is RunStatus.TIMEOUT


async def test_a_sleeper_that_ignores_signals_is_stopped(run):
    code = "import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)"
    assert (await run(code, timeout_s=0.5)).run_status is RunStatus.TIMEOUT


@pytest.mark.parametrize("fd", [1, 2])
async def test_endless_output_is_cut_and_its_program_killed(run, fd: int):
    result = await run(f"import os\nwhile True: os.write({fd}, b'spam' * 10000)")
    assert result.run_status is RunStatus.KILLED and result.output_truncated
    assert len(result.stdout if fd == 1 else result.stderr) == 1 << 20


async def test_the_workspace_can_be_filled_but_not_overfilled(said):
    code = """
import os
try:
    for n in range(100):
        with open(f"/tmp/{n}", "wb", buffering=0) as file:
            file.write(bytes(1 << 20))
except OSError as e:
    print(e.errno, sum(entry.stat().st_size for entry in os.scandir("/tmp")) >> 20)
"""
    assert await said(code) == ["28 15"]  # ENOSPC; the program itself takes a page of the 16 MB


async def test_a_huge_sparse_file_is_refused(said):
    code = "try:\n open('/tmp/big', 'wb').truncate(1 << 40)\nexcept OSError as e:\n print(e.errno)"
    assert await said(code) == ["27"]  # EFBIG


# --- the host -----------------------------------------------------------------------------------------------


async def test_there_is_no_network(said):
    code = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_RAW if family > 10 else socket.SOCK_STREAM)
        print("open")
    except OSError as e:
        print(e.errno)
print(open("/proc/net/dev").read().count(":"))
a, b = socket.socketpair()
a.send(b"local is fine"); print(b.recv(99).decode())
"""
    assert await said(code) == ["97", "97", "97", "97", "1", "local is fine"]


async def test_a_pair_of_sockets_is_of_the_local_family_only(said):
    code = """
import ctypes
libc, pair = ctypes.CDLL(None, use_errno=True), (ctypes.c_int * 2)()
print({libc.socketpair(family, 2, 0, pair) or ctypes.get_errno() for family in range(2, 60)})  # AF_TIPC (30) has pairs too
print({ctypes.get_errno() if libc.socketpair(family, kind, 0, pair) else 0 for family in (2, 30) for kind in (1, 2, 3, 5)})
print({libc.socketpair(1, kind, 0, pair) for kind in (1, 2, 5)})
"""
    assert await said(code) == ["{-1}", "{97}", "{0}"]


async def test_host_files_cannot_be_seen(said, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    code = f"""
import os
for path in ({str(secret)!r}, {str(Path.home())!r}, {__file__!r}, "/etc/passwd", "/etc/shadow", "/sys", "/run", "/var", "/root",
             "/proc/1/root/etc/passwd", "/proc/1/cwd/../etc/passwd", "/dev/mem", "/dev/sda", "/proc/kcore"):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        print("open", path)
    except OSError:
        pass
print(sorted(os.listdir("/")))
"""
    (inside,) = await said(code)
    assert set(eval(inside)) <= {"bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "sbin", "tmp", "usr"}


async def test_nothing_but_the_workspace_can_be_written(said):
    code = """
import os
for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/dev/shm", "/proc", "/proc/sys/kernel", "/lib", "/bin"):
    try:
        open(os.path.join(folder, "x"), "w")
        print("wrote", folder)
    except OSError:
        pass
for path in ("/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/proc/1/oom_score_adj", "/proc/1/mem"):
    try:
        open(path, "w").write("1")
        print("wrote", path)
    except OSError:
        pass
for action in (lambda: os.chmod("/usr", 0o777), lambda: os.chown("/tmp", 0, 0), lambda: os.mknod("/tmp/d", 0o60666, 0x800)):
    try:
        action()
        print("did it")
    except OSError:
        pass
"""
    assert await said(code) == []


async def test_the_harness_leaks_neither_environment_nor_descriptors(said, monkeypatch):
    monkeypatch.setenv("LUDIC_TEST_SECRET", "s3cret")
    code = """
import os
print(sorted(os.environ))
for pid in os.listdir("/proc"):
    if pid.isdecimal():
        try:
            print(b"s3cret" in open(f"/proc/{pid}/environ", "rb").read())
        except OSError:
            print("closed")
print([os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in os.listdir("/proc/self/fd")[:4]])
"""
    names, one, own, fds = await said(code)
    assert "LUDIC_TEST_SECRET" not in names and (one, own) == ("closed", "False")
    assert fds == "['pipe', 'pipe', 'pipe', 'pipe']"


async def test_new_namespaces_mounts_and_tracing_are_refused(said):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "unshare user": lambda: libc.unshare(0x10000000),
    "unshare mount": lambda: libc.unshare(0x20000),
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "umount": lambda: libc.umount2(b"/proc", 2),
    "pivot_root": lambda: libc.pivot_root(b"/tmp", b"/tmp"),
    "chroot": lambda: libc.chroot(b"/tmp"),
    "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
    "trace me": lambda: libc.ptrace(0, 0, 0, 0),
    "keyctl": lambda: libc.syscall({"x86_64": 250, "aarch64": 219}[os.uname().machine], 0, 0),
    "bpf": lambda: libc.syscall({"x86_64": 321, "aarch64": 280}[os.uname().machine], 0, 0, 0),
    "io_uring": lambda: libc.syscall(425, 8, 0),
    "setuid": lambda: libc.setuid(0),
    "sethostname": lambda: libc.sethostname(b"x", 1),
    "reboot": lambda: libc.reboot(0),
}
for name, call in calls.items():
    ctypes.set_errno(0)
    if call() != -1:
        print("allowed:", name)
print(os.uname().nodename, open("/proc/self/status").read().split("Seccomp:")[1].split()[0])
"""
    assert await said(code) == ["sandbox 2"]


async def test_setuid_programs_give_no_rights(said):
    code = """
import os
facts = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(facts["NoNewPrivs"], int(facts["CapPrm"], 16), int(facts["CapBnd"], 16), bool(os.statvfs("/usr").f_flag & os.ST_NOSUID))
"""
    assert await said(code) == ["1 0 0 True"]


# --- the harness --------------------------------------------------------------------------------------------


async def test_killing_all_processes_kills_only_the_program(said):
    code = """
import os, signal
for pid in (1, os.getppid(), -1):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV):
        try:
            os.kill(pid, number)
        except OSError:
            pass
print("still here")
"""
    assert await said(code) == ["still here"]


async def test_interrupting_the_supervisor_does_not_look_like_success(run):
    code = "import os, time\nprint('all tests passed', flush=True)\nos.kill(1, 2)\ntime.sleep(30)"
    result = await run(code)
    assert result.run_status is RunStatus.KILLED and result.exit_code is None


async def test_results_cannot_be_forged(run):
    code = r"""
import os, struct
ending = repr({"status": 0, "run_ms": 1.0, "cpu_ms": 1.0, "peak": 1, "memory_error": False, "overflow": False, "timed_out": False}).encode()
frame = b"X" + struct.pack(">I", len(ending)) + ending
for fd in range(1024):
    try:
        os.write(fd, frame + b"\n")
    except OSError:
        pass
for pid in ("1", str(os.getppid())):
    for name in ("fd/0", "fd/1", "fd/2", "mem", "fd"):
        try:
            open(f"/proc/{pid}/{name}", "wb").write(frame)
        except OSError:
            pass
os._exit(9)
"""
    result = await run(code)
    # What it wrote on descriptor 3 claims a lack of memory; that is all it can claim, and only as a failure.
    assert result.run_status is RunStatus.MEMORY_EXCEEDED and result.exit_code == 9


async def test_claiming_a_lack_of_memory_does_not_help_or_hurt_a_program_that_ends_well(said):
    assert await said("import os\nos.write(3, b'M')\nprint('done')") == ["done"]


async def test_the_supervisor_cannot_be_starved(said):
    code = """
import os, resource
for attack in (
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.sched_setaffinity(1, {0}),
    lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),
    lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
):
    try:
        attack()
        print("allowed")
    except PermissionError:
        pass
"""
    assert await said(code) == []


async def test_a_forged_exit_is_still_that_exit(run):
    result = await run("import os\nprint('OK')\nos._exit(5)")
    assert (result.run_status, result.exit_code) == (RunStatus.RUNTIME_ERROR, 5)


async def test_the_programs_own_limits_cannot_be_raised(said):
    code = """
import resource
for limit in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    try:
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("raised")
    except (OSError, ValueError):
        pass
"""
    assert await said(code) == []


async def test_daemons_do_not_outlive_their_program_or_keep_it_waiting(said):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            time.sleep(0.1)
            print("still here", flush=True)
    os._exit(0)
os.wait()
print("main is done")
"""
    assert (await said(code, timeout_s=60.0))[0] == "main is done"


async def test_links_out_of_the_workspace_lead_nowhere(said):
    code = """
import os
os.symlink("/etc/passwd", "/tmp/a"); os.symlink("/proc/1/root", "/tmp/b"); os.symlink("../../../../etc/shadow", "/tmp/c")
os.remove("/tmp/main.py"); os.symlink("/etc/passwd", "/tmp/main.py")
for name in "abc":
    try:
        os.listdir("/tmp/" + name) if name == "b" else open("/tmp/" + name)
        print("open", name)
    except OSError:
        pass
"""
    assert await said(code) == []


async def test_a_command_cannot_pass_off_other_files_as_its_outputs(pool):
    sandbox = await pool.checkout()
    result = await sandbox.run_command(
        ["/bin/sh", "-c", "echo built > good; ln -s /usr/bin/env link; mkfifo pipe; mkdir folder; echo done"],
        outputs=["good", "link", "pipe", "folder", "missing"],
    )
    await pool.release(sandbox)
    assert result.stdout == "done\n" and result.outputs == {"good": b"built\n"}


async def test_two_sandboxes_see_nothing_of_each_other():
    writer = """
import os, socket, time
open("/tmp/shared", "w").write("mine")
server = socket.socket(socket.AF_UNIX); server.bind("\\0shared"); server.listen()
time.sleep(1.5)
"""
    reader = """
import os, socket, time
time.sleep(0.5)
print(os.path.exists("/tmp/shared"), [pid for pid in os.listdir("/proc") if pid.isdecimal()])
try:
    socket.socket(socket.AF_UNIX).connect("\\0shared")
    print("connected")
except OSError as e:
    print(e.errno)
"""
    async with BubblewrapSandboxPool(n_workers=2) as pool:
        one, other = await pool.checkout(), await pool.checkout()
        written, read = await asyncio.gather(one.execute(writer), other.execute(reader))
    assert written.run_status is RunStatus.SUCCESS
    assert read.stdout.splitlines() == ["False ['1', '2']", "111"]
