"""The user's Rust toolchain: its path, and its bind into a sandbox. Ludic ships none."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ludic.types import ConfigError
from ludic_sandbox import Bind

_INSIDE = "/toolchain"
_ADVICE = (
    "Install one, for example with `apt-get install cargo` or rustup, or give the folder that holds bin/cargo and "
    "bin/rustc as toolchain=…."
)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """One compiler with its library."""

    sysroot: Path
    """Holds bin/cargo, bin/rustc and lib/rustlib."""
    linker: str
    """The C compiler that rustc links with, without symbolic links, which may lead out of the sandbox."""

    @property
    def cargo(self) -> Path:
        return self.sysroot / "bin" / "cargo"

    @property
    def is_of_the_system(self) -> bool:
        """Under /usr, which every sandbox sees anyway."""
        return self.sysroot == Path("/usr")

    @property
    def rustc_inside(self) -> str:
        return "/usr/bin/rustc" if self.is_of_the_system else f"{_INSIDE}/bin/rustc"

    def binds(self) -> list[Bind]:
        return [] if self.is_of_the_system else [Bind(source=str(self.sysroot), target=_INSIDE)]


def find_toolchain(folder: str | Path | None, crate: Path) -> Toolchain:
    """The toolchain in that folder, or the one on the PATH; with rustup the one that the crate asks for."""
    sysroot = _sysroot_on_path(crate) if folder is None else Path(folder).expanduser()
    for name in ("cargo", "rustc"):
        if not (sysroot / "bin" / name).exists():
            raise ConfigError(f"There is no {sysroot / 'bin' / name}. {_ADVICE}")
    linker = shutil.which("cc") or shutil.which("gcc")
    if linker is None:
        raise ConfigError(
            "Rust programs are linked with a C compiler, and there is no cc. `apt-get install gcc` has one."
        )
    return Toolchain(sysroot.resolve(), os.path.realpath(linker))


def _sysroot_on_path(crate: Path) -> Path:
    rustc = shutil.which("rustc")
    if rustc is None:
        raise ConfigError(f"There is no rustc on the PATH. {_ADVICE}")
    return _sysroot_of(rustc, crate)


@cache
def _sysroot_of(rustc: str, crate: Path) -> Path:
    found = subprocess.run([rustc, "--print", "sysroot"], cwd=crate, capture_output=True, text=True, timeout=60)
    if found.returncode != 0:
        raise ConfigError(f"{rustc} does not work: {found.stderr.strip()[:500]} {_ADVICE}")
    return Path(found.stdout.strip())
