"""`python -m ludic_vllm.run_server RUN_FOLDER PORT`: the vLLM server of a run that `ludic launch` started."""

import sys
from pathlib import Path
from typing import NoReturn

from ludic.cli.terminal.colour import harmless
from ludic.run.config.run_config import RunConfig
from ludic.run.folder import CONFIG, SERVER
from ludic.run.settings import read_toml
from ludic.types import LudicError
from ludic_vllm.command import find_vllm
from ludic_vllm.vllm_server import serve


def serve_run(folder: Path, port: int) -> NoReturn:
    """Save the model of a run for vLLM and become its server. The learner replaces the served weights at its start."""
    config = read_toml(RunConfig, folder / CONFIG)
    install = find_vllm()  # before a model is loaded
    from ludic.run.model import load_policy
    from ludic_vllm.generation import save_for_server  # loads torch

    model = folder / SERVER / "model"
    loaded = load_policy(config.model, seed=config.trainer.seed)
    flags = save_for_server(loaded, model, quantization=config.rollouts.server_quantization)
    if not install.is_cpu:
        flags += ["--gpu-memory-utilization", str(config.rollouts.server_memory)]
    length = ["--max-model-len", str(config.trainer.max_seq_len)]
    serve([str(model), "--port", str(port), "--run-folder", str(folder / SERVER), *length, *flags])


if __name__ == "__main__":
    try:
        serve_run(Path(sys.argv[1]), int(sys.argv[2]))
    except LudicError as error:
        sys.stderr.write(f"ludic: {harmless(str(error))}\n")
        sys.exit(2)
