"""Which Python of the host runs inside a sandbox that shares the host's files."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ludic.types import ConfigError

_FACTS = """
import sys
assert sys.version_info >= (3, 9)
from importlib.util import MAGIC_NUMBER
print(sys.base_prefix, '%d.%d' % sys.version_info[:2], MAGIC_NUMBER.hex(), sep='\\n')
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """A Python that can be started inside."""

    path: str
    prefix: str
    """The folder with its library."""
    version: str
    """As "3.11"."""
    magic: str
    """The mark of its bytecode."""

    @property
    def is_part_of_the_system(self) -> bool:
        """Below /usr, which every sandbox sees."""
        return Path(self.path).is_relative_to("/usr") and Path(self.prefix).is_relative_to("/usr")


def find_interpreter(wanted: str = "auto") -> Interpreter:
    """`wanted`: a version like "3.11" (3.9 or newer), the path of an interpreter, or "auto": this version if the system has it.

    The system's own Pythons come first: everybody may read them, which a Python in somebody's home does not promise.
    """
    if "/" in wanted:
        found = _ask(Path(wanted))
        if found is None:
            raise ConfigError(f"{wanted} cannot be run as a Python 3.9 or newer. Give another path, or a version.")
        return found
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    folders = (Path("/usr/bin"), Path("/usr/local/bin"))
    if wanted == "auto":
        candidates = [folder / f"python{this}" for folder in folders] + [folder / "python3" for folder in folders]
    else:
        candidates = [folder / f"python{wanted}" for folder in folders]
    candidates.append(Path(sys.base_prefix) / "bin" / f"python{this}")
    known = []
    for candidate in candidates:
        found = _ask(candidate)
        if found is None:
            continue
        if wanted in ("auto", found.version):
            return found
        known.append(found.path)
    have = f"There is {', '.join(known)}" if known else "There is none"
    raise ConfigError(
        f"No Python {wanted} for the sandbox. {have}. Install it below /usr, or give the path of an interpreter, or 'auto'."
    )


def _ask(path: Path) -> Interpreter | None:
    if not path.exists():
        return None
    try:
        done = subprocess.run([path, "-I", "-S", "-c", _FACTS], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    prefix, version, magic = done.stdout.splitlines()
    base = Path(prefix, "bin", f"python{version}")  # a virtual environment's own Python is a link to this one
    return Interpreter(path=str(base if base.exists() else path), prefix=prefix, version=version, magic=magic)
