"""Groups of processes for tests: started by torchrun, and never left hanging."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import forked, warm_python


def torchrun(num: int, module: str, *arguments: str, timeout_s: float, flags: Sequence[str] = ()) -> forked.Finished:
    with tempfile.TemporaryDirectory(prefix="ludic-torchrun-") as folder:
        output = Path(folder) / "output"
        group = forked.python(
            "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}", *flags, "-m", module, *arguments,
            cwd=forked.ROOT, output=output, environment={"PYTHON_EXEC": warm_python.executable()},
        )  # fmt: skip
        try:
            code: int | None = group.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            _end(group)
        return forked.Finished(code, output.read_text(errors="replace"))


def _end(group: forked.Forked) -> None:
    """torchrun puts each rank into its own session: it is asked to end them before it is ended."""
    group.terminate()
    try:
        group.wait(40)
    except subprocess.TimeoutExpired:
        group.kill()
