"""Truncated sampling end to end: repeated by the trainer where it was recorded, refused where it was not."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource
from ludic.distributed import SharedWeightsPublisher
from ludic.inference import ScriptedClient
from ludic.inference.local import LocalEngine
from ludic.training import (
    Trainer,
    TrainerConfig,
    collate_saw_items,
    make_grpo,
    make_opd,
    make_rft,
    make_sft,
)
from ludic.training.learner.batches import prepare, require_trainable_sampling
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import tokens_from_logits
from ludic.types import CandidateSets, ConfigError, InferenceSpec, ReturnSpec, SamplingParams, SAWBatch
from tests.unit.training.bandit import BanditRequests, ByteTokenizer, rollout_engine, tiny_llama
from tests.unit.training.samples import random_items

CUT = SamplingParams(temperature=0.8, top_p=0.6, max_tokens=4, ignore_eos=True)


def cut_source(client, algorithm, return_, sampling=CUT):
    requests = BanditRequests(4)
    requests._inference = InferenceSpec(sampling=sampling, return_=return_)
    return RolloutBatchSource(
        rollout_engine(client),
        requests_fn=requests,
        algorithm=algorithm,
        strategy=GRPORequestStrategy(4),
        max_steps=1,
        concurrency=16,
    )


def trainer_of(algorithm, return_=ReturnSpec.for_rl()):  # noqa: B008 - a frozen value
    model = tiny_llama()
    engine = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=8192)
    cfg = TrainerConfig(lr=1e-2, max_seq_len=64, weight_decay=0.0)
    source = cut_source(engine, algorithm, return_)
    trainer = Trainer(
        model=model, algo=algorithm, batch_source=source, cfg=cfg, publisher=SharedWeightsPublisher(engine)
    )
    return trainer, engine


async def test_trainer_uses_the_candidates_that_the_engine_recorded():
    trainer, engine = trainer_of(make_grpo(group_size=4))
    history = [await trainer.train_step() for _ in range(3)]
    engine.close()
    for stats in history:
        assert stats["train/logp_difference_abs"] < 1e-5
        assert (stats["train/ess"], stats["train/ess_sequence"]) == pytest.approx((1.0, 1.0), abs=1e-4)


class Unrecorded:
    """Batches whose log-probs came without the candidates: from another recorder, or written down elsewhere."""

    def __init__(self, source):
        self._source = source

    async def next_batch(self):
        batch = await self._source.next_batch()
        return replace(batch, items=[unrecorded(item) for item in batch.items])


def unrecorded(item):
    return replace(item, attachments=replace(item.attachments, candidates=None, untrainable_sampling="top_p=0.6"))


async def test_log_probs_of_an_unrecorded_distribution_are_refused_before_anything_is_trained():
    trainer, engine = trainer_of(make_grpo(group_size=4))
    trainer.batch_source = Unrecorded(trainer.batch_source)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(ConfigError, match=r"sampled with top_p=0\.6.*top_p=1.*ReturnSpec\.for_rl"):
        await trainer.train_step()
    engine.close()
    assert all((old == new).all() for old, new in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(("candidates", "is_refused"), [([65, 66], True), ((), False)], ids=["a part", "all"])
def test_teacher_log_probs_are_refused_for_truncated_samples(candidates, is_refused):
    (item,) = random_items([4])
    ids = item.input_ids[item.action_mask]
    candidates = CandidateSets.of([sorted({int(token), *candidates}) if candidates else () for token in ids])
    teacher = np.full(len(ids), -1.0, dtype=np.float32)
    taught = replace(item, attachments=replace(item.attachments, candidates=candidates, teacher_logps=teacher))
    with pytest.raises(ConfigError, match="over all of it") if is_refused else nullcontext():
        require_trainable_sampling([taught], make_opd().loss)


@pytest.mark.parametrize("make", [make_sft, make_rft], ids=lambda make: make.__name__)
async def test_imitation_accepts_truncated_samples(make):
    trainer, engine = trainer_of(make(), ReturnSpec.for_eval())
    batch = await trainer.batch_source.next_batch()
    engine.close()
    assert {item.attachments.untrainable_sampling for item in batch.items} == {"top_p=0.6"}
    for item in prepare(batch, trainer.algo, trainer.cfg, 0).items:
        assert item.attachments.untrainable_sampling is None and item.attachments.candidates is None


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"presence_penalty": 0.5}, {"min_tokens": 2}], ids=str)
async def test_server_that_does_not_record_candidates_is_refused_at_the_first_reply(settings):
    sampling = replace(CUT, top_p=1.0, **settings)
    source = cut_source(ScriptedClient(["a"] * 16), make_grpo(group_size=4), ReturnSpec.for_rl(), sampling)
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"{name}=.*top_p=1, top_k=0.*embedded inference engine.*for_eval"):
        await source.next_batch()


async def test_penalties_are_refused():
    engine = LocalEngine(tiny_llama(), ByteTokenizer(), max_model_len=64, kv_tokens=8192)
    source = cut_source(engine, make_grpo(group_size=4), ReturnSpec.for_rl(), replace(CUT, repetition_penalty=1.3))
    with pytest.raises(ConfigError, match=r"repetition_penalty=1\.3"):
        await source.next_batch()
    engine.close()


def cut_items(**attached):
    def with_candidates(item):
        tokens = item.input_ids[item.action_mask].tolist()
        candidates = CandidateSets.of([[token, (token + 1) % 128] for token in tokens])
        return replace(item, attachments=replace(item.attachments, candidates=candidates, **attached))

    return [with_candidates(item) for item in random_items([5, 9])]


def test_a_teacher_over_the_whole_vocabulary_cannot_be_compared_with_a_part_of_it():
    (item, _) = cut_items()
    scored = replace(item, attachments=replace(item.attachments, teacher_logps=item.actor_logps))
    with pytest.raises(ConfigError, match="part of the vocabulary, but its teacher"):
        prepare(SAWBatch(items=[scored]), make_grpo(group_size=4), TrainerConfig(), 0)


def test_padded_batches_of_logits_refuse_a_part_of_the_vocabulary_and_know_temperatures():
    with pytest.raises(ConfigError, match="part of the vocabulary.*Train with Trainer"):
        collate_saw_items(cut_items(), pad_token_id=0)
    items, model = random_items([5, 9], temperature=0.5), tiny_llama()
    batch, policy = collate_saw_items(items, pad_token_id=0), TrainedPolicy(model)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        expected, _ = policy.logps(policy.batch(items))
    torch.testing.assert_close(tokens_from_logits(logits, batch).logps, expected, atol=1e-5, rtol=1e-5)
