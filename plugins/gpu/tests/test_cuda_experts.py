"""A mixture on a GPU: the engine records experts inside its graphs, and replaying them brings sampler and trainer together."""

import asyncio
import copy
import logging

import numpy as np
import pytest
import torch

from ludic.inference.local import LocalEngine
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import (
    ActorTokenLogps,
    ReturnSpec,
    SampleAttachments,
    SamplingParams,
    SAWItem,
    TokenCompletionRequest,
)
from ludic_gpu.experts import recording

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

logger = logging.getLogger(__name__)
NUM_PROMPT, NUM_NEW = 24, 48


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=512, moe_intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        max_position_embeddings=512, initializer_range=0.1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).to("cuda", torch.bfloat16).eval()


def sampled(engine: LocalEngine) -> list[SAWItem]:
    prompts = np.random.default_rng(0).integers(0, 4096, (32, NUM_PROMPT)).astype(np.int32)
    prompts[1] = prompts[0]

    async def ask() -> list[SAWItem]:
        params = SamplingParams(temperature=1.0, max_tokens=NUM_NEW)
        requests = [
            TokenCompletionRequest("m", prompt, sampling=params, return_=ReturnSpec.for_rl(), seed=number)
            for number, prompt in enumerate(prompts)
        ]
        items = []
        for response, _ in await asyncio.gather(*map(engine.complete_tokens, requests)):
            ids = np.concatenate([response.prompt_token_ids, response.completion_token_ids])
            logps = ActorTokenLogps(response.completion_logprobs)
            attached = SampleAttachments(actor_logps=logps, temperature=1.0, experts=response.experts)
            items.append(SAWItem(ids, None, np.arange(len(ids)) >= NUM_PROMPT, 1.0, attachments=attached))
        return items

    return asyncio.run(ask())


@pytest.mark.parametrize("compile_layers", [False, True], ids=["plain", "compiled"])
def test_experts_are_recorded_in_graphs_and_replay_lowers_the_mismatch(model, compile_layers):
    engine = LocalEngine(model, record_experts=True, compile_layers=compile_layers, max_sequences=32)
    try:
        items = sampled(engine)
    finally:
        engine.close()
    same = []
    for item in items:
        with recording(model) as own, torch.no_grad():
            model(torch.tensor(item.input_ids)[None].long().cuda(), use_cache=False)
        recorded = item.attachments.experts
        assert (recorded[:-1] >= 0).all() and (recorded[-1] == -1).all()
        same.append(np.sort(own.experts_TLK().cpu().numpy()) == np.sort(recorded))
    assert np.mean(np.concatenate(same)[:-1]) > 0.9, (
        "most are those of a plain forward pass; near ties round differently"
    )
    found = []
    for replays in (False, True):
        policy = TrainedPolicy(copy.deepcopy(model).train().requires_grad_(True), replay_experts=replays)
        loss = TokenClippedSurrogateLoss()
        stats = accumulate_gradients(policy, loss, items, micro_token_budget=1024, balance_experts=0.01).means()
        found.append(stats["kl_actor_policy"])
        logger.info(
            "replay %s: %s", replays, {n: v for n, v in stats.items() if n.startswith(("experts/", "kl_actor"))}
        )
    assert found[1] < found[0]
