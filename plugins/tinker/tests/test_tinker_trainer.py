"""TinkerTrainer on a fake of the service with a real LoRA: the same updates as the local Trainer, and a run that learns,
resumes, stops and says what is wrong."""

import asyncio
import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource
from ludic.distributed import TinkerPolicy
from ludic.http.client import EndpointError
from ludic.training import (
    CheckpointConfig,
    ConstantCredit,
    JSONLLogger,
    RLAlgorithm,
    TinkerTrainer,
    TokenClippedSurrogateLoss,
    Trainer,
    TrainerConfig,
    make_cispo,
    make_dr_grpo,
    make_gmpo,
    make_grpo,
    make_gspo,
    make_ppo,
    make_reinforce_baseline,
    make_rloo,
    make_sapo,
    make_sft,
    make_spo,
)
from ludic.training.config import LRSchedule
from ludic.training.losses import Loss
from ludic.types import (
    ActorTokenLogps,
    CandidateSets,
    ConfigError,
    NotFinite,
    ReturnSpec,
    SampleAttachments,
    SamplingParams,
    SAWBatch,
    SAWItem,
    TokenCompletionRequest,
)
from ludic_tinker.learner import built_in_of
from tests.extended import cases
from tests.tinker_fake import FakeTinker
from tests.tinker_fake.fixtures import SEED, fake, policy_at, service
from tests.tinker_fake.lora_model import LoraSettings, with_lora
from tests.unit.training.bandit import BanditRequests, hide_nan_queries, rollout_engine, tiny_llama
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow

__all__ = ["fake", "service"]  # fixtures


class Repeated:
    """The same batch again and again."""

    def __init__(self, items: list[SAWItem]) -> None:
        self.items = items

    async def next_batch(self) -> SAWBatch:
        return SAWBatch(items=list(self.items))


def some_items(lengths: tuple[int, ...] = (9, 5, 12, 7, 3, 10)) -> list[SAWItem]:
    """Old log-probs around the untrained model's −5.6, so that ratios lie on both sides of every bound."""
    rng = np.random.default_rng(1)
    return [
        replace(
            item,
            attachments=replace(
                item.attachments,
                actor_logps=ActorTokenLogps(rng.uniform(-6.0, -5.2, item.num_action_tokens).astype(np.float32)),
            ),
        )
        for item in random_items(lengths, vocab=264)
    ]


def algorithm(loss: Loss) -> RLAlgorithm:
    return RLAlgorithm(name="test", credit_assigner=ConstantCredit(1.0), loss=loss)


def settings(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"lr": 1e-2, "max_seq_len": 64, "weight_decay": 0.02, "watch_entropy": False, **changes})


# --- the same update as the local trainer ---

ALGORITHMS = {
    "ppo": make_grpo(clip_eps_high=0.1),
    "ppo, constant length": make_dr_grpo(constant_length=7),
    "ppo, mean over each sample": make_grpo(length_normalize=True),
    "ppo, mean over tokens": algorithm(TokenClippedSurrogateLoss(reduction="token_mean")),
    "importance_sampling": algorithm(TokenClippedSurrogateLoss(clip_eps_low=1.0, clip_eps_high=float("inf"))),
    "cispo": make_cispo(),
    "cispo, both bounds": make_cispo(clip_eps_low=0.1, length_normalize=False),
    "cross_entropy": make_sft(length_normalize=True),
    "custom: RLOO": make_rloo(),
    "custom: REINFORCE with a baseline": make_reinforce_baseline(normalize_adv=True),
    "custom: GSPO": make_gspo(clip_eps_low=0.2, clip_eps_high=0.2),
    "custom: SAPO": make_sapo(),
    "custom: GMPO": make_gmpo(),
    "custom: dual clip": make_grpo(ratio_clip=1.05),
    "custom: with KL": make_cispo(kl_coeff=0.1),
}


@pytest.mark.parametrize("name", cases(ALGORITHMS, default=[*ALGORITHMS][::3]))
def test_two_steps_leave_the_weights_that_the_local_trainer_leaves(fake: FakeTinker, name: str):
    algo, items = ALGORITHMS[name], some_items()
    # AdamW divides by the gradient's size; with the usual eps the order of a sum would show where that is all but zero.
    cfg = settings(lr_schedule=LRSchedule(warmup_steps=4), max_grad_norm=0.5, eps=1e-3)
    there = TinkerTrainer(model=policy_at(fake, train_unembed=False), algo=algo, batch_source=Repeated(items), cfg=cfg)
    model = with_lora(tiny_llama(), LoraSettings(rank=8, seed=SEED, train_unembed=False))
    here = Trainer(model=model, algo=algo, batch_source=Repeated(items), cfg=cfg)
    built_in = built_in_of(algo.loss)
    assert (built_in.name if built_in is not None else "custom") == name.split(",")[0].split(":")[0]
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(fake.run.weights()[name], p) for name, p in own.items())
    before = fake.run.weights()
    for _ in range(2):  # the second with the first one's moments, and off-policy
        theirs, ours = there.train_step_sync(), here.train_step_sync()
        assert theirs["train/tinker_unclipped_grad_l2_mean"] == pytest.approx(ours["train/grad_norm"], rel=1e-4)
        same = set(ours) - {"train/grad_norm", "train/num_micro_batches"} - {n for n in ours if n.startswith("perf/")}
        assert {n: theirs[n] for n in same} == pytest.approx({n: ours[n] for n in same}, rel=1e-4, abs=1e-5)
        assert theirs["train/tinker_loss_sum"] == pytest.approx(ours["train/loss"], rel=1e-4, abs=1e-5)
    after = fake.run.weights()
    assert max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-3
    for n, p in own.items():
        assert torch.allclose(after[n], p, atol=1e-5), (n, float((after[n] - p).abs().max()))


def test_a_request_that_was_sent_twice_counts_once(fake: FakeTinker):
    policy, items = policy_at(fake), some_items()
    trainer = TinkerTrainer(model=policy, algo=make_grpo(), batch_source=Repeated(items), cfg=settings())
    # The worst is the one that was carried out, and whose answer got lost: the SDK cannot know, and asks again.
    fake.faults["optim_step"] += ["drop", "lose"]
    fake.faults["forward_backward"] += ["503", "lose"]
    fake.num_try_again = 1
    trainer.train_step_sync()
    weights, fake.num_try_again = fake.run.weights(), 0
    assert [len(fake.asked(name)) for name in ("forward_backward", "optim_step")] == [3, 3]
    assert fake.run.num_steps == 1
    TinkerTrainer(
        model=policy_at(fake), algo=make_grpo(), batch_source=Repeated(items), cfg=settings()
    ).train_step_sync()
    assert all(torch.equal(weights[name], again) for name, again in fake.run.weights().items())


# --- what is sampled follows what is trained ---


async def sampled(policy: TinkerPolicy, prompt: list[int], **sampling: Any) -> tuple[list[int], list[float]]:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 1, "ignore_eos": True, **sampling})
    returned = ReturnSpec.for_rl() if params.temperature == 1 else ReturnSpec.for_eval()
    request = TokenCompletionRequest(model="tiny", prompt_token_ids=prompt, sampling=params, return_=returned, seed=3)
    answer, _ = await policy.client.complete_tokens(request)
    logprobs = answer.completion_logprobs
    return answer.completion_token_ids.tolist(), [] if logprobs is None else list(logprobs)


async def test_a_step_makes_rewarded_tokens_likelier_and_changes_what_is_sampled(fake: FakeTinker):
    policy = await asyncio.to_thread(policy_at, fake)
    prompt = [257, 120, 260, 258]
    tokens, logps = await sampled(policy, prompt)
    assert (await sampled(policy, prompt, temperature=0.0))[0] != tokens
    attachments = SampleAttachments(actor_logps=ActorTokenLogps(np.array(logps, dtype=np.float32)), temperature=1.0)
    item = SAWItem(np.array([*prompt, *tokens]), None, np.array([0, 0, 0, 0, 1]), 1.0, {}, attachments)
    trainer = TinkerTrainer(
        model=policy, algo=ALGORITHMS["importance_sampling"], batch_source=Repeated([item]), cfg=settings()
    )
    first = await trainer.train_step()
    assert first["train/logp_difference_abs"] < 1e-5, "what is trained is what was sampled"
    assert (await trainer.train_step())["train/ratio_mean"] > 1.2
    await trainer.train(4)
    assert (await sampled(policy, prompt, temperature=0.0))[0] == tokens
    assert policy.client.version == 6


def bandit_trainer(policy: TinkerPolicy, *, num_prompts: int = 1, **more: Any) -> TinkerTrainer:
    algo = make_dr_grpo(group_size=8)
    source = RolloutBatchSource(
        rollout_engine(policy.client),
        requests_fn=BanditRequests(num_prompts),
        algorithm=algo,
        strategy=GRPORequestStrategy(8),
        max_steps=1,
        concurrency=64,
    )
    cfg = more.pop("cfg", None) or settings(weight_decay=0.0)
    return TinkerTrainer(model=policy, algo=algo, batch_source=source, cfg=cfg, **more)


def test_versions_say_how_old_the_samples_are(fake: FakeTinker):
    cfg = settings(sync_every_steps=2)
    trainer = bandit_trainer(policy_at(fake), cfg=cfg)
    lags = [trainer.train_step_sync()["train/lag_max"] for _ in range(4)]
    assert lags == [0.0, 1.0, 0.0, 1.0]
    assert trainer.model.client.version == 4


# --- saving, resuming, stopping ---


def test_two_steps_and_two_resumed_ones_are_four(fake: FakeTinker, tmp_path: Path):
    whole = bandit_trainer(policy_at(fake), train_logger=JSONLLogger(tmp_path / "whole.jsonl"))
    whole.train_sync(4)
    expected = fake.run.weights()

    checkpoints = CheckpointConfig(tmp_path / "checkpoints", every_n_steps=1, max_to_keep=1)
    bandit_trainer(policy_at(fake), checkpoint_config=checkpoints).train_sync(2)
    other_seed = policy_at(fake, lora_seed=99)
    resumed = bandit_trainer(other_seed, checkpoint_config=checkpoints, resume_from="latest")
    assert (resumed.step, other_seed.client.version) == (2, 2)
    resumed.train_sync(2)
    assert resumed.step == 4
    assert all(torch.equal(expected[name], again) for name, again in fake.run.weights().items())
    assert [folder.name for folder in sorted((tmp_path / "checkpoints").glob("step_*"))] == ["step_000004"]
    assert sorted(path.split("/")[-1] for path in fake.checkpoints if "/step_" in path) == [
        "step_000001",
        "step_000002",
        "step_000003",
        "step_000004",
    ]


def test_sampler_weights_can_be_kept_and_sampled_from(fake: FakeTinker):
    from ludic.inference import TinkerChatClient

    policy = policy_at(fake)
    TinkerTrainer(
        model=policy, algo=make_grpo(), batch_source=Repeated(some_items()), cfg=settings(lr=5e-2)
    ).train_step_sync()
    path = policy.save_for_sampling("final")
    kept = TinkerChatClient.connect(policy.config, model_path=path, tokenizer=policy.tokenizer)
    trained = asyncio.run(sampled(policy, [257, 120]))
    policy.client = kept
    assert asyncio.run(sampled(policy, [257, 120])) == trained
    kept.close()


async def test_a_signal_ends_the_run_with_what_was_learned_kept(fake: FakeTinker, tmp_path: Path):
    class Interrupting(Repeated):
        num_batches = 0

        async def next_batch(self) -> SAWBatch:
            self.num_batches += 1
            if self.num_batches == 3:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(60)
            return await super().next_batch()

    trainer = TinkerTrainer(
        model=await asyncio.to_thread(policy_at, fake),
        algo=make_grpo(),
        batch_source=Interrupting(some_items()),
        cfg=settings(),
        checkpoint_config=CheckpointConfig(tmp_path),
    )
    await asyncio.wait_for(trainer.train(), 20)
    assert trainer.step == 2
    assert trainer.checkpointer is not None
    latest = trainer.checkpointer.latest()
    assert latest is not None and latest.name == "step_000002"
    assert [path.split("/")[-1] for path in fake.checkpoints if "/step_" in path] == ["step_000002"]


def test_evaluations_see_the_new_weights_and_sources_are_told_which_samples_were_trained(
    fake: FakeTinker, tmp_path: Path
):
    policy, told = policy_at(fake), []

    class Watching:
        async def eval(self, **_: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
            return [], {"version": float(policy.client.version)}

    class Accounting(Repeated):
        def notify_trained(self, step: int, num_items: int) -> None:
            told.append(("trained", step, num_items))

        def notify_saved(self, step: int) -> None:
            told.append(("saved", step))

        def notify_version(self, version: int) -> None:
            told.append(("version", version))

    trainer = TinkerTrainer(
        model=policy,
        algo=make_grpo(),
        batch_source=Accounting(some_items()),
        cfg=settings(eval_at_start=True, eval_every_n_steps=2),
        checkpoint_config=CheckpointConfig(tmp_path / "saved", every_n_steps=2, best_metric="eval/version"),
        train_logger=JSONLLogger(tmp_path / "metrics.jsonl"),
        evaluator=Watching(),
    )
    trainer.train_sync(2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/version"] for line in lines if "eval/version" in line] == [0.0, 2.0]
    assert told == [("version", 0), ("trained", 1, 6), ("version", 1), ("trained", 2, 6), ("version", 2), ("saved", 2)]
    assert trainer.checkpointer is not None and trainer.checkpointer.best() == tmp_path / "saved" / "step_000002"


# --- what is wrong is said ---


def test_a_step_that_the_service_refuses_ends_the_run_with_its_words(fake: FakeTinker):
    trainer = TinkerTrainer(
        model=policy_at(fake), algo=make_grpo(), batch_source=Repeated(some_items()), cfg=settings()
    )
    fake.faults["forward_backward"] += ["fail: out of memory"]
    with pytest.raises(EndpointError, match="asked to train, and failed.*out of memory"):
        trainer.train_step_sync()
    assert trainer.step == 0


def test_a_service_that_computes_another_loss_is_noticed(fake: FakeTinker, caplog: pytest.LogCaptureFixture):
    algo = make_cispo(clip_eps_low=0.05, clip_eps_high=0.05)
    trainer = TinkerTrainer(model=policy_at(fake), algo=algo, batch_source=Repeated(some_items()), cfg=settings())
    with caplog.at_level(logging.WARNING):
        trainer.train_step_sync()
        assert "does not compute the loss" not in caplog.text
        fake.ignores_loss_config = True
        trainer.train_step_sync()
    assert "does not compute the loss asked for" in caplog.text


def test_a_loss_that_is_not_finite_stops_the_run(fake: FakeTinker, monkeypatch: pytest.MonkeyPatch):
    hide_nan_queries(monkeypatch)
    items = some_items()
    trainer = TinkerTrainer(model=policy_at(fake), algo=make_grpo(), batch_source=Repeated(items), cfg=settings())
    with torch.no_grad():
        next(p for p in fake.run.model.parameters() if p.requires_grad).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="last checkpoint"):
        trainer.train_step_sync()


def test_a_number_of_the_service_that_is_not_finite_stops_the_run_though_the_loss_is(fake: FakeTinker, monkeypatch):
    policy = policy_at(fake)
    train = policy.train
    metrics = {"unclipped_grad_l2:mean": float("nan")}
    monkeypatch.setattr(policy, "train", lambda *given: replace(train(*given), metrics=metrics))
    trainer = TinkerTrainer(model=policy, algo=make_grpo(), batch_source=Repeated(some_items()), cfg=settings())
    with pytest.raises(NotFinite, match=r"Tinker's unclipped_grad_l2:mean is nan.*last checkpoint"):
        trainer.train_step_sync()


def some_candidates() -> SAWItem:
    (item,) = random_items((5,), vocab=264)
    candidates = CandidateSets.of([[int(token)] for token in item.input_ids[item.action_mask]])
    return replace(item, attachments=replace(item.attachments, candidates=candidates))


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([some_candidates()], "part of the vocabulary"),
        (random_items((5, 6), vocab=264, temperature=0.7), r"temperature 0\.7, but Tinker trains at 1"),
    ],
)
def test_samples_of_another_distribution_are_refused(fake: FakeTinker, items: list[SAWItem], said: str):
    trainer = TinkerTrainer(model=policy_at(fake), algo=make_grpo(), batch_source=Repeated(items), cfg=settings())
    with pytest.raises(ConfigError, match=said):
        trainer.train_step_sync()
    assert fake.asked("forward_backward") == []


@pytest.mark.parametrize(
    ("algo", "cfg", "said"),
    [
        (make_ppo(), settings(), "ppo needs a critic"),
        (make_ppo(entropy_coeff=0.1), settings(), "a critic and the policy's entropy"),
        (make_spo()[0], settings(), "how far each step moves the policy"),
        (make_grpo(), settings(compile=True, model_device="cpu"), "compile, model_device"),
        (make_grpo(), settings(eval_at_start=True), "no evaluator"),
    ],
)
def test_what_cannot_be_had_there_is_refused_before_the_first_step(fake: FakeTinker, algo: Any, cfg: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        TinkerTrainer(model=policy_at(fake), algo=algo, batch_source=Repeated([]), cfg=cfg)


def test_resuming_needs_to_know_from_where(fake: FakeTinker):
    with pytest.raises(ConfigError, match="needs a checkpoint_config"):
        TinkerTrainer(model=policy_at(fake), algo=make_grpo(), batch_source=Repeated([]), resume_from="latest")
