"""The supervisor with real processes: what dies comes back, what dies too often ends it, nothing is left behind."""

import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ludic.http.address import free_port
from ludic.util import stop as stopping
from ludic.util.processes import RestartLimit
from ludic_pipeline.launch import processes
from ludic_pipeline.launch.processes import LocalProcesses, RayProcess, _why_not_connected
from ludic_pipeline.launch.supervisor import (
    MACHINE_LOST,
    MergedOutput,
    Outcome,
    Role,
    Supervisor,
    WhenDone,
)

pytestmark = pytest.mark.slow

FAST = RestartLimit(max_restarts=2, within_s=60, delay_s=0.01)
FOREVER = "import time; print('up', flush=True); time.sleep(600)"
UNTIL_TERM = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))"
)


def role(name: str, code: str, **facts: object) -> Role:
    return Role(name=name, command=(sys.executable, "-c", code), **facts)  # type: ignore[arg-type]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def pid_of(logs: Path, name: str) -> int | None:
    file = logs / f"{name}.pid"
    return int(file.read_text()) if file.exists() and file.read_text().strip() else None


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


class Watched:
    """A supervisor on roles of this test; `meanwhile` runs beside it."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.lines: list[tuple[str, str]] = []

    def run(self, *roles: Role, limit: RestartLimit = FAST, meanwhile: Callable[[], None] | None = None) -> Outcome:
        processes = LocalProcesses(self.logs)
        supervisor = Supervisor(
            roles, processes.start_role, show=lambda name, line: self.lines.append((name, line)), limit=limit
        )
        helper = threading.Thread(target=meanwhile or (lambda: None), daemon=True)
        helper.start()
        outcome = supervisor.run()
        helper.join(timeout=20)
        processes.close()
        for each in roles:
            pid = pid_of(self.logs, each.name)
            until(lambda pid=pid: pid is None or not is_alive(pid), f"{each.name} was left behind")
        return outcome

    def of(self, name: str) -> list[str]:
        return [line for who, line in self.lines if who == name]

    def kill(self, name: str, after: str) -> Callable[[], None]:
        """SIGKILL to the role itself, once it has said `after`."""

        def work() -> None:
            until(lambda: after in self.of(name), f"{name} never said {after}")
            os.kill(pid_of(self.logs, name) or 0, signal.SIGKILL)

        return work


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path / "logs")


def test_a_role_that_is_killed_is_restarted(watched, tmp_path):
    lives = tmp_path / "lives"
    code = f"""
import pathlib, time
lives = pathlib.Path({str(lives)!r})
with lives.open("a") as file: file.write("x")
print("life", len(lives.read_text()), flush=True)
if len(lives.read_text()) == 1: time.sleep(600)
"""
    outcome = watched.run(role("main", code, when_done=WhenDone.ENDS_ALL), meanwhile=watched.kill("main", "life 1"))
    assert outcome.code == 0 and watched.of("main") == ["life 1", "life 2"]
    assert any("main was ended by SIGKILL; restart 1 of at most 2" in line for line in watched.of("launch"))


def test_a_server_that_hangs_is_killed_and_restarted(watched, tmp_path):
    port, lives = free_port(), tmp_path / "lives"
    server = f"""
import http.server, pathlib
lives = pathlib.Path({str(lives)!r})
with lives.open("a") as file: file.write("x")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        print("asked in life", len(lives.read_text()), flush=True)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Answer).serve_forever()
"""
    main = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'end')!r}).exists(): time.sleep(0.02)"

    def stop_it() -> None:
        try:
            until(lambda: "asked in life 1" in watched.of("server"), "the first life was never asked")
            os.kill(pid_of(watched.logs, "server") or 0, signal.SIGSTOP)
            until(lambda: "asked in life 2" in watched.of("server"), "it was not restarted")
        finally:
            (tmp_path / "end").touch()

    outcome = watched.run(
        role("server", server, url=f"http://127.0.0.1:{port}", hung_after_s=1.5, stop_within_s=1.0),
        role("main", main, when_done=WhenDone.ENDS_ALL, needs=("server",)),
        meanwhile=stop_it,
    )
    assert outcome.code == 0 and "asked in life 2" in watched.of("server")
    assert any("server hangs: it accepts connections" in line for line in watched.of("launch")), watched.of("launch")


def test_role_that_dies_too_often_ends_the_run_and_is_quoted(watched):
    outcome = watched.run(
        role("actor", "import sys; print('no GPU here'); sys.exit(3)"),
        role("main", FOREVER, when_done=WhenDone.ENDS_ALL),
    )
    assert outcome.code == 1
    assert "actor ended with exit code 3 and has died 3 times" in outcome.reason and "no GPU here" in outcome.reason
    assert watched.of("actor").count("no GPU here") == 3


def test_deaths_outside_the_window_do_not_count(watched, tmp_path):
    lives = tmp_path / "lives"
    lives.touch()
    code = f"import sys, time; open({str(lives)!r}, 'a').write('x'); time.sleep(0.25); sys.exit(3)"
    third_life = f"import os, time\nwhile os.path.getsize({str(lives)!r}) < 3: time.sleep(0.02)"
    outcome = watched.run(
        role("actor", code),
        role("main", third_life, when_done=WhenDone.ENDS_ALL),
        limit=RestartLimit(max_restarts=1, within_s=0.2, delay_s=0.01),
    )
    assert outcome.code == 0 and sum("restart 1 of" in line for line in watched.of("launch")) >= 2


def test_hopeless_exit_code_is_not_restarted(watched):
    main = role(
        "main", "import sys; print('bad flag'); sys.exit(2)", when_done=WhenDone.ENDS_ALL, hopeless=frozenset({2})
    )
    outcome = watched.run(main)
    assert outcome.code == 2 and "bad flag" in outcome.reason and watched.of("main") == ["bad flag"]


def test_exit_code_zero_is_fine_for_actors_but_not_for_servers(watched):
    outcome = watched.run(
        role("actor", "pass", when_done=WhenDone.IS_FINE),
        role("server", "pass"),
        role("main", FOREVER, when_done=WhenDone.ENDS_ALL),
    )
    assert outcome.code == 1 and "server ended with exit code 0 and has died 3 times" in outcome.reason
    assert any("actor has no more to do" in line for line in watched.of("launch"))


def test_roles_are_stopped_after_those_that_need_them(watched):
    slow = f"{UNTIL_TERM}\nprint('up', flush=True)\ntime.sleep(600)"
    late = slow.replace("(print('bye'", "(time.sleep(0.5), print('bye'")
    outcome = watched.run(
        role("redis", slow), role("actor", late, needs=("redis",)), meanwhile=signal_after(watched, "redis", "actor")
    )
    assert outcome.code == 130
    said = [name for name, line in watched.lines if line == "bye"]
    assert said == ["actor", "redis"]


def signal_after(watched: Watched, *names: str) -> Callable[[], None]:
    def work() -> None:
        until(lambda: all("up" in watched.of(name) for name in names), "not all processes came up")
        os.kill(os.getpid(), signal.SIGINT)

    return work


def test_role_that_does_not_stop_in_time_is_killed(watched):
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    outcome = watched.run(role("actor", deaf, stop_within_s=0.3), meanwhile=signal_after(watched, "actor"))
    assert outcome.code == 130 and any("actor did not stop within 0.3 s" in line for line in watched.of("launch"))


def test_second_stop_request_kills_at_once(watched, monkeypatch):
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.0)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )

    def twice() -> None:
        signal_after(watched, "actor")()
        until(lambda: any("Stopping" in line for line in watched.of("launch")), "it never began to stop")
        os.kill(os.getpid(), signal.SIGTERM)

    assert watched.run(role("actor", deaf), meanwhile=twice).code == 130


def test_children_of_a_role_do_not_outlive_it(watched, tmp_path):
    code = f"""
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
"""
    assert watched.run(role("main", code, when_done=WhenDone.ENDS_ALL)).code == 0
    assert not is_alive(int((tmp_path / "child").read_text()))


def test_killed_supervisor_ends_roles_in_order(tmp_path):
    """redis is needed by the actor, so it has to end after it, although the supervisor is gone."""
    logs = tmp_path / "logs"
    program = f"""
import sys
from pathlib import Path
from ludic_pipeline.launch import processes
from ludic_pipeline.launch.processes import LocalProcesses, RayProcess
from ludic_pipeline.launch.supervisor import Role, Supervisor
ends = "import signal, sys, time, pathlib\\nname, delay = sys.argv[1], float(sys.argv[2])\\n" \\
    "def end(*_):\\n    time.sleep(delay); open({str(tmp_path / "order")!r}, 'a').write(name + ' '); sys.exit(0)\\n" \\
    "signal.signal(signal.SIGTERM, end); print('up', flush=True)\\nwhile True: time.sleep(1)"
def role(name, delay, **facts):
    return Role(name=name, command=(sys.executable, "-c", ends, name, delay), **facts)
roles = [role("redis", "0"), role("actor", "0.5", needs=("redis",))]
Supervisor(roles, LocalProcesses(Path({str(logs)!r})).start_role, show=lambda *_: None).run()
"""
    supervisor = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    until(lambda: all((logs / f"{name}.log").exists() and "up" in (logs / f"{name}.log").read_text() for name in
                      ("redis", "actor")), "not all processes came up")  # fmt: skip
    pids = [pid_of(logs, name) or 0 for name in ("redis", "actor")]
    supervisor.kill()
    supervisor.wait()
    until(lambda: not any(map(is_alive, pids)), "a child outlived its supervisor")
    assert (tmp_path / "order").read_text().split() == ["actor", "redis"]


def test_merged_output_prefixes_roles_and_has_no_colour_in_files():
    stream = io.StringIO()
    show = MergedOutput(["redis", "actor-0"], stream)
    show("redis", "ready")
    show("actor-0", "playing")
    assert stream.getvalue() == "redis   | ready\nactor-0 | playing\n"


# --- on a Ray cluster ---


class FakeRay:
    """Answers calls of a runner when the test says so."""

    class exceptions:
        class RayActorError(Exception):
            pass

    def __init__(self) -> None:
        self.answers: dict[str, object] = {}
        self.killed = 0
        self.look = self  # the runner, too

    def wait(self, refs, timeout):
        assert timeout == 0, "the supervisor must not wait"
        return [ref for ref in refs if ref in self.answers], []

    def get(self, ref):
        if isinstance(answer := self.answers.pop(ref), Exception):
            raise answer
        return answer

    def remote(self):
        return "look"

    def nodes(self):
        return [{"NodeID": "0123456789", "NodeManagerAddress": "10.0.0.2"}]

    def kill(self, runner):
        self.killed += 1


@pytest.fixture
def on_ray(tmp_path):
    ray = FakeRay()
    ray.answers["started"] = "0123456789"
    return ray, RayProcess(ray, ray, "started", tmp_path / "actor-0.log")


def test_role_on_ray_says_where_it_runs_and_how_it_ended(on_ray):
    ray, process = on_ray
    assert process.poll() is None and process.read() == b"ray: runs on 10.0.0.2 (node 01234567)\n"
    ray.answers |= {"started": "0123456789", "look": (None, b"hello\n")}
    assert process.poll() is None and process.read() == b"hello\n"
    ray.answers |= {"started": "0123456789", "look": (3, b"bye\n")}
    assert process.poll() == 3 and process.read() == b"bye\n" and ray.killed == 0


def test_machine_that_does_not_answer_is_given_up_and_its_role_killed(on_ray, monkeypatch):
    ray, process = on_ray
    clock = [time.monotonic()]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    assert process.poll() is None
    ray.answers["started"] = "0123456789"
    clock[0] += 59
    assert process.poll() is None and ray.killed == 0
    clock[0] += 2
    assert process.poll() == MACHINE_LOST and ray.killed == 1
    assert process.read().endswith(b"ray: its machine has not answered for 60 s\n")


def test_a_ray_cluster_that_wants_a_token_is_not_reported_as_absent():
    """What Ray 2.60 raises where a token is missing (ConnectionError) and where the mode is set without one (AuthenticationError)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        failed = ConnectionError(f"Failed to connect to Ray cluster at {place}.")
        said = _why_not_connected("auto", failed)
        assert said.startswith(f"{place} answers") and "RAY_AUTH_MODE=token" in said and "no Ray" not in said
        assert _why_not_connected(place, ConnectionError("worker.py:23: 12:30:45")).startswith(f"{place} answers")
    assert _why_not_connected("host:65536", failed).startswith("There is no Ray cluster at 'host:65536'")
    assert _why_not_connected("auto", failed).startswith("There is no Ray cluster at 'auto': Failed to connect")
    assert "refused the connection: no token" in _why_not_connected("auto", RuntimeError("no token"))


def test_machine_that_ray_has_lost_is_given_up_at_once(on_ray):
    ray, process = on_ray
    ray.answers["look"] = FakeRay.exceptions.RayActorError("its node has died")
    assert process.poll() == MACHINE_LOST and process.read().endswith(b"ray: its node has died\n") and ray.killed == 1
