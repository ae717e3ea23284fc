"""Checks of this machine. Each returns one `Finding`. No check imports torch, and none raises.

Programs are asked side by side, each in a thread; one that does not answer in time is reported as such.
"""

import contextlib
import functools
import importlib.util
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ludic import plugins
from ludic.types.errors import MissingPlugin
from ludic.util.packages import install, pip_install, problems, version_of

Status = Literal["ok", "missing", "doubtful", "broken"]
"""missing: an optional part is not there. broken: it is there and cannot work, or the base install needs it."""
GIB = 2**30
_CUDA_INDEXES = (126, 128, 129, 130)
"""Versions of CUDA that download.pytorch.org has builds of PyTorch for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The answer to one check."""

    name: str
    status: Status
    says: str
    repair: str = ""
    """A command, or what to do; empty where nothing has to be done."""


def ask_all(checks: Mapping[str, Callable[[], Finding]], wait_s: float) -> list[Finding]:
    """The findings in the order of the checks, which run side by side."""
    found: dict[str, Finding] = {}

    def ask(name: str, check: Callable[[], Finding]) -> None:
        try:
            found[name] = check()
        except Exception as error:  # noqa: BLE001 - a doctor reports what it meets
            found[name] = Finding(
                name=name, status="doubtful", says=f"cannot be checked: {type(error).__name__}: {error}"
            )

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"gave no answer within {wait_s:g} s (--wait-s waits longer)"
    return [found.get(name) or Finding(name=name, status="doubtful", says=late) for name in checks]


def _output(*command: str) -> str:
    """The output of a program; empty if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


# --- Python and packages ---


def python() -> Finding:
    says = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info >= (3, 14):
        return Finding(name="python", status="doubtful", says=f"{says}; Ludic was tested with 3.11 to 3.13")
    return Finding(name="python", status="ok", says=says)


def base() -> Finding:
    wrong = problems([""])
    if wrong:
        return Finding(name="base packages", status="broken", says="; ".join(wrong), repair=install([]))
    names = ("numpy", "msgspec", "rich", "tyro")
    return Finding(name="base packages", status="ok", says=", ".join(f"{name} {version_of(name)}" for name in names))


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


def torch() -> Finding:
    version, build = version_of("torch"), torch_build()
    if not version or not build:
        says = "not installed" if not version else f"{version} has no files: it was removed by half"
        return Finding(
            name="torch", status="missing" if not version else "broken", says=says, repair=install(["train"])
        )
    others = ", ".join(
        f"{name} {found}" for name in ("transformers", "safetensors", "peft") if (found := version_of(name))
    )
    how = f"a build for {'CPUs' if build == 'cpu' else build.upper()}"
    wrong = problems(["train"])
    if wrong:
        return Finding(
            name="torch", status="missing", says=f"{version}, {how}; {'; '.join(wrong)}", repair=install(["train"])
        )
    return Finding(name="torch", status="ok", says=f"{version}, {how}; {others}")


# --- the GPU ---


def gpu() -> Finding:
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
        return Finding(name="GPU", status="broken", says=f"{says}; torch is a build for CPUs", repair=other_torch)
    if supported and build.startswith("cuda") and int(build.split()[1].split(".")[0]) > int(supported[1]):
        says = f"{says}; torch is built for {build.upper()}, which this driver cannot run"
        return Finding(name="GPU", status="broken", says=says, repair=f"{other_torch} (or a newer driver)")
    return Finding(name="GPU", status="ok", says=says)


def _no_nvidia_gpu() -> Finding:
    if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists():
        repair = "in a container: docker run --gpus all; elsewhere: load the driver again, or restart the machine"
        return Finding(
            name="GPU", status="broken", says="there is a driver, but nvidia-smi does not work", repair=repair
        )
    if torch_build().startswith("rocm") or Path("/opt/rocm").exists():
        return Finding(name="GPU", status="doubtful", says="AMD (ROCm); Ludic was never run on one")
    if sys.platform == "darwin":
        return Finding(
            name="GPU", status="missing", says="none that Ludic uses; Apple's GPUs are not tried, the CPU is used"
        )
    return Finding(name="GPU", status="missing", says="none; models run on the CPU")


def triton() -> Finding:
    """The kernels of the engine and of the trainer; Triton compiles a C file when a kernel is first started."""
    version = version_of("triton")
    if not version:
        return Finding(
            name="triton", status="missing", says="not installed; only a GPU needs it", repair=f"{pip_install()} triton"
        )
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        says, repair = f"{version}, but there is no C compiler, which it calls", "apt-get install gcc libc6-dev"
        return Finding(name="triton", status="broken", says=says, repair=repair)
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        says = f"{version}, but Python.h is missing, which it compiles against"
        return Finding(name="triton", status="broken", says=says, repair=f"apt-get install {package}")
    return Finding(name="triton", status="ok", says=version)


def loaded() -> Finding:
    """`--load`: torch is imported and computes, in its own process."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding(
            name="torch at work", status="broken", says=last, repair=f"{pip_install()} --force-reinstall torch"
        )
    return Finding(name="torch at work", status="ok", says=f"{done.stdout.strip()}; {seconds:.1f} s with the import")


_LOAD = """
import torch, transformers
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(512, 512, device=device)
assert torch.isfinite(x @ x).all()
print(f"multiplies matrices on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}")
"""


# --- programs ---


def redis() -> Finding:
    if shutil.which("redis-server") is None:
        repair = "brew install redis" if sys.platform == "darwin" else "apt-get install redis-server"
        return Finding(
            name="redis-server", status="missing", says="not installed; only `ludic launch` needs it", repair=repair
        )
    found = re.search(r"v=(\S+)", _output("redis-server", "--version"))
    if found is None:
        return Finding(name="redis-server", status="broken", says="it is on the PATH and does not start")
    return Finding(name="redis-server", status="ok", says=found[1])


# --- room ---


def memory() -> Finding:
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
        return Finding(name="memory", status="doubtful", says=says)
    return Finding(name="memory", status="ok", says=says)


def _memory_limit() -> int:
    """The limit of the container; 0 without one."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(file).read_text())
    return 0


def disk() -> Finding:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    says = f"{free / GIB:.1f} GiB free in {here}"
    if os.stat(there).st_dev != os.stat(here).st_dev:
        free = min(free, shutil.disk_usage(there).free)
        says += f", {shutil.disk_usage(there).free / GIB:.1f} for models in {cache}"
    if not os.access(here, os.W_OK):
        return Finding(
            name="disk", status="broken", says=f"{here} cannot be written; runs/ is made there", repair="cd ~"
        )
    if free < 5 * GIB:
        says = f"{says}; little for torch (2.7 GB to download where it is built for CUDA) and for checkpoints"
        return Finding(name="disk", status="doubtful", says=says, repair="free some space, or give --runs FOLDER")
    return Finding(name="disk", status="ok", says=says)


def shared_memory() -> Finding:
    """Weights reach a vLLM server on the same machine through it; docker gives a container 64 MiB."""
    folder = Path("/dev/shm")
    if not folder.exists():
        return Finding(
            name="shared memory", status="missing", says="there is no /dev/shm; --transport gloo does without"
        )
    size = shutil.disk_usage(folder).total
    if size < GIB:
        says, repair = (
            f"{size / 2**20:.0f} MiB in /dev/shm",
            "docker run --shm-size 8g (or ludic train --transport gloo)",
        )
        return Finding(
            name="shared memory", status="doubtful", says=f"{says}: weights for vLLM do not fit", repair=repair
        )
    return Finding(name="shared memory", status="ok", says=f"{size / GIB:.1f} GiB in /dev/shm")


CHECKS: Mapping[str, Callable[[], Finding]] = {
    "python": python, "base packages": base, "memory": memory, "disk": disk, "torch": torch, "GPU": gpu, "triton": triton,
    "redis-server": redis, "shared memory": shared_memory,
}  # fmt: skip


def all_checks() -> dict[str, Callable[[], Finding]]:
    """The checks above, and those that plug-ins declare in the entry-point group `ludic.checks`.

    A plug-in's check is a function that returns (status, what it says, how to repair it).
    """
    return {**CHECKS, **{point.name: partial(_asked, point) for point in plugins.points("checks")}}


def _asked(point: plugins.Point) -> Finding:
    try:
        check = point.load()
    except MissingPlugin as error:
        says, repair = f"the plug-in {error.package} is not installed", install([error.extras])
        return Finding(name=point.name, status="missing", says=says, repair=repair)
    status, says, repair = check()
    return Finding(name=point.name, status=status, says=says, repair=repair)
