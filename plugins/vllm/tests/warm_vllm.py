"""vLLM servers without the half minute of computing that importing vLLM takes, once in each of their two processes.

`python` is a program like vLLM's interpreter (warm_python.py); the processes are forked from a server that has imported vLLM:
this file, run as a program in that interpreter. Where a test is about the start or the end of a server's processes, it takes a
server that begins as users' do. Without a socket this file only imports vLLM: `make vllm` has it compiled so.
"""

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
IMPORTED = [
    "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm", "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker", "vllm.v1.core.sched.scheduler", "vllm.renderers.hf",
    "vllm.model_executor.layers.quantization.online.base", "compressed_tensors.compressors",
    "model_hosting_container_standards.sagemaker", "prometheus_fastapi_instrumentator",
]  # fmt: skip
"""What the processes of a server would import, in this order."""


def import_vllm() -> None:
    for module in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def main(path: str) -> None:
    sys.path.insert(0, str(ROOT))
    from tests import warm_python

    sys.path.remove(str(ROOT))
    socket = warm_python.listening(path)
    import_vllm()
    import vllm.model_executor.models.registry as registry
    import vllm.v1.engine.utils as engines

    engines.get_mp_context = lambda: multiprocessing.get_context("fork")  # on a CPU vLLM says spawn
    registry._run_in_subprocess = lambda function: function()  # a model of a new kind is looked at in another process
    warm_python.serve(path, socket)


@functools.cache
def python() -> str:
    from ludic_vllm.command import find_vllm
    from tests import warm_python

    interpreter = str(find_vllm().python.absolute())
    path, program = warm_python.socket_and_program(interpreter)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([interpreter, __file__, path], env=environment, **quiet)
    atexit.register(server.terminate)
    return program


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1:] else import_vllm()
