"""The vLLM server of a launched pipeline: `python -m ludic.cli.pipeline.server RUN_FOLDER PORT`.

It saves the run's model for vLLM and becomes the server. The learner replaces the served weights at its start.
"""

import sys
from pathlib import Path
from typing import NoReturn

from ludic.inference.vllm.command import find_vllm
from ludic.inference.vllm_server import serve
from ludic.run.config import RunConfig
from ludic.run.folder import CONFIG, SERVER
from ludic.run.model import load_policy
from ludic.run.settings import read_toml
from ludic.run.vllm import save_for_server
from ludic.types import LudicError


def become_server(folder: Path, port: int) -> NoReturn:
    config = read_toml(RunConfig, folder / CONFIG)
    install = find_vllm()  # before a model is loaded
    model = folder / SERVER / "model"
    flags = save_for_server(load_policy(config.model, seed=config.trainer.seed), model)
    if not install.is_cpu:
        flags += ["--gpu-memory-utilization", str(config.rollouts.server_memory)]
    length = ["--max-model-len", str(config.trainer.max_seq_len)]
    serve([str(model), "--port", str(port), "--run-folder", str(folder / SERVER), *length, *flags])


def main() -> None:
    try:
        become_server(Path(sys.argv[1]), int(sys.argv[2]))
    except LudicError as error:
        print(f"ludic: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
