"""Secrets between a server and its clients: tokens in files of mode 600, and bearer keys of requests. Loads without aiohttp.

A holder of the control token of a server may replace its weights or open its sessions, so the token belongs to the user who
started it. Servers started on the same folder share it.
"""

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ludic.http.errors import RequestRefused
from ludic.types import ConfigError
from ludic.util.urls import is_same_secret

CONTROL_HEADER = "X-Ludic-Control-Token"
"""The request header that carries the control token."""
CONTROL_VARIABLE = "LUDIC_CONTROL_TOKEN"
"""The environment variable that passes the control token to a server process."""
TOKEN_FILE = "control_token"
"""The file of a run folder that holds the token."""


def make_control_token(folder: Path) -> str:
    """The token of this run folder; creates one if there is none."""
    path = folder / TOKEN_FILE
    folder.mkdir(parents=True, exist_ok=True)
    number, temporary = tempfile.mkstemp(prefix=f".{TOKEN_FILE}-", dir=folder)  # mkstemp creates mode 600
    try:
        with os.fdopen(number, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        # A link fails if the name exists, so of two servers that start at once one writes and both read the same token.
        os.link(temporary, path)
    except FileExistsError:
        pass  # another server on this folder was first
    finally:
        os.unlink(temporary)
    return read_control_token(path)


def read_control_token(path: Path) -> str:
    """The token in `path`: the file itself, or the run folder it is in."""
    file = path / TOKEN_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"No control token at {file}; a server writes it when it starts with that run folder.")
    mode, token = stat.S_IMODE(file.stat().st_mode), file.read_text().strip()
    if mode & 0o077 or not token:
        problem = f"has mode {mode:o}, so others on this machine may have read it" if mode & 0o077 else "is empty"
        raise ConfigError(f"The control token {file} {problem}. Delete it and start the server again for a new one.")
    return token


class FoundToken(NamedTuple):
    """The token of a server that a command starts, and where it comes from."""

    token: str
    variable: str | None = None
    file: Path | None = None
    """The file that it was read from, unless it came from the variable."""


def find_token(file: Path | None, variable: str, folder: Path) -> FoundToken:
    """The token in `file` if one is given, else that of the environment variable, else that of `folder`, which is made."""
    if file is not None:
        return FoundToken(read_control_token(file), file=file / TOKEN_FILE if file.is_dir() else file)
    if token := os.environ.get(variable):
        return FoundToken(token, variable=variable)
    return FoundToken(make_control_token(folder), file=folder / TOKEN_FILE)


def bearer_of(headers: Mapping[str, str]) -> str:
    """The key in `Authorization: Bearer KEY`; empty if there is none."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def require_secret(given: str, wanted: str | None, refusal: RequestRefused) -> None:
    """Raise the refusal unless the client sent this secret; None refuses every client."""
    if wanted is None or not is_same_secret(given, wanted):
        raise refusal
