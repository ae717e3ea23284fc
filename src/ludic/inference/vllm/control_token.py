"""The secret of a policy server's control endpoints: where it is stored, and how it is sent.

A client that can replace a server's weights controls what is trained on it, so the token belongs to the user who started the
server: a file of mode 600 in the run folder. Servers started on the same folder share it.
"""

import os
import secrets
import stat
import tempfile
from pathlib import Path

from ludic.types import ConfigError

CONTROL_HEADER = "X-Ludic-Control-Token"
"""The request header that carries the token."""
CONTROL_VARIABLE = "LUDIC_CONTROL_TOKEN"
"""The environment variable that passes the token to a server process."""
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
        pass  # a server on this folder was first
    finally:
        os.unlink(temporary)
    return read_control_token(path)


def read_control_token(path: Path) -> str:
    """The token in `path`: the file itself, or the run folder it is in."""
    file = path / TOKEN_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"No control token at {file}; a server writes it when it starts with that run folder.")
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"The control token {file} has mode {mode:o}, so others on this machine may have read it. "
            "Delete it and start the server again for a new one."
        )
    token = file.read_text().strip()
    if not token:
        raise ConfigError(f"The control token {file} is empty. Delete it and start the server again for a new one.")
    return token
