"""On-policy distillation with real models, engines and a trainer: a student learns what was never rewarded."""

import numpy as np
import pytest
import torch

from ludic.batch_gen import TeacherAnnotatedBatchSource
from ludic.inference import ByteTemplate, LocalTeacher, tokenizer_fingerprint
from ludic.inference.local import LocalEngine
from ludic.training import make_grpo_opd, make_opd
from ludic.types import ConfigError
from tests.unit.training.bandit import ByteTokenizer, bandit_trainer, earns, tiny_llama, train_until

pytestmark = pytest.mark.slow

ASCII, OTHERS = slice(0, 128), slice(128, 256)


class Vocabulary(ByteTokenizer):
    def get_vocab(self):
        return {f"<{number}>": number for number in range(264)}


FINGERPRINT = tokenizer_fingerprint(Vocabulary())


def prompt(question):
    return ByteTemplate().apply([{"role": "user", "content": question}]).prompt_token_ids


def target(wanted):
    """98 in 100 spread over what is wanted."""
    probabilities = torch.full((264,), 0.02 / 264)
    probabilities[wanted] += 0.98 / 128
    return probabilities


def taught(**answers):
    """A teacher that answers each question as it should."""
    model = tiny_llama(seed=1)
    ids = torch.tensor(np.stack([prompt(question) for question in answers]), dtype=torch.long)
    wanted = torch.stack([target(answer) for answer in answers.values()])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, -1], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return LocalEngine(model.requires_grad_(False), Vocabulary(), max_model_len=64, kv_tokens=1024)


async def distilled(algorithm, teacher, steps, is_learned, **settings):
    """The stats of `steps` updates; of fewer, as soon as it is learned."""
    trainer, engine = bandit_trainer(
        algorithm,
        make_source=lambda source: TeacherAnnotatedBatchSource(source, teacher, tokenizer_fingerprint=FINGERPRINT),
        **settings,
    )
    history = await train_until(trainer, is_learned, at_most=steps)
    engine.close()
    return history


def mean(history, name):
    return float(np.mean([stats[name] for stats in history]))


REWARD, KL = "train/avg_total_reward", "train/teacher_kl"


@pytest.mark.slow
async def test_rewards_and_a_teacher_together_need_few_steps():
    engine = taught(x=ASCII, y=OTHERS)
    history = await distilled(make_grpo_opd(group_size=8, kl_coeff=0.5), LocalTeacher(engine), 34, earns(0.8))
    engine.close()
    assert mean(history[:3], REWARD) < 0.65
    assert mean(history[-5:], REWARD) > 0.8, "chance is one half; 0.87 was the lowest of five seeds"


async def test_a_batch_without_teacher_log_probs_is_refused_with_advice():
    trainer, engine = bandit_trainer(make_opd(), group_size=1, num_prompts=2)
    with pytest.raises(ConfigError, match="TeacherAnnotatedBatchSource"):
        await trainer.train_step()
    engine.close()
