"""vLLM on the workloads that benchmarks/engine_gpu.py has written to a file; one record per workload, with and without log-probs.

It runs in its own process and lies in its own folder: beside research/experiments/vllm.py, `import vllm` would find that file. It imports
neither ludic nor torch before vLLM does, so that vLLM may fork its engine.

    python research/experiments/others/vllm_decode.py WORK.json
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEEDED = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
"""FlashInfer's sampler compiles itself with nvcc, which a machine with only a driver lacks."""


def main(path: str) -> None:
    os.environ.update({name: value for name, value in NEEDED.items() if name not in os.environ})
    try:
        import vllm
    except ImportError as error:
        raise SystemExit(f"vLLM cannot be imported: {error}") from error
    given = json.loads(Path(path).read_text())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(given["config"]))
        started = time.perf_counter()
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=given["max_model_len"],
            max_num_seqs=given["max_sequences"],
            enable_prefix_caching=True,
            disable_log_stats=True,
            **given["settings"],
        )
        start_s = time.perf_counter() - started
    for logprobs in (0, None):
        for name, requests in given["workloads"].items():
            generate(llm, requests[:128], logprobs)
            seconds: list[float] = []
            while len(seconds) < given["repeat"] and sum(seconds) < given["enough_s"]:
                seconds.append(generate(llm, requests, logprobs))
            found = {"workload": name, "seconds": min(seconds), "logprobs": logprobs is not None}
            print("RECORD " + json.dumps({**found, "start_s": start_s, "version": vllm.__version__}), flush=True)


def generate(llm: Any, requests: list[tuple[list[int], int]], logprobs: int | None) -> float:
    """Seconds, prompts included; the next run finds no cached prefixes."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs)
        for _, new in requests
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    started = time.perf_counter()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [new for _, new in requests]
    llm.reset_prefix_cache()
    return seconds


if __name__ == "__main__":
    main(sys.argv[1])
