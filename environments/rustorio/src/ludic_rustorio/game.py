"""A game: a library crate, and a folder that defines how it is played. The user's cargo builds it once per process.

The folder (`ludic/` in the crate, unless named) has

    main.rs      Ludic's side: calls `player::user_main`, then `report::won(ticks)`
    player.rs    the agent's template; its first attributes must stay
    RULES.md     the rules, for the agent
    solution.rs  a program that wins, if there is one
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ludic.types import ConfigError
from ludic_rustorio.toolchain import Toolchain
from ludic_sandbox import Bind

DEMO = Path(__file__).with_name("demo")
_INSIDE = "/game"
_BUILD_TIMEOUT_S = 600
_building = threading.Lock()
_SAFETY = ("#![no_std]", "#![forbid(unsafe_code)]")
_HEAD = re.compile(r"(#!\[.*\]|extern crate .*;)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """The rules of one game."""

    crate: Path
    """Folder of its Cargo.toml."""
    main: str
    template: str
    rules: str
    solution: str | None

    @property
    def head(self) -> list[str]:
        """The first lines of the template, which every program must keep."""
        head = []
        for line in self.template.split("\n"):
            if _HEAD.fullmatch(line):
                head.append(line)
            elif line:
                break
        return head


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltGame:
    """The compiled game."""

    name: str
    """Name of the crate, as Rust code spells it."""
    library: str
    """Path of the library inside a sandbox."""
    folder: Path
    """Its folder on the host, with those of the crates that it uses in `deps`."""
    key: str
    """Hash of the library, for the cache of verdicts."""

    def binds(self) -> list[Bind]:
        return [Bind(source=str(self.folder), target=_INSIDE)]

    @property
    def flags(self) -> list[str]:
        """For rustc, inside."""
        return ["-L", f"dependency={_INSIDE}/deps", "--extern", f"{self.name}={self.library}"]


def read_game(crate: str | Path, harness: str | Path | None = None) -> Game:
    crate = DEMO if crate == "demo" else Path(crate).expanduser()
    folder = crate / "ludic" if harness is None else Path(harness).expanduser()
    if not (crate / "Cargo.toml").exists():
        raise ConfigError(
            f"There is no crate in {str(crate)!r} (no Cargo.toml). Ludic ships no Rustorio: give the folder of the game's "
            "crate, or game='demo' for the small game that is built in."
        )
    try:
        main, template = ((folder / name).read_text(encoding="utf-8") for name in ("main.rs", "player.rs"))
        rules = (folder / "RULES.md").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}. A game needs main.rs, player.rs and RULES.md in {str(folder)!r}; "
            "docs/envs/rustorio.md describes them."
        ) from error
    solution = folder / "solution.rs"
    game = Game(
        crate=crate,
        main=main,
        template=template,
        rules=rules,
        solution=solution.read_text(encoding="utf-8") if solution.exists() else None,
    )
    if missing := [line for line in _SAFETY if line not in game.head]:
        raise ConfigError(
            f"{folder / 'player.rs'} does not begin with {' and '.join(missing)}. Without it, a program could report a victory "
            "of its own."
        )
    return game


def build_game(crate: Path, toolchain: Toolchain) -> BuiltGame:
    """Build the library with cargo, without network. It is the user's code, so this is not done in a sandbox.

    Once per process: the episodes of a batch all ask for it at the same time, and wait for the first.
    """
    with _building:
        return _build(crate, toolchain)


@lru_cache(maxsize=8)
def _build(crate: Path, toolchain: Toolchain) -> BuiltGame:
    target = _target_folder()
    command = [str(toolchain.cargo), "build", "--offline", "--release", "--lib", "--message-format=json"]
    environment = {"PATH": f"{toolchain.sysroot / 'bin'}:/usr/bin:/bin", "CARGO_TARGET_DIR": str(target), **_home()}
    try:
        done = subprocess.run(
            command, cwd=crate, env=environment, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"cargo did not build the game in {crate} within {_BUILD_TIMEOUT_S} s.") from error
    if done.returncode != 0:
        raise ConfigError(f"cargo cannot build the game in {crate}:\n{done.stderr.strip()[-2000:]}")
    library = _library(done.stdout, crate)
    return BuiltGame(
        name=re.sub(r"^lib|\.rlib$", "", library.name),
        library=f"{_INSIDE}/{library.name}",
        folder=library.parent,
        key=hashlib.sha256(library.read_bytes()).hexdigest(),
    )


def _library(messages: str, crate: Path) -> Path:
    """The place where cargo put the crate's own library."""
    for line in reversed(messages.splitlines()):
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and Path(message["manifest_path"]).parent == crate.resolve():
            for name in message["filenames"]:
                if name.endswith(".rlib"):
                    return Path(name)
    raise ConfigError(f"The crate in {crate} has no library (src/lib.rs), which programs could use.")


_folders: list["tempfile.TemporaryDirectory[str]"] = []  # removed when the process ends


def _target_folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="ludic-rustorio-")
    _folders.append(folder)
    Path(folder.name).chmod(0o755)  # the sandbox may run as another user
    return Path(folder.name)


def _home() -> dict[str, str]:
    """The folder in which cargo keeps vendored and downloaded crates."""
    return {name: os.environ[name] for name in ("HOME", "CARGO_HOME") if name in os.environ}
