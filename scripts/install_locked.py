"""Install packages with uv, which computes half as long as pip; where uv is not there or fails, with pip.

    .venv/bin/python scripts/install_locked.py --require-hashes -r requirements/main.txt

The arguments are those of `pip install` that uv knows as well. The packages go into the environment of the interpreter that runs
this file. uv does not read pip's settings, so pip's indexes, its folders with files, its certificates and its time limit are
handed over.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

AS_FLAGS = ("index-url", "extra-index-url", "find-links")
AS_VARIABLES = {"cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT"}
SECTIONS = ("global", "install", ":env:")
"""pip's sections; a later one wins."""
ANY_INDEX = ("--index-strategy", "unsafe-best-match")
"""As with pip, an index that has a package without the wanted version does not hide the others; the hashes say which file."""


def settings(listed: str) -> dict[str, str]:
    """What `pip config list` printed: the value of each setting of `pip install`."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = ast.literal_eval(value)
    return {name: value for section in SECTIONS for name, value in found[section].items()}


def flags(of_pip: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name in AS_FLAGS for value in of_pip.get(name, "").split()]


def variables(of_pip: Mapping[str, str]) -> dict[str, str]:
    return {variable: of_pip[name] for name, variable in AS_VARIABLES.items() if name in of_pip}


def main(arguments: list[str]) -> int:
    python = [sys.executable, "-m"]
    listed = subprocess.run([*python, "pip", "config", "list"], text=True, stdout=subprocess.PIPE, check=True).stdout
    of_pip = settings(listed)
    here = ["--python", sys.executable, *ANY_INDEX, *flags(of_pip)]
    with_uv = [*python, "uv", "pip", "install", "-q", *here, *arguments]
    if subprocess.run(with_uv, env={**variables(of_pip), **os.environ}, check=False).returncode == 0:
        return 0
    sys.stderr.write("uv did not install this; pip does.\n")
    with_pip = [*python, "pip", "--disable-pip-version-check", "install", "-q", "--no-compile", *arguments]
    return subprocess.run(with_pip, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
