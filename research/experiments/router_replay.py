"""How far sampler and trainer of a mixture of experts are apart, with and without replaying the sampler's experts.

The engine samples with perturbed numbers and records the experts of every token; the trainer computes log-probs of the same
tokens from the fp32 weights. "none" perturbs nothing, "bf16 weights" rounds the sampler's weights to bfloat16 and computes in
fp32, "bf16" computes in bfloat16, "one update" samples with weights before a step of the given size. The routers of the tiny
mixture are scaled down: the smaller they are, the nearer the experts of a token are to a tie.

    OMP_NUM_THREADS=1 PYTHONPATH=.:src python research/experiments/router_replay.py
"""

import argparse
import asyncio
import copy
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ludic.inference.local import LocalEngine
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.training.losses.corrections import effective_sample_size
from ludic.types import (
    ActorTokenLogps,
    ReturnSpec,
    SampleAttachments,
    SamplingParams,
    SAWItem,
    TokenCompletionRequest,
)
from ludic_gpu.experts import recording

VOCAB = 256


def mixture(router_scale: float, seed: int = 0) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(std=router_scale)
    return model


def sampler_of(model: Any, how: str, step: float) -> Any:
    sampler = copy.deepcopy(model)
    if how == "bf16":
        return sampler.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in sampler.parameters():
            if how == "bf16 weights":
                parameter.copy_(parameter.to(torch.bfloat16).float())
            elif how == "one update":
                parameter.sub_(step * torch.sign(torch.randn_like(parameter)))
    return sampler


async def sampled(engine: LocalEngine, num_samples: int, num_tokens: int) -> list[SAWItem]:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens)
    requests = [
        TokenCompletionRequest(
            "m", rng.integers(0, VOCAB, 16).astype(np.int32), sampling=params, return_=ReturnSpec.for_rl(), seed=number
        )
        for number in range(num_samples)
    ]
    items = []
    for response, _ in await asyncio.gather(*map(engine.complete_tokens, requests)):
        ids = np.concatenate([response.prompt_token_ids, response.completion_token_ids])
        attached = SampleAttachments(
            actor_logps=ActorTokenLogps(response.completion_logprobs), temperature=1.0, experts=response.experts
        )
        items.append(SAWItem(ids, None, np.arange(len(ids)) >= 16, 1.0, attachments=attached))
    return items


def mismatch(model: Any, items: list[SAWItem], *, replay: bool) -> dict[str, float]:
    policy = TrainedPolicy(model.requires_grad_(True), replay_experts=replay)
    sums = accumulate_gradients(policy, TokenClippedSurrogateLoss(), items, micro_token_budget=8192)
    model.zero_grad()
    assert policy.routers is not None
    policy.routers.remove()
    return effective_sample_size(sums.means())


def moved_experts(model: Any, items: list[SAWItem]) -> float:
    """Share of (token, layer) whose set of experts the trainer chooses differently."""
    differs = []
    for item in items:
        with recording(model) as routed, torch.no_grad():
            model(torch.tensor(item.input_ids)[None].long(), use_cache=False)
        own, given = routed.experts_TLK().numpy(), item.attachments.experts
        assert given is not None
        differs.append((np.sort(own, axis=-1) != np.sort(given, axis=-1)).any(axis=-1)[:-1].mean())
    return float(np.mean(differs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--step", type=float, default=1e-4, help="of the update between sampler and trainer")
    parser.add_argument("--router-scales", type=float, nargs="+", default=[0.02, 0.2])
    args = parser.parse_args()
    print(
        f"{'routers':>8} {'perturbed by':>13} {'moved':>7} {'replay':>7} {'KL':>9} {'|dlogp|':>9} {'ESS':>7} {'ESS seq':>8}"
    )
    for scale in args.router_scales:
        for how in ("none", "bf16 weights", "bf16", "one update"):
            model = mixture(scale)
            engine = LocalEngine(sampler_of(model, how, args.step), record_experts=True)
            items = asyncio.run(sampled(engine, args.samples, args.tokens))
            engine.close()
            moved = moved_experts(model, items)
            for replay in (False, True):
                stats = mismatch(model, items, replay=replay)
                print(
                    f"{scale:8g} {how:>13} {moved:7.2%} {'yes' if replay else 'no':>7} {stats['kl_actor_policy']:9.2e} "
                    f"{stats['logp_difference_abs']:9.2e} {stats['ess']:7.4f} {stats['ess_sequence']:8.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
