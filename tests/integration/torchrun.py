"""Groups of processes for tests: started by torchrun, and never left hanging."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.forked import Finished

ROOT = Path(__file__).parents[2]


def torchrun(num: int, module: str, *arguments: str, timeout_s: float, flags: Sequence[str] = ()) -> Finished:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}", *flags]
    group = subprocess.Popen(
        [*command, "-m", module, *arguments], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )  # fmt: skip
    try:
        output, _ = group.communicate(timeout=timeout_s)
        return Finished(group.returncode, output)
    except subprocess.TimeoutExpired:
        _end(group)
        return Finished(None, group.communicate()[0])


def _end(group: "subprocess.Popen[str]") -> None:
    """torchrun puts each rank into its own session: it is asked to end them before it is ended."""
    group.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        group.wait(timeout=40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group.pid, signal.SIGKILL)
