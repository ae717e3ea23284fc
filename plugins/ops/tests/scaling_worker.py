"""One of two ranks: what it really holds of a sharded model. `torchrun … -m plugins.ops.tests.scaling_worker FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from ludic.distributed.fsdp import FSDPSettings, shard_model, sync_gradients
from ludic.distributed.ranks import join_ranks, leave_ranks
from ludic.training.learner.gradients import action_tokens, batch_facts
from ludic.training.learner.optimizer import FullPrecisionAdamW
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import ActorTokenLogps, SampleAttachments, SAWItem

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip


def local_bytes(tensors: Any) -> int:
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def whole_gradients(model: Any) -> int:
    """What FSDP holds between micro-batches that are not summed; it has no public name for it."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    kept = [p.unsharded_accumulated_grad for group in groups for p in group.fsdp_params]
    kept += [p._unsharded_param.grad for group in groups for p in group.fsdp_params]
    return sum(grad.numel() * grad.element_size() for grad in kept if grad is not None)


def backward(policy: TrainedPolicy, *, is_last: bool) -> None:
    mask = np.arange(16) >= 4
    attached = SampleAttachments(actor_logps=ActorTokenLogps(np.full(12, -5.0, dtype=np.float32)))
    items = [SAWItem(np.arange(16, dtype=np.int32), None, mask, 1.0, {}, attached)]
    loss = TokenClippedSurrogateLoss()
    sync_gradients(policy.model, is_last=is_last)
    loss(action_tokens(policy, loss, policy.batch(items), batch_facts(items), None, None, True))[0].backward()


def held(sync: str) -> dict[str, int]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16).train()
    shard_model(model, FSDPSettings(param_dtype="bf16", sync_gradients=sync), device="cpu")  # type: ignore[arg-type]
    policy = TrainedPolicy(model)
    optimizer = FullPrecisionAdamW(model.parameters(), lr=1e-3)
    backward(policy, is_last=False)
    found = {"whole_gradients": whole_gradients(model)}
    backward(policy, is_last=True)
    found["weights"] = local_bytes(model.parameters())
    found["gradients"] = local_bytes(p.grad for p in model.parameters())
    optimizer.step()
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    found["optimizer"] = local_bytes([*moments, *optimizer.state_dict()["copies"]])
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(timeout_s=120, device="cpu")
    result = {sync: held(sync) for sync in ("last", "every")}
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(result))
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
