"""TRL's GRPO step on the sizes that benchmarks/grpo_step.py has written to a file; prints one record.

Random weights of the same shape in bf16, the same number of samples and tokens, no reference model. A step lasts from the end of
the one before to its end: generation, rewards, update, and the copy of the weights to vLLM, which runs in the same process.

    python research/experiments/others/trl_grpo.py TASK.json
"""

import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ALWAYS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""FlashInfer's sampler compiles itself with nvcc, which a machine with only a driver lacks."""
WITH_VLLM = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""vLLM inside the trainer's process joins its process group, also if that has one member."""
VLLM_SHARE = 0.3
"""Of the GPU's memory."""


def make_folder(config: dict[str, Any], folder: str, on_gpu: bool) -> None:
    """A checkpoint with random weights, and a tokenizer with one word per id: "w7" is 7."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    Path(folder, "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(config["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w2", unk_token="w0")
    tokenizer.save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def rewards(completions: list[Any], **_: Any) -> list[float]:
    """No two of a group are equal."""
    return [number * 0.618 % 1.0 for number in range(len(completions))]


def main(path: str) -> None:
    task = json.loads(Path(path).read_text())
    os.environ.update(ALWAYS)
    if task["use_vllm"]:
        os.environ.update(WITH_VLLM, MASTER_PORT=str(free_port()))
    import datasets
    import torch
    import trl
    from transformers import TrainerCallback

    # Each hash names a state of the data in a cache that is not used; dill fails on pyarrow's types in some versions.
    numbers = iter(range(1 << 30))
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: f"{next(numbers):016x}")
    on_gpu, use_vllm, num_new = task["on_gpu"], task["use_vllm"], task["new_tokens"]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if len(ends) == task["num_warm_up"] and on_gpu:
                torch.cuda.reset_peak_memory_stats()

    num_samples = task["prompts"] * task["group"]
    num_steps = task["num_warm_up"] + task["steps"]
    generation: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": num_new}}
    if use_vllm:
        generation = {
            "generation_kwargs": {"min_tokens": num_new, "ignore_eos": True},
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": VLLM_SHARE,
            "vllm_max_model_length": -(-(task["prompt_tokens"] + num_new) // 256) * 256,
        }
    with tempfile.TemporaryDirectory() as folder:
        make_folder(task["config"], folder, on_gpu)
        words = [f"w{number}" for number in range(3, 3 + task["prompt_tokens"] - 1)]
        prompts = [" ".join([f"w{3 + number % 900}", *words]) for number in range(task["prompts"] * (num_steps + 1))]
        trainer = trl.GRPOTrainer(
            model=folder,
            reward_funcs=rewards,
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            callbacks=[Clock()],
            args=trl.GRPOConfig(
                output_dir=str(Path(folder, "out")),
                model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
                per_device_train_batch_size=task["micro_batch"],
                gradient_accumulation_steps=num_samples // task["micro_batch"],
                num_generations=task["group"],
                max_completion_length=num_new,
                max_steps=num_steps,
                temperature=1.0,
                learning_rate=1e-6,
                bf16=on_gpu,
                use_cpu=not on_gpu,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                **generation,
            ),
        )
        trainer.train()
    seconds = [end - begin for begin, end in itertools.pairwise(ends)][task["num_warm_up"] - 1 :]
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    found = {
        "step_s": statistics.median(seconds),
        "best_s": min(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "mean_new_tokens": statistics.fmean(lengths),
        "generation": "vLLM" if use_vllm else "generate",
        "micro_batch": task["micro_batch"],
        "version": trl.__version__,
    }
    print("RECORD " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
