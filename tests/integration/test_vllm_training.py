"""Training through a real vLLM server: `ludic train --engine vllm`, weights pushed after every update."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.types import load_rollouts
from tests.integration.vllm_fixtures import skip_without_vllm

pytest.importorskip("torch", reason="the train extra is not installed")
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def player(tmp_path_factory) -> Path:
    """A small Llama that knows the words of the game, with heads of a size that vLLM computes on a CPU."""
    from ludic.envs.tic_tac_toe.board import COMPACT_WORDS
    from ludic.models.tiny import tiny_llama, word_tokenizer

    folder = tmp_path_factory.mktemp("models") / "player"
    tokenizer = word_tokenizer(COMPACT_WORDS)
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=64, layers=2, heads=2).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adapter", [[], ["--lora-rank", "4", "--push", "adapter"]], ids=["all weights", "adapter"])
def test_grpo_on_tic_tac_toe_learns_from_the_weights_it_pushed(player, tmp_path, adapter):
    skip_without_vllm()
    command = [
        sys.executable, "-m", "ludic.cli.main", "train", "tic_tac_toe", "--set", "view=compact", "--model", str(player),
        "--engine", "vllm", "--steps", "3", "--rollouts-per-update", "32", "--group-size", "8", "--lr", "1e-2",
        "--max-tokens", "3", "--max-seq-len", "128", "--logger", "print", "--runs", str(tmp_path), "--name", "run",
        "--dtype", "float32", *adapter,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["train/lag_max"] == 0 for row in rows)
    assert any(row["train/grad_norm"] > 0 for row in rows)
    # The ratio between trainer and sampler is 1: what the server sampled with is what the trainer holds, after each push.
    assert all(abs(row["train/kl_actor_policy"]) < 1e-3 and row["train/ess"] > 0.999 for row in rows)
    (file,) = (tmp_path / "run" / "rollouts").glob("*.jsonl")
    versions = [run.version for r in load_rollouts(file) for step in r.agent_steps for run in step.trace.version_runs]
    assert sorted(set(versions)) == [0, 1, 2]
