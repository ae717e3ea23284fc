"""Documents whose code is run: their blocks, and running one in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(python|bash|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(language: str, code: str, folder: Path) -> str:
    """What a block prints; a first line `# name.py` names the file."""
    if language == "bash":
        command = ["bash", "-c", code]
    else:
        named = re.match(r"# (\w+\.py)\n", code)
        script = folder / (named[1] if named else "recipe.py")
        script.write_text(code)
        command = [sys.executable, str(script)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout
