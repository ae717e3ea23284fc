"""Two hosts on one machine: a pipeline on a two-node Ray cluster that loses a host, FSDP over both with torchrun, and runs of one
host that use the env server and the sandbox server of the other.

    sudo .venv/bin/python scripts/two_hosts.py actors learner power head fsdp servers away

A host is a network namespace with its own address, and its own processes, hostname, /tmp, /dev/shm and home folder. They share
/mnt, the disk that docs/pipeline.md asks for, and this Python environment. Cases:

    actors    the learner on host a, the actor on host b; b is killed and started again
    learner   the actor on a, the learner on b; b is killed and started again
    power     as `learner`, but the cable of b is pulled first, so that no connection is closed
    head      as `actors`, but a is killed, with Redis, Ray's head and the launcher; the run is resumed
    fsdp      torchrun on both hosts trains what torchrun on one trains
    servers   runs on a use `ludic env-server` and `ludic sandbox-server` on b, which know their tokens and are killed and started
    away      the env server stays away, and the cable is pulled: the runs end, and are resumed

Needs root on Linux, `ip` (iproute2), `unshare` and `nsenter` (util-linux), redis-server, and the extras train, pipeline and ray.
The processes of both hosts end with this one, however it ends. Namespaces are removed, except after kill -9 (`ip netns del`).
"""
# ruff: noqa: T201 - a script prints

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BEGIN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
TOOLS = ("ip", "unshare", "nsenter", "setpriv", "redis-server")
SETUP = (
    "mount --make-rprivate / && "
    "mount --bind {disk} /mnt && mount --bind {own}/hosts /etc/hosts && mount --bind {own} /tmp && "
    "mount -t tmpfs tmpfs /dev/shm && hostname {name} && "
    "echo ready && { sleep infinity & wait; }"
)
STEPS = 30
SAMPLES = 32
RUN = [
    "rps.py:RockPaperScissors", "--model", "tiny", "--max-tokens", "1", "--group-size", "16", "--lr", "3e-3",
    "--rollouts-per-update", str(SAMPLES), "--checkpoint-every", "5", "--actors", "1", "--logger", "print",
]  # fmt: skip
ACCOUNT = re.compile(
    r"produced (\d+) = (\d+) acknowledged \+ (\d+) stale \+ (\d+) filtered \+ (\d+) dead \+ (\d+) fetched \+ (\d+) waiting"
)


# --- hosts ---


@dataclass
class Host:
    """A host that can be killed and started again; its disk stays."""

    name: str
    address: str
    namespace: str
    own: Path
    """What it sees as /tmp."""
    disk: Path
    """What both see as /mnt."""
    environment: dict[str, str] = field(default_factory=dict)
    _guard: "subprocess.Popen[str] | None" = None
    _init: int = 0

    def start(self) -> None:
        self.own.mkdir(exist_ok=True)
        (self.own / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 a\n10.77.0.2 b\n")
        namespaces = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        begin = SETUP.replace("{own}", str(self.own)).replace("{disk}", str(self.disk)).replace("{name}", self.name)
        self._guard = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.namespace, *namespaces, "bash", "-c", begin],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._guard.stdout is not None, "it is a pipe"
        said = self._guard.stdout.readline()
        if said != "ready\n":
            raise SystemExit(f"Host {self.name} did not start: {self._guard.communicate()[1]}")
        children = f"/proc/{self._guard.pid}/task/{self._guard.pid}/children"
        self._init = int(Path(children).read_text())

    def kill(self) -> None:
        """kill -9 of its first process, with which the kernel kills all others."""
        if self._guard is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
            self._guard.wait()
            self._guard = None

    def popen(self, *command: str, **more: str) -> "subprocess.Popen[str]":
        """Start a command here, in /mnt."""
        shown = [part if part != str(BIN / Path(part).name) else Path(part).name for part in command]
        print(f"{self.name}$ {shlex.join(shown)}", flush=True)
        return subprocess.Popen(
            ["nsenter", "--target", str(self._init), "--mount", "--net", "--pid", "--uts", "--ipc", "--wdns=/mnt", *command],
            env={**self.environment, **more}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, *command: str, timeout_s: float = 60.0, **more: str) -> str:
        process = self.popen(*command, **more)
        said, _ = process.communicate(timeout=timeout_s)
        if process.returncode:
            raise SystemExit(f"{self.name}: {shlex.join(command)} ended with {process.returncode}:\n{said}")
        return said

    def link(self, state: str) -> None:
        ip("-n", self.namespace, "link", "set", "eth0", state)

    def commands(self) -> list[list[bytes]]:
        """The command of each process here, by the pid namespace of each process of the machine."""
        found = []
        ours = os.readlink(f"/proc/{self._init}/ns/pid")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns" / "pid") == ours:
                    found.append((process / "cmdline").read_bytes().split(b"\0"))
        return found

    def roles(self) -> set[str]:
        """Which of learner and actor have a process here."""
        ludic = [words for words in self.commands() if b"ludic.cli.main" in words]
        ours = [words for words in ludic if b"launch" not in words and b"--pipe" not in words]
        return {"actor" if b"actor" in words else "learner" for words in ours}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Hosts a (10.77.0.1) and b (10.77.0.2), with a cable between them."""
    with tempfile.TemporaryDirectory(prefix="ludic-hosts-") as place, contextlib.ExitStack() as stack:
        disk = Path(place) / "disk"
        disk.mkdir()
        password, env_token, sandbox_token = (secrets.token_hex(12) for _ in range(3))
        environment = {
            "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HOME": "/tmp",
            "LUDIC_REDIS_URL": f"redis://:{password}@10.77.0.1:6380/0", "REDIS_PASSWORD": password,
            "LUDIC_ENV_TOKEN": env_token, "LUDIC_SANDBOX_TOKEN": sandbox_token,
            "OMP_NUM_THREADS": "1", "RAY_DISABLE_METRICS_COLLECTION": "1", "GLOO_SOCKET_IFNAME": "eth0",
            **{name: value for name, value in os.environ.items() if name.startswith("RAY_health_check_")},
        }  # fmt: skip
        hosts = []
        for name, address in (("a", "10.77.0.1"), ("b", "10.77.0.2")):
            namespace = f"ludic-{os.getpid()}-{name}"
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            hosts.append(Host(name, address, namespace, Path(place) / name, disk, environment))
        ends = [["eth0", "netns", host.namespace] for host in hosts]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "lo", "up")
            host.link("up")
            stack.callback(host.kill)
            host.start()
        yield hosts[0], hosts[1]


# --- a pipeline on Ray ---


def start_cluster(a: Host, b: Host) -> None:
    (a.own / "redis").mkdir(exist_ok=True)
    a.popen(
        "bash", "-c",
        "exec redis-server --bind 10.77.0.1 --port 6380 --requirepass $REDIS_PASSWORD --dir /tmp/redis --save '' "
        "--appendonly yes --appendfsync always --loglevel warning",
    )  # fmt: skip
    a.run(*ray_start(a), "--head", "--port=6379", "--include-dashboard=false", "--disable-usage-stats")
    b.popen(*ray_start(b), "--address=10.77.0.1:6379")


def ray_start(host: Host) -> list[str]:
    own = json.dumps({f"host_{host.name}": 1})
    return [
        str(BIN / "ray"), "start", f"--node-ip-address={host.address}", f"--resources={own}", "--num-cpus=1",
        "--object-store-memory=80000000",
    ]  # fmt: skip


@dataclass
class Launched:
    """`ludic launch`, and what it has said."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)

    def until(self, condition: Callable[[str], object], what: str, timeout_s: float = 240.0) -> None:
        """Read on until a line meets the condition."""
        assert self.process.stdout is not None, "it is a pipe"
        signal.alarm(int(timeout_s))  # ends the script
        for line in self.process.stdout:
            self.lines.append(line)
            if "[trainer] step" not in line:  # the metrics of an update; runs/NAME/metrics.jsonl has them
                print(f"  {time.monotonic() - BEGIN:5.1f} s  {line}", end="", flush=True)
            if condition(line):
                signal.alarm(0)
                return
        raise SystemExit(f"{what} did not come.")


def launch(a: Host, learner: Host, actor: Host, *what: str) -> Launched:
    """`ludic launch` on host a."""
    (a.disk / "rps.py").write_text(rock_paper_scissors())
    where = ["--learner-resources", json.dumps({f"host_{learner.name}": 1})]
    where += ["--actor-resources", json.dumps({f"host_{actor.name}": 1})]
    return Launched(a.popen(str(BIN / "ludic"), "launch", *what, "--ray", *where))


def begin(a: Host, name: str, learner: Host, actor: Host) -> Launched:
    """A new run, after its update 7; the roles are where they should be."""
    run = launch(a, learner, actor, *RUN, "--steps", str(STEPS), "--name", name)
    run.until(lambda line: "step 7 |" in line, "update 7")
    places = dict(re.findall(r"(learner|actor-0) +\| ray: runs on ([\d.]+)", "".join(run.lines)))
    expect(places == {"learner": learner.address, "actor-0": actor.address}, f"the roles run on {places}")
    expect(learner.roles() == {"learner"}, f"host {learner.name} runs {learner.roles()}")
    expect(actor.roles() == {"actor"}, f"host {actor.name} runs {actor.roles()}")
    return run


def pipeline(a: Host, b: Host, name: str, learner: Host, actor: Host, *, pull_cable: bool = False) -> None:
    """Train on both hosts, kill b and start it again on the way."""
    run = begin(a, name, learner, actor)
    killed = time.monotonic()
    if pull_cable:
        b.link("down")
    b.kill()
    print(f"# host b is killed{', with its cable pulled before' if pull_cable else ''}", flush=True)
    run.until(lambda line: "restart 1 of at most" in line, "the end of b's role")
    print(f"# found out after {time.monotonic() - killed:.1f} s", flush=True)
    b.link("up")
    b.start()
    b.popen(*ray_start(b), "--address=10.77.0.1:6379")
    run.until(lambda line: f"runs on {b.address}" in line, "b's role again")
    print(f"# its role runs on b again, {time.monotonic() - killed:.1f} s after the kill", flush=True)
    check_account(run, a.disk / "runs" / name)


def head(a: Host, b: Host) -> None:
    """Kill host a, with everything that others depend on, and resume the run on a new cluster."""
    begin(a, "head", learner=a, actor=b)
    a.kill()
    print("# host a is killed, with Redis, the head of Ray and the launcher", flush=True)
    a.start()
    b.run(str(BIN / "ray"), "stop", "--force")  # it would end by itself after a minute without its head
    start_cluster(a, b)
    check_account(launch(a, a, b, "runs/head", "--resume"), a.disk / "runs" / "head")


def rock_paper_scissors() -> str:
    """The env of the README."""
    return re.findall(r"This file is `rps.py`:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]


def check_account(run: Launched, folder: Path) -> None:
    run.until(lambda line: f"Done after update {STEPS} of {STEPS}" in line, "the end of training")
    run.until(lambda line: "learner is done" in line, "the end of the launcher")
    expect(run.process.wait(60) == 0, f"ludic launch ended with {run.process.returncode}")
    produced, *parts = map(int, ACCOUNT.findall("".join(run.lines))[-1])
    expect(produced == sum(parts), f"the account does not balance: {produced} and {parts}")
    expect(parts[0] == STEPS * SAMPLES, f"{parts[0]} acknowledged, {STEPS * SAMPLES} expected")
    steps = [row["step"] for row in read_rows(folder)]
    expect(steps == list(range(1, STEPS + 1)), f"updates {steps}")
    print(f"# {STEPS} updates; the account balances: {produced} = {' + '.join(map(str, parts))}", flush=True)


# --- servers of envs and of sandboxes ---

ENV = "/tmp/rps.py:RockPaperScissors"
"""A file of b alone: /tmp is a host's own."""
LETTERS = '''from ludic.parsers import ParseResult


def as_program(text):
    """A reply of one character, as a program that prints it."""
    return ParseResult(f"print({text!r})", 0.0, None)
'''
PROBLEM = {"question": "Print the letter p.", "tests": [{"input": "", "expected": "p"}]}
TINY = [
    "--model", "tiny", "--max-tokens", "1", "--group-size", "16", "--checkpoint-every", "5", "--logger", "print",
]  # fmt: skip
PLAYED_THERE = ["train", ENV, *TINY, "--lr", "3e-3", "--env-server", "10.77.0.2:7700"]
GRADED_THERE = [
    "train", "code_exec", *TINY, "--lr", "1e-2", "--rollouts-per-update", "32", "--data", "/mnt/problem.jsonl",
    "--parser", "/mnt/letters.py:as_program", "--system-prompt", "", "--set", 'config={"use_cache": false}',
    "--sandbox", "http://10.77.0.2:8002",
]  # fmt: skip


@dataclass
class Server:
    """`ludic env-server` or `ludic sandbox-server` on a host."""

    host: Host
    kind: str
    arguments: Sequence[str]
    process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        program = f'echo $$ > /tmp/{self.kind}; exec ludic {self.kind} "$@"'
        self.process = self.host.popen("bash", "-c", program, self.kind, *self.arguments)
        assert self.process.stdout is not None, "it is a pipe"
        line = self.process.stdout.readline()
        expect(self.host.address in line, f"{self.kind} said {line!r}")
        print(f"  {line}", end="", flush=True)

    def end(self, signal_name: str) -> int:
        """Its exit code."""
        assert self.process is not None, "it was started"
        self.host.run("bash", "-c", f"kill -{signal_name} $(cat /tmp/{self.kind})")
        return self.process.wait(60)


def servers_of(b: Host) -> tuple[Server, Server]:
    """Both, started."""
    (b.own / "rps.py").write_text(rock_paper_scissors())
    (b.disk / "letters.py").write_text(LETTERS)
    (b.disk / "problem.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    envs = Server(b, "env-server", [ENV, "--host", b.address, "--workers", "2"])
    sandboxes = Server(b, "sandbox-server", ["--host", b.address, "--workers", "2"])
    for server in (envs, sandboxes):
        server.start()
    return envs, sandboxes


def train(a: Host, *what: str, **more: str) -> Launched:
    return Launched(a.popen(str(BIN / "ludic"), *what, **more))


def servers(a: Host, b: Host) -> None:
    """Runs on a with the envs, and with the sandboxes, of b: refused without the token, and while each server is killed."""
    envs, sandboxes = servers_of(b)
    for command, variable, missing, wrong in (
        (PLAYED_THERE, "LUDIC_ENV_TOKEN", "the token is wrong. Set $LUDIC_ENV_TOKEN", "the token is wrong"),
        (GRADED_THERE, "LUDIC_SANDBOX_TOKEN", "wants a token", "refuses the token"),
    ):
        for token, sentence in (("", missing), ("wrong", wrong)):
            refused = a.popen(
                str(BIN / "ludic"), *command, "--steps", "1", "--name", f"refused{token}", **{variable: token}
            )
            said, _ = refused.communicate(timeout=120)
            expect(refused.returncode == 2 and sentence in said, f"{refused.returncode} instead of a refusal: {said}")
            expect("Traceback" not in said, f"a traceback: {said}")
            print(f"# {variable}={token or repr('')}: {said.strip().splitlines()[-1]}", flush=True)
    said = a.run(str(BIN / "ludic"), "play", "mbpp", "--watch", timeout_s=120, LUDIC_SANDBOX="http://10.77.0.2:8002")
    expect("All 3 tests passed." in said, f"the reference of mbpp is not right: {said}")
    print(f"# mbpp, its reference graded on b: {said.strip().splitlines()[-1]}", flush=True)
    for server, command, steps in ((envs, PLAYED_THERE, 75), (sandboxes, GRADED_THERE, 20)):
        run = train(a, *command, "--steps", str(steps), "--name", server.kind)
        run.until(lambda line: "step 3 |" in line, "update 3")
        expect(server.end("KILL") != 0, "kill -9 had no effect")
        killed = time.monotonic()
        print(f"# kill -9 of the {server.kind}", flush=True)
        time.sleep(2)
        server.start()
        run.until(lambda line: "step 4 |" in line or "step 5 |" in line, "the next update")
        print(f"# the next update, {time.monotonic() - killed:.1f} s after the kill", flush=True)
        run.until(lambda line: line.startswith("Done after"), "the end of training")
        expect(run.process.wait(60) == 0, f"ludic train ended with {run.process.returncode}")
        check_learned(a.disk / "runs" / server.kind, steps)
    for server in (envs, sandboxes):
        expect(server.end("TERM") == 0, f"{server.kind} ended with an error")
    for _ in range(100):  # processes of the last programs may be ending
        if not (left := [words for words in b.commands() if words[0] not in (b"bash", b"sleep", b"")]):
            break
        time.sleep(0.1)
    expect(not left, f"left on b: {left}")
    print("# no process is left on b", flush=True)


def away(a: Host, b: Host) -> None:
    """The env server is killed and stays away: the run ends, and is resumed when it is back. Then the cable is pulled."""
    envs, sandboxes = servers_of(b)
    sandboxes.end("TERM")
    for what, name in ((lambda: envs.end("KILL"), "killed"), (lambda: b.link("down"), "unplugged")):
        run = train(a, *PLAYED_THERE, "--steps", "75", "--name", name)
        run.until(lambda line: "step 7 |" in line, "update 7")
        what()
        begin = time.monotonic()
        signal.alarm(600)
        said, _ = run.process.communicate()
        signal.alarm(0)
        expect(run.process.returncode == 2, f"ludic train ended with {run.process.returncode}: {said}")
        expect("Traceback" not in said, f"a traceback: {said}")
        print(
            f"# {name}: the run ended after {time.monotonic() - begin:.0f} s: {said.strip().splitlines()[-1]}",
            flush=True,
        )
        if name == "killed":
            envs.start()
        else:
            b.link("up")
        run = train(a, "train", f"runs/{name}", "--resume")
        run.until(lambda line: line.startswith("Done after"), "the end of training")
        check_learned(a.disk / "runs" / name, 75)


def check_learned(folder: Path, steps: int) -> None:
    rows = read_rows(folder)
    expect([row["step"] for row in rows] == list(range(1, steps + 1)), f"updates {[row['step'] for row in rows]}")
    rewards = [row["train/avg_total_reward"] for row in rows]
    failed = sum(row.get("train/num_failed", 0) for row in rows)
    print(
        f"# {steps} updates; reward {rewards[0]:.3f}, then {rewards[-1]:.3f}; {failed:.0f} episodes failed", flush=True
    )
    expect(rewards[-1] > 0.9, f"reward {rewards[-1]} at the end")


# --- FSDP with torchrun ---

TRAIN = [
    str(ROOT / "examples" / "fsdp2_training" / "train_math_fsdp2.py"), "--model", "tiny", "--engine", "local", "--device", "cpu",
    "--data", "problems.jsonl", "--parser", "final_number", "--steps", "3", "--rollouts-per-update", "64", "--group-size", "32",
    "--max-tokens", "8", "--max-seq-len", "512", "--micro-token-budget", "1024", "--lr", "1e-3", "--max-lag", "0",
]  # fmt: skip


def fsdp(a: Host, b: Host) -> None:
    """The example of several ranks: one rank on each host, and two ranks on one host."""
    rows = [{"problem": f"What is {i} + 0?", "solution": rf"\boxed{{{i}}}"} for i in range(10)]
    (a.disk / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29500", "--rdzv-id=x"]
    there = b.popen(str(BIN / "torchrun"), *both, *TRAIN, "--name", "two")
    here = a.popen(str(BIN / "torchrun"), *both, *TRAIN, "--name", "two")
    for host, process in ((a, here), (b, there)):
        said, _ = process.communicate(timeout=240)
        expect(process.returncode == 0, f"torchrun on {host.name} ended with {process.returncode}: {said}")
    a.run(str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", *TRAIN, "--name", "one", timeout_s=240)
    compare(a.disk / "runs" / "two", a.disk / "runs" / "one")


def compare(found: Path, expected: Path) -> None:
    """Curves to 1e-4 and weights to 1e-5, the tolerances of tests/integration/test_fsdp.py."""
    import torch
    from safetensors.torch import load_file

    rows = [read_rows(folder) for folder in (found, expected)]
    expect(len(rows[0]) == len(rows[1]) == 3, f"{len(rows[0])} and {len(rows[1])} updates")
    for ours, theirs in zip(*rows, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/avg_total_reward", "train/entropy"):
            print(
                f"# update {ours['step']}, {name}: {ours[name]:.6g} on two hosts, {theirs[name]:.6g} on one", flush=True
            )
            expect(abs(ours[name] - theirs[name]) <= 1e-5 + 1e-4 * abs(theirs[name]), f"{name} differs")
    expect(any(row["train/grad_norm"] > 0 for row in rows[0]), "nothing was learned")
    files = [next(folder.glob("model_*/model.safetensors")) for folder in (found, expected)]
    weights, others = map(load_file, files)
    expect(weights.keys() == others.keys(), "the models have different weights")
    far = max(float((weights[name] - others[name]).abs().max()) for name in weights)
    same = all(torch.allclose(weights[name], others[name], rtol=1e-5, atol=1e-5) for name in weights)
    expect(same, f"weights differ by {far}")
    print(f"# {len(weights)} weights on two hosts are those on one; they differ by at most {far:g}", flush=True)


def read_rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SystemExit(f"Failed: {otherwise}.")


# --- the command ---

CASES = {
    "actors": lambda a, b: pipeline(a, b, "actors", learner=a, actor=b),
    "learner": lambda a, b: pipeline(a, b, "learner", learner=b, actor=a),
    "power": lambda a, b: pipeline(a, b, "power", learner=b, actor=a, pull_cable=True),
    "head": head,
    "fsdp": fsdp,
    "servers": servers,
    "away": away,
}
WITHOUT_RAY = {"fsdp", "servers", "away"}


def main(cases: Sequence[str]) -> int:
    if unknown := [case for case in cases if case not in CASES] or not cases:
        raise SystemExit(f"Give cases out of {', '.join(CASES)}; not {unknown}.")
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS):
        raise SystemExit(f"Two hosts need root, and on the PATH: {', '.join(TOOLS)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("What was waited for did not come in time."))
    with two_hosts() as (a, b):
        if set(cases) - WITHOUT_RAY:
            start_cluster(a, b)
        for case in cases:
            begin = time.monotonic()
            CASES[case](a, b)
            print(f"# {case}: {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
