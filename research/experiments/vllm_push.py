"""Time to push weights to a vLLM server by each transport, against a plain copy of the same bytes in memory.

Starts a server with random weights in SmolLM2-135M's shape (fp32, 0.54 GB), pushes to it, and prints one table. "before" is
the time while the server still generates, "loading" the pause (transfer and vLLM's loader).

    python research/experiments/vllm_push.py [--repeats 3] [--layers 30]
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ludic.distributed import BroadcastPolicyPublisher, VllmControlPlane
from ludic_vllm.client import VLLMChatClient
from ludic_vllm.publish.broadcast import TensorCommunicator
from ludic_vllm.publish.transfer import Bucket
from ludic_vllm.publish.vllm import make_communicator
from ludic_vllm.vllm_server import start_vllm_server, wait_for_vllm_health


class Timed:
    """A communicator that measures time."""

    def __init__(self, inner: TensorCommunicator) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.before_s = self.loading_s = 0.0

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        started = time.perf_counter()
        self._inner.stage(buckets, weights)
        self.before_s = time.perf_counter() - started
        self.loading_s = 0.0

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        started = time.perf_counter()
        self._inner.broadcast(bucket, weights, src_rank)
        self.loading_s += time.perf_counter() - started

    def barrier(self) -> None:
        self._inner.barrier()

    def release(self) -> None:
        self._inner.release()


def save_model(folder: Path, layers: int) -> dict[str, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copy_seconds(weights: Mapping[str, Tensor], repeats: int) -> float:
    """Best of several copies into already touched memory."""
    room = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    best = float("inf")
    for _ in range(repeats + 2):
        started = time.perf_counter()
        for name, weight in weights.items():
            room[name].copy_(weight)
        best = min(best, time.perf_counter() - started)
    return best


def push_seconds(
    client: VLLMChatClient, transport: str, weights: Mapping[str, Tensor], repeats: int
) -> tuple[float, float, float]:
    """(whole, before, loading) of the fastest push after a warm-up."""
    control = VllmControlPlane(client)
    comm = Timed(make_communicator(control, transport))  # type: ignore[arg-type]
    publisher = BroadcastPolicyPublisher(control, comm)
    publisher.publish(weights)
    pushes = []
    for _ in range(repeats):
        started = time.perf_counter()
        publisher.publish(weights)
        pushes.append((time.perf_counter() - started, comm.before_s, comm.loading_s))
    return min(pushes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = save_model(Path(folder) / "model", settings.layers)
        gigabytes = sum(w.numel() * w.element_size() for w in weights.values()) / 1e9
        flags = ["--dtype", "float32", "--skip-tokenizer-init", "--kv-cache-memory-bytes", "64M"]
        server = start_vllm_server(
            Path(folder) / "model",
            port=0,
            max_model_len=512,
            stream_output=False,
            extra_args=flags,
            run_folder=Path(folder),
        )
        try:
            wait_for_vllm_health(server.command.host, server.command.port, server)
            client = VLLMChatClient(servers=[server.url], control_token=server.control_token)
            plain = copy_seconds(weights, settings.repeats)
            print(f"{gigabytes:.2f} GB, best of {settings.repeats}; seconds per GB")
            print(f"{'':16}{'whole':>8}{'before':>8}{'loading':>9}{'× copy':>8}")
            print(f"{'plain copy':16}{plain / gigabytes:8.3f}")
            for transport in ("shared_memory", "gloo", "file"):
                times = push_seconds(client, transport, weights, settings.repeats)
                whole, before, loading = (seconds / gigabytes for seconds in times)
                print(f"{transport:16}{whole:8.3f}{before:8.3f}{loading:9.3f}{times[0] / plain:8.1f}")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
