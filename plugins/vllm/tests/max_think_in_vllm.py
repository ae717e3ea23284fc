"""Run by test_vllm_server.py in vLLM's environment: `max_think` under the model runner that only GPUs have.

The runner itself needs Triton; its interface is plain tensors, so the processor can be driven by hand on a CPU.
"""

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.sample.logits_processor import _load_logitsprocs_by_fqcns
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns

from ludic_vllm.inside.logits_processor import MaxThink, MaxThinkBatch

NAME = "ludic_vllm.inside.logits_processor:MaxThink"
SLOTS, WIDTH, VOCABULARY = 6, 64, 320


@dataclass
class Request:
    slot: int
    prompt: list[int]
    limit: int | None
    reply: list[int]


def main(model_dir: str) -> None:
    for load in (_load_logitsprocs_by_fqcns, _load_v2_logitsprocs_by_fqcns):
        assert load([NAME]) == [MaxThink], "vLLM does not take it for a processor of this runner's kind"
    model_config = config_of(model_dir)
    states = SimpleNamespace(
        device=torch.device("cpu"),
        max_num_reqs=SLOTS,
        all_token_ids=SimpleNamespace(gpu=torch.zeros(SLOTS, WIDTH, dtype=torch.int32)),
        prompt_len=SimpleNamespace(np=np.zeros(SLOTS, dtype=np.int32)),
    )
    processor = MaxThink(SimpleNamespace(model_config=model_config), states)
    assert isinstance(processor, MaxThinkBatch)
    # Slots in another order than rows, prompts of several lengths, and one request without a limit.
    requests = [Request(4, [1] * 9, 3, []), Request(0, [1] * 2, None, []), Request(2, [1] * 5, 6, [])]
    for request in requests:
        states.prompt_len.np[request.slot] = len(request.prompt)
        states.all_token_ids.gpu[request.slot, : len(request.prompt)] = torch.tensor(request.prompt)
        arguments = None if request.limit is None else {"max_think": request.limit}
        assert processor.add_request(request.slot, SimpleNamespace(extra_args=arguments)) is (arguments is not None)
    for _ in range(20):
        step(processor, states, requests)
    sys.stdout.write(json.dumps([request.reply for request in requests]))


def step(processor: MaxThinkBatch, states: SimpleNamespace, requests: list[Request]) -> None:
    """One greedy token for every request; the model itself would always say 7."""
    slots = np.array([request.slot for request in requests])
    lengths = np.array([len(request.prompt) + len(request.reply) for request in requests])
    logits = torch.zeros(len(requests), VOCABULARY)
    logits[:, 7] = 5.0
    nothing = torch.empty(0)
    context = LogitsContext(
        expanded_idx_mapping=torch.from_numpy(slots),
        idx_mapping=torch.from_numpy(slots),
        idx_mapping_np=slots,
        expanded_local_pos=nothing,
        input_ids=nothing,
        pos=torch.from_numpy(lengths - 1),
        seq_lens_upper_bound_np=lengths,
    )
    for request, row in zip(requests, processor.apply(logits, context), strict=True):
        token = int(row.argmax())
        states.all_token_ids.gpu[request.slot, len(request.prompt) + len(request.reply)] = token
        request.reply.append(token)


def config_of(model_dir: str) -> object:
    from vllm.config import ModelConfig

    return ModelConfig(model=model_dir, dtype="float32")


main(sys.argv[1])
