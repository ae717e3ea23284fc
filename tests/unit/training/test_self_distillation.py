"""Self-distillation with a real model and trainer: a model learns answers that only its frozen copy gets as hints."""

import copy

import numpy as np
import pytest
import torch

from ludic.batch_gen import PrivilegedTeacher, RolloutBatchSource, TeacherAnnotatedBatchSource, hint_first
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate, LocalTeacher, tokenizer_fingerprint
from ludic.inference.local import LocalEngine
from ludic.training import RolloutEngine, Trainer, TrainerConfig, make_opd
from ludic.types import (
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    StepOutcome,
)
from tests.unit.training.bandit import bandit_protocol, tiny_llama
from tests.unit.training.test_teaching import KL, REWARD, Vocabulary, mean

TEMPLATE = ByteTemplate()
LETTERS = "ABCDEFGH"
GOLD = {"w": "C", "x": "A", "y": "H", "z": "F"}
"""What the model is to know without being told."""


class Quiz(SingleAgentEnv):
    blocking = False

    def __init__(self, question):
        super().__init__()
        self.question = question

    @property
    def suggested_sysprompt(self):
        return None

    def env_reset(self, *, seed=None):
        return self.question, {}

    def env_step(self, action):
        return StepOutcome("", float(action == GOLD[self.question]), terminated=True)


def asked(question, hint=None):
    told = [] if hint is None else [{"role": "system", "content": hint}]
    return TEMPLATE.apply([*told, {"role": "user", "content": question}]).prompt_token_ids


def hint_follower():
    """Answers with the letter of the hint; without one, with any of the eight."""
    model = tiny_llama(seed=2)
    rng = np.random.default_rng(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plain = torch.tensor(np.stack([asked(question) for question in GOLD]), dtype=torch.long)
    anything = torch.zeros(len(GOLD), 264)
    anything[:, [ord(letter) for letter in LETTERS]] = 1 / len(LETTERS)
    for _ in range(100):
        drawn = [(question, LETTERS[rng.integers(8)]) for question in rng.choice(list(GOLD), size=32)]
        hinted = torch.tensor(np.stack([asked(q, letter) for q, letter in drawn]), dtype=torch.long)
        answers = torch.tensor([ord(letter) for _, letter in drawn])
        follows = torch.nn.functional.cross_entropy(model(hinted).logits[:, -1], answers)
        guesses = torch.nn.functional.cross_entropy(model(plain).logits[:, -1], anything)
        optimizer.zero_grad()
        (follows + guesses).backward()
        optimizer.step()
    return model


def requests():
    inference = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=1), return_=ReturnSpec.for_rl())
    return [
        RolloutRequest(
            env=EnvSpec("quiz", {"question": question}),
            protocol=ProtocolSpec("single"),
            inference=inference,
            num_episodes=12,
            meta={"hint": answer},
        )
        for question, answer in GOLD.items()
    ]


@torch.no_grad()
def accuracy(model, *, hinted):
    """Probability of the right answers, on average."""
    prompts = [asked(q, answer if hinted else None) for q, answer in GOLD.items()]
    logits = model(torch.tensor(np.stack(prompts), dtype=torch.long)).logits[:, -1]
    return torch.softmax(logits, -1)[range(len(GOLD)), [ord(a) for a in GOLD.values()]].mean().item()


@pytest.mark.extended(covered_by="tests/examples/test_opd_example.py::test_a_model_comes_nearer_to_itself_with_a_hint")
@pytest.mark.slow
async def test_a_model_learns_hints_that_only_its_frozen_copy_sees():
    model = hint_follower()
    assert accuracy(model, hinted=True) > 0.95 and accuracy(model, hinted=False) == pytest.approx(1 / 8, abs=0.03)
    engine = LocalEngine(model, Vocabulary(), max_model_len=64, kv_tokens=8192)
    frozen = LocalEngine(copy.deepcopy(model).requires_grad_(False), Vocabulary(), max_model_len=64, kv_tokens=1024)
    teacher = PrivilegedTeacher(LocalTeacher(frozen), hint_first(TEMPLATE))
    algorithm = make_opd()
    rollouts = RolloutBatchSource(
        RolloutEngine(env_registry={"quiz": Quiz}, protocol_registry={"single": lambda: bandit_protocol(engine)}),
        requests_fn=requests,
        algorithm=algorithm,
        max_steps=1,
        concurrency=64,
    )
    trainer = Trainer(
        model=model,
        algo=algorithm,
        batch_source=TeacherAnnotatedBatchSource(
            rollouts, teacher, tokenizer_fingerprint=tokenizer_fingerprint(Vocabulary())
        ),
        cfg=TrainerConfig(lr=3e-3, max_seq_len=64, weight_decay=0.0),
        publisher=SharedWeightsPublisher(engine),
    )
    history = [await trainer.train_step() for _ in range(40)]
    engine.close()
    frozen.close()
    assert accuracy(model, hinted=False) > 0.85
    assert mean(history[:3], REWARD) < 0.3 < 0.8 < mean(history[-3:], REWARD)
    assert mean(history[-3:], KL) < 0.25 * mean(history[:3], KL)
