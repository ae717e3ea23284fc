"""One tenant of benchmarks/tinker_server.py: a process with Tinker's SDK, and without Ludic.

python tinker_tenant.py URL KEY '{"model": …, "lora_rank": …, "prompts": …, …}'
"""

import argparse
import json
import os
import sys
import time
from typing import Any

import numpy as np
import tinker
from tinker import types


def be_tenant(url: str, key: str, options: argparse.Namespace) -> None:
    """Read a number of steps per line of stdin; answer each with a line of JSON."""
    training = (
        tinker.ServiceClient(base_url=url, api_key=key)
        .create_lora_training_client(base_model=options.model, rank=options.lora_rank, seed=0, train_unembed=False)
        .result()
    )
    rng = np.random.default_rng(os.getpid())
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        started = time.time()
        steps = [tenant_step(training, rng, options) for _ in range(int(line))]
        print(json.dumps({"started": started, "ended": time.time(), "steps": steps}), flush=True)


def tenant_step(training: Any, rng: np.random.Generator, options: argparse.Namespace) -> dict[str, float]:
    started = time.perf_counter()
    sampling = training.save_weights_and_get_sampling_client().result()
    published = time.perf_counter()
    prompts = [
        types.ModelInput.from_ints(rng.integers(0, 256, options.prompt_tokens).tolist()) for _ in range(options.prompts)
    ]
    # A stop token in place of the model's own end of sequence: replies are as long as they may be, as a rule.
    params = types.SamplingParams(max_tokens=options.new_tokens, temperature=1.0, stop=[options.vocab_size - 1])
    drawn = [sampling.sample(prompt, num_samples=options.group, sampling_params=params) for prompt in prompts]
    data, num_new = [], 0
    for prompt, future in zip(prompts, drawn, strict=True):
        for sequence in future.result().sequences:
            num_new += len(sequence.tokens)
            data.append(datum(prompt.to_ints(), sequence.tokens, sequence.logprobs, float(rng.normal())))
    sampled = time.perf_counter()
    passed = training.forward_backward(data, "ppo")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-6))
    passed.result(), stepped.result()
    ended = time.perf_counter()
    return {
        "step_s": ended - started,
        "publish_s": published - started,
        "generation_s": sampled - published,
        "update_s": ended - sampled,
        "num_trained": sum(own.model_input.length + 1 for own in data),
        "num_new": num_new,
    }


def datum(prompt: list[int], reply: list[int], logprobs: Any, advantage: float) -> Any:
    before = len(prompt) - 1
    inputs = {
        "target_tokens": np.array([0] * before + list(reply), np.int64),
        "logprobs": np.array([0.0] * before + list(logprobs), np.float32),
        "advantages": np.array([0.0] * before + [advantage] * len(reply), np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *reply[:-1]]),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


if __name__ == "__main__":
    url, key, known = sys.argv[1:]
    be_tenant(url, key, argparse.Namespace(**json.loads(known)))
