"""Training on a GPU agrees with training on a CPU; the engine and the trainer share one model there, too."""

import asyncio

import pytest
import torch
import transformers
from packaging.version import Version

from ludic.eval import EngineEvaluator, SnapshotEvaluator
from ludic.inference.local.snapshot import EngineSnapshot
from ludic.training import TrainerConfig, make_grpo
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import CISPOLoss, CompositeLoss, EntropyBonus, LossTerm
from tests.tiny_families import family_model
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.bandit import BanditRequests, bandit_trainer, rollout_engine, tiny_llama
from tests.unit.training.samples import random_items

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [5, 9, 9, 17, 30, 2, 12, 7]


def gradients(family, device, dtype=torch.float32, compiled=False, autocast=None):
    model = new_model(family, initializer_range=0.1, hidden_size=64, head_dim=16).to(device, dtype).requires_grad_(True)
    policy = TrainedPolicy(model, mixed_precision_dtype=autocast)
    if compiled:
        from ludic.models.execution import compile_layers

        compile_layers(model)
    loss = CompositeLoss(
        [LossTerm(name="policy", loss=CISPOLoss()), LossTerm(name="entropy", loss=EntropyBonus(coeff=0.1))]
    )
    accumulate_gradients(policy, loss, random_items(LENGTHS), micro_token_budget=64)
    return {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected, cosine):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        similarity = torch.nn.functional.cosine_similarity(found[name].flatten(), grad.flatten(), dim=0)
        assert similarity > cosine, (name, float(similarity))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral-sliding", "gemma2-softcap"])
def test_gradients_in_fp32_are_those_of_the_cpu(family):
    assert_close(gradients(family, "cuda"), gradients(family, "cpu"), 0.9999)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba", "lfm2"])
def test_log_probs_of_packed_hybrids_are_those_of_the_cpu(family):
    found = []
    for device in ("cuda", "cpu"):
        policy = TrainedPolicy(family_model(family).to(device), mixed_precision_dtype=None)
        if family == "lfm2" and Version(transformers.__version__) < Version("5.22"):
            pytest.skip(
                f"transformers {transformers.__version__} gives the short convolutions of LFM2 no state of the pass"
            )
        assert policy.packed
        with torch.no_grad():
            found.append(policy.logps(policy.batch(random_items(LENGTHS)))[0].cpu())
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral-sliding"])
def test_gradients_in_bf16_through_flash_attention_point_the_same_way(family):
    assert_close(gradients(family, "cuda", torch.bfloat16), gradients(family, "cpu"), 0.98)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2-softcap"])
def test_weights_in_fp32_are_computed_in_bf16_and_get_gradients_in_fp32(family):
    found = gradients(family, "cuda", autocast="bf16")
    assert_close(found, gradients(family, "cpu"), 0.98)
    assert not torch.equal(found["lm_head.weight"], found["lm_head.weight"].bfloat16().float()), "rounded on the way"


def test_compiled_layers_give_the_same_gradients():
    assert_close(gradients("llama", "cuda", compiled=True), gradients("llama", "cpu"), 0.9999)


def test_the_bandit_is_learned_on_a_gpu_with_shared_weights():
    async def learn():
        trainer, engine = bandit_trainer(make_grpo(group_size=8), model=tiny_llama(hidden_size=64).cuda())
        history = [await trainer.train_step() for _ in range(40)]
        engine.close()
        return history

    history = asyncio.run(learn())
    rewards = [stats["train/avg_total_reward"] for stats in history]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.25
    assert all(stats["train/logp_difference_abs"] < 0.02 for stats in history)
    assert all(stats["train/lag_max"] == 0 for stats in history)


def test_evaluating_a_snapshot_beside_training_sees_whole_versions():
    """Three things capture and launch at once: the live engine's graphs, the snapshot's, and the trainer's kernels."""
    seen: dict[int, set[int]] = {}

    snapshots = []

    def snapshot_evaluator(engine):
        snapshot = EngineSnapshot(engine, kv_tokens=8192)
        inner = snapshot.complete_tokens

        async def noting(request):
            response, info = await inner(request)
            seen.setdefault(snapshot.version, set()).update(run.version for run in response.version_runs)
            return response, info

        snapshot.complete_tokens = noting
        snapshots.append(snapshot)
        evaluator = EngineEvaluator(rollout_engine(snapshot), BanditRequests(256), concurrency=64)
        return SnapshotEvaluator(evaluator, snapshot)

    async def learn():
        cfg = TrainerConfig(lr=1e-2, max_seq_len=64, weight_decay=0.0, eval_in_background=True, eval_every_n_steps=2)
        trainer, engine = bandit_trainer(
            make_grpo(group_size=8),
            model=tiny_llama(hidden_size=64).cuda(),
            cfg=cfg,
            make_evaluator=snapshot_evaluator,
        )
        await trainer.train(12)
        engine.close()
        snapshots[0].close()

    asyncio.run(learn())
    assert seen == {version: {version} for version in (2, 4, 6, 8, 10, 12)}
