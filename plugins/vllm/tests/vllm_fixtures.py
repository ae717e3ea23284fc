"""A tiny model in a folder, and a real vLLM server that serves it."""

import importlib.util
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ludic.http.address import check_port
from ludic.http.tokens import CONTROL_HEADER
from ludic.types import ConfigError
from ludic_vllm.command import PYTHON_VARIABLE
from ludic_vllm.vllm_server import VLLMServerProcess, start_vllm_server, wait_for_vllm_health
from plugins.vllm.tests import warm_vllm

ROOT = Path(__file__).parents[3]
VOCAB_SIZE = 320
MAX_MODEL_LEN = 2048
LORA_RANK = 8
LORA = ("--enable-lora", "--max-lora-rank", str(LORA_RANK))
START_TIMEOUT_S = 400
"""Half a minute on a quiet machine; a busy one may take several times that."""
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that answers."""

    process: VLLMServerProcess
    """`kill()` it and `start()` it again at will, but leave it running and ready: others use it too."""
    model_dir: Path
    """The model's folder in the way of transformers, with tokenizer and chat template."""
    run_folder: Path
    """Where its control token and its log are."""

    @property
    def host(self) -> str:
        return self.process.command.host

    @property
    def port(self) -> int:
        return self.process.command.port

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def control_token(self) -> str:
        return self.process.control_token

    def wait(self) -> None:
        """Until it answers, after a restart."""
        wait_for_vllm_health(self.host, self.port, self.process, timeout_s=START_TIMEOUT_S)

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> tuple[int, Any]:
        """Status and JSON of one plain request, without any client of ours in between."""
        headers = {"Content-Type": "application/json"} | ({CONTROL_HEADER: token} if token is not None else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text else None


def byte_tokenizer() -> Any:
    """One token per byte, and one per role of a chat: 260 in all."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def tiny_config() -> Any:
    """A Llama of 115 thousand parameters, wide enough for vLLM's CPU kernels (heads of 32)."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=0.5,  # replies that differ between prompts, as a trained model's do
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )


def save_tiny_model(folder: Path, config: Any = None, *, seed: int = 0) -> Path:
    """Random weights of a seed and the byte tokenizer, in a folder that vLLM and transformers both load."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config if config is not None else tiny_config()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def start_tiny_server(model_dir: Path, run_folder: Path, *flags: str) -> VLLMServerProcess:
    """Start a server for a tiny model on a free port; `wait_for_vllm_health` says when it is ready."""
    return start_vllm_server(
        model_dir,
        port=0,
        max_model_len=MAX_MODEL_LEN,
        stream_output=False,
        extra_args=["--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--served-model-name", "tiny", *flags],
        run_folder=run_folder,
        environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def warm_vllm_environment() -> dict[str, str]:
    """Variables with which Ludic starts vLLM in processes that have imported it already."""
    return {PYTHON_VARIABLE: warm_vllm.python()}


class WarmServer(VLLMServerProcess):
    """A server whose processes have imported vLLM already."""

    def kill(self) -> None:
        """Wait for its port as well: the forked processes end after the program that stands for them (warm_python.py)."""
        super().kill()
        deadline = time.monotonic() + 60
        while True:
            try:
                return check_port(self.command.host, self.command.port)
            except ConfigError:
                assert time.monotonic() < deadline, f"{self.url} is still in use"
                time.sleep(0.02)


def start_warm_server(model_dir: Path, run_folder: Path, *flags: str) -> VLLMServerProcess:
    """As `start_tiny_server`, in a tenth of the time."""
    server = mock.patch("ludic_vllm.vllm_server.VLLMServerProcess", WarmServer)
    with server, mock.patch.dict(os.environ, warm_vllm_environment()):
        return start_tiny_server(model_dir, run_folder, *flags)


def skip_without_vllm() -> None:
    """A machine without vLLM runs the rest of the suite."""
    installed = (ROOT / ".venv-vllm" / ".ready").exists() or PYTHON_VARIABLE in os.environ
    if not (installed or importlib.util.find_spec("vllm")):
        pytest.skip("no .venv-vllm; run `make vllm`")
