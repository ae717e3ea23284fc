"""Documents whose code is run: their blocks, and running one in a separate process."""

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import forked, warm_python

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(python|bash|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(language: str, code: str, folder: Path) -> str:
    """What a block prints; a first line `# name.py` names the file."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if language == "python":
        named = re.match(r"# (\w+\.py)\n", code)
        script = folder / (named[1] if named else "recipe.py")
        script.write_text(code)
        process = forked.python(script, cwd=folder, environment={"PATH": path})
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out
    command = ["bash", "-c", code]
    environ = {**os.environ, "PATH": f"{_warm_commands()}{os.pathsep}{path}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def _warm_commands() -> Path:
    """A folder with the command `ludic`, without the seconds that its imports take."""
    folder = Path(tempfile.mkdtemp(prefix="ludic-commands-"))
    ludic = folder / "ludic"
    ludic.write_text(f'#!/bin/sh\nexec {warm_python.executable()} -P -m ludic.cli.main "$@"\n')
    ludic.chmod(0o755)
    return folder
