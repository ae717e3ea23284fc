"""The process inside the sandbox: takes a job, runs it as a child, reports the result, ends.

The sandbox's own Python (3.9 or newer) runs its source, so it imports nothing of Ludic, and few modules at all: every run pays for
them. ludic_sandbox.runner.runner_process is the other end of the conversation.

The program gets the rest of this process's stdin, and pipes that this process reads as stdout and stderr. It cannot write to the
frames on this process's stdout: the descriptor is closed in the child, and the process is not dumpable, which closes
/proc/<pid>/fd, /proc/<pid>/mem and ptrace to processes of the same user. In a sandbox it is process 1, so the only signal from
inside that ends it is SIGINT (Python handles it), which is noticed. When it ends, the kernel ends every other process of the
sandbox. After a job with `keep` it kills what the job has left and waits for the next one. A frame is a letter, the length in four
bytes, and the payload:

    R   ready for a job
    C   the compile record, written before the first line of the program runs
    O E a piece of stdout, of stderr
    F   an output file: its index in the job's list, a space, the content
    X   how it ended; the last frame
"""

import _ctypes
import _signal  # type: ignore[import-not-found] # `signal` would import enum and more
import gc
import marshal
import os
import resource
import select
import stat
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
SIGKILL = 9
ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without the price of importing ast
PIECE = 1 << 16
NOTES, GO = 3, 4  # descriptors of the child, until the program runs; then NOTES only


def _read_exactly(size: int) -> bytes:
    parts = []
    while size:
        data = os.read(0, min(size, 1 << 20))
        if not data:
            os._exit(0)  # the parent is gone, or has no job
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def send(letter: bytes, payload: bytes) -> None:
    view = memoryview(letter + len(payload).to_bytes(4, "big") + payload)
    while view:
        view = view[os.write(1, view) :]


def guard(dumpable: int) -> None:
    """Die with the parent; `dumpable` opens this process to others of the user."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    prctl(PR_SET_DUMPABLE, dumpable)


def prctl(option: int, value: int) -> None:
    # As ctypes does, without importing its Python part, which would take a tenth of a run.
    function = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type] # None is this process
    if _ctypes.call_function(function, (option, value, 0, 0, 0)) != 0:
        raise OSError("prctl was refused")


# --- the child ---


def _become_the_program(job: dict, stdout: int, stderr: int, notes: int, go: int) -> None:
    """In the child: set limits and descriptors, then run the program. Returns where the interpreter should end by itself."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.dup2(notes, NOTES, inheritable=False)
    os.dup2(go, GO, inheritable=False)
    os.closerange(GO + 1, 256)
    if job["keep"]:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the pipe has the next jobs
        os.closerange(GO + 1, 256)
    guard(1)
    for name, value in job["rlimits"].items():
        limit = vars(resource)[name]
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if job["argv"]:
        _exec_command(job["argv"])
    else:
        run_python(job)


def _exec_command(argv: list) -> None:
    import signal

    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and that would be inherited
    note(("success", None, None, None, 0.0))
    _wait_for_go()
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def run_python(job: dict) -> None:
    path = job["program"]
    sys.argv = [path]
    extra = [entry for entry in job["env"].get("PYTHONPATH", "").split(":") if entry]
    sys.path[:] = [job["cwd"], *extra, *sys.path, *_site_folders()]
    if job["skip_compile"]:
        note(("success", None, None, None, 0.0))
        code = None
    else:
        started = time.perf_counter()
        verdict, code = compiled(path)
        note((*verdict, (time.perf_counter() - started) * 1000.0))
        if code is None or job["compile_only"]:
            os._exit(0)
    _wait_for_go()
    main = type(sys)("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    try:
        if code is None:
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter treats an uncaught error
        if isinstance(error, MemoryError):
            os.write(NOTES, b"M")
        ours = error.__traceback__
        error = error.with_traceback(ours.tb_next if ours else None)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _site_folders() -> list:
    """Folders of installed packages. Like `import site`, this provides exit() and help(); .pth files are not run."""
    import site

    site.setquit()
    site.sethelper()
    return [folder for folder in site.getsitepackages() if os.path.isdir(folder)]


def note(record: tuple) -> None:
    os.write(NOTES, repr(record).encode("utf-8", "replace") + b"\n")


def _wait_for_go() -> None:
    """The program starts after the compile record was sent: if it then ends its supervisor, the run counts as killed, not as a
    failure of the sandbox."""
    os.read(GO, 1)
    os.close(GO)


def compiled(path: str) -> tuple:
    """((status, message, line, column), code object or None)."""
    try:
        with open(path, "rb") as file:
            source = file.read()
        tree = compile(source, path, "exec", ONLY_AST, dont_inherit=True) if b"import" in source else None
        missing = _first_missing_import(tree.body) if tree else None
        if missing:
            return ("import_error", f"No module named {missing[0]!r}", missing[1], None), None
        return ("success", None, None, None), compile(tree or source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return ("syntax_error", cut(error.msg), error.lineno, error.offset), None
    except ValueError as error:  # null bytes, before Python 3.11.4
        return ("syntax_error", cut(error), None, None), None
    except (RecursionError, MemoryError, OverflowError) as error:
        return ("unknown_error", cut(f"{type(error).__name__}: {error}"), None, None), None


def cut(text: object) -> str:
    return str(text)[:2000]


def _first_missing_import(statements: list) -> "tuple[str, int] | None":
    """The first missing module among the program's leading imports. Nothing runs before them, so the program is certain to fail."""
    for node in statements:
        kind = type(node).__name__
        if kind == "Import":
            names = [alias.name for alias in node.names]
        elif kind == "ImportFrom" and not node.level:
            names = [node.module]
        elif kind == "Expr" and type(node.value).__name__ == "Constant":
            names = []  # the docstring
        else:
            return None
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.modules and not any(finder.find_spec(top, None) for finder in sys.meta_path):
                return top, node.lineno
    return None


# --- the parent ---


class Streams:
    """Forwards the child's stdout and stderr, up to a number of bytes each."""

    def __init__(self, stdout: int, stderr: int, limit: int) -> None:
        self.letters = {stdout: b"O", stderr: b"E"}
        self.left = {stdout: limit, stderr: limit}
        self.overflow = False
        self.waited = 0.0
        """Seconds in which the reader of the frames was busy; the program's time excludes them."""

    def forward(self, fd: int) -> bool:
        """False at the end of the stream, or when there is nothing to read now."""
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return False
        if len(data) > self.left[fd]:
            data, self.overflow = data[: self.left[fd]], True
        self.left[fd] -= len(data)
        if data:
            started = time.monotonic()
            send(self.letters[fd], data)
            self.waited += time.monotonic() - started
        return bool(data) and not self.overflow

    def drain(self) -> None:
        """Forward what the pipes hold at the end; surviving children of the program may keep them open."""
        for fd in self.letters:
            os.set_blocking(fd, False)
            while not self.overflow and self.forward(fd):
                pass


class Notes:
    """Reads the child's notes: first the compile record; any later byte claims that memory ran out."""

    def __init__(self, fd: int, go: int) -> None:
        self.fd = fd
        self.go = go
        self.record = b""
        self.memory_error = False

    @property
    def has_record(self) -> bool:
        return b"\n" in self.record

    def read(self) -> bool:
        try:
            data = os.read(self.fd, PIECE)
        except BlockingIOError:
            return False
        if self.has_record:
            self.memory_error = self.memory_error or bool(data)
            return bool(data)
        self.record += data
        line, newline, rest = self.record.partition(b"\n")
        if newline:
            self.record = line + newline
            self.memory_error = bool(rest)
            send(b"C", line)
            os.write(self.go, b"g")
        return bool(data)


def watch(pid: int, streams: Streams, notes: Notes, seconds: float) -> tuple:
    """Forward output until the child ends or reaches a limit: (wait status, usage, whether its time was up).

    The clock is here, since the parent may be busy (an update on the same thread) when a program ends. It runs once for compiling
    and once for the program.
    """
    child = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (child, notes.fd, *streams.letters):
        poll.register(fd, select.POLLIN)
    deadline, compiling, late = time.monotonic() + seconds, True, False
    while not (late or streams.overflow):
        left = deadline + streams.waited - time.monotonic()
        ready = dict(poll.poll(max(0.0, left) * 1000.0 + 1.0))
        for fd in ready.keys() - {child}:
            if not (notes.read() if fd == notes.fd else streams.forward(fd)):
                poll.unregister(fd)
        if compiling and notes.has_record:
            deadline, compiling = time.monotonic() + seconds, False
        if child in ready:
            break
        late = time.monotonic() >= deadline + streams.waited
    else:
        os.kill(pid, SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    os.close(child)
    os.set_blocking(notes.fd, False)
    while notes.read():
        pass
    streams.drain()
    return status, usage, late


def oom_kills() -> int:
    """Processes of this container that the kernel killed for memory. Engines show a container its cgroup, and often do not report
    such a kill themselves."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path) as file:
                counts = dict(line.split() for line in file)
        except OSError:
            continue
        return int(counts.get("oom_kill", 0))
    return 0


def _send_outputs(job: dict) -> None:
    left = job["max_outputs_bytes"]
    for index, path in enumerate(job["outputs"]):
        data = content(os.path.join(job["cwd"], path), left)
        if data is not None:
            left -= len(data)
            send(b"F", b"%d " % index + data)


def content(path: str, limit: int) -> "bytes | None":
    """The content of a regular file within the limit. A link in the path leads only where the program itself can read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            facts = os.fstat(fd)
            return file.read(limit) if stat.S_ISREG(facts.st_mode) and facts.st_size <= limit else None
    except OSError:
        return None


def _write_files(job: dict) -> None:
    for path, data in job["files"]:
        path = os.path.join(job["cwd"], path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, 0o755)


def _end_others() -> None:
    """Kill every process that a job has left and wait until they are gone.

    Process 1 kills all of its namespace at once. Elsewhere orphans become children of this process, their subreaper; each round
    kills the children, until a round finds none.
    """
    while left := children():
        for pid in [-1] if os.getpid() == 1 else left:
            try:  # noqa: SIM105 - contextlib is one more import for every run
                os.kill(pid, SIGKILL)
            except ProcessLookupError:
                pass
        for pid in left:
            os.waitpid(pid, 0)


def children() -> list:
    """Also those that have ended. In a namespace all processes come here when their parents are killed."""
    own = os.getpid()
    try:
        with open(f"/proc/{own}/task/{own}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _parent_of(pid) == own]


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:  # it has just ended
        return 0


def supervise() -> None:
    """The whole life of this process; returns in the child only."""
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # the parent may have been started with it ignored
    guard(0)
    send(b"R", b"%d.%d" % sys.version_info[:2])
    while True:
        job = marshal.loads(_read_exactly(int.from_bytes(_read_exactly(4), "big")))
        try:
            _write_files(job)
        except OSError as error:
            if not job["keep"]:
                raise
            refuse(error)
            continue
        if _run_job(job):
            return
        if not job["keep"]:
            os._exit(0)


def refuse(error: OSError) -> None:
    """The files of a job cannot be written, as on a full disk: it ends with exit code 1, and the next job may come."""
    send(b"C", repr(("success", None, None, None, 0.0)).encode())
    send(b"E", f"{error.filename}: {error.strerror}\n".encode("utf-8", "replace"))
    facts = {"run_ms": 0.0, "cpu_ms": 0.0, "peak": 0, "memory_error": False, "overflow": False, "timed_out": False}
    send(b"X", repr({"status": 1 << 8, **facts}).encode())


def _run_job(job: dict) -> bool:
    """Run it as a child and report; True in that child only, when the interpreter should end by itself."""
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    notes_r, notes_w = os.pipe()
    go_r, go_w = os.pipe()
    if job["keep"] and os.getpid() != 1:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    started = time.perf_counter()
    gc.freeze()  # memory that the collector does not visit is not copied for the child
    pid = os.fork()
    if pid == 0:
        _become_the_program(job, out_w, err_w, notes_w, go_r)
        return True
    # Not go_r: "go" is also written to a child that did not compile and is gone.
    for fd in (out_w, err_w, notes_w) if job["keep"] else (0, out_w, err_w, notes_w):
        os.close(fd)
    streams = Streams(out_r, err_r, job["max_output_bytes"])
    notes = Notes(notes_r, go_w)
    status, usage, late = watch(pid, streams, notes, job["seconds"])
    run_ms = (time.perf_counter() - started) * 1000.0
    if job["keep"]:
        _end_others()
        for fd in (out_r, err_r, notes_r, go_r, go_w):
            os.close(fd)
    _send_outputs(job)
    ending = {
        "status": status,
        "run_ms": run_ms,
        "cpu_ms": (usage.ru_utime + usage.ru_stime) * 1000.0,
        "peak": usage.ru_maxrss * 1024,
        "memory_error": notes.memory_error,
        "overflow": streams.overflow,
        "timed_out": late,
        "oom_kills": oom_kills(),
    }
    send(b"X", repr(ending).encode())
    return False


if __name__ == "__main__":
    supervise()
