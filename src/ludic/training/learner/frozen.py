"""Frozen models that a loss compares the policy with: a reference (log-probs) and a teacher (whole distributions)."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.fsdp import is_sharded
from ludic.models.head import plain_model
from ludic.models.kinds import image_processor_of
from ludic.models.loading import LoadedModel
from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.learner.packing import PackedBatch
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import ConfigError


class Reference:
    """A frozen policy to stay close to: another model, or the base under a policy's adapter, which takes no memory."""

    def __init__(self, policy: TrainedPolicy, *, adapter_off: bool = False) -> None:
        self._policy, self._adapter_off = policy, adapter_off

    @torch.no_grad()
    def logps(self, batch: PackedBatch) -> Tensor:
        without_adapter = self._policy.model.disable_adapter() if self._adapter_off else contextlib.nullcontext()
        with without_adapter, self._policy.own_routing():
            return self._policy.logps(batch)[0]


def make_reference(
    given: Any, algo: RLAlgorithm, policy: TrainedPolicy, cfg: TrainerConfig, *, tokenizer: Any = None
) -> Reference | None:
    """The reference that the algorithm asks for, if it does: the `given` model, or the one under the policy's adapter."""
    if not algo.loss.needs.reference:
        return None
    if given is not None:
        return Reference(_frozen(given, policy, cfg, tokenizer))
    if plain_model(policy.model) is not policy.model:
        return Reference(policy, adapter_off=True)
    raise ConfigError(
        f"{algo.name} compares with a frozen reference; give Trainer(reference=model), or train a LoRA adapter, whose "
        "base model is the reference."
    )


def make_teacher(
    teacher: LoadedModel | None,
    algo: RLAlgorithm,
    policy: TrainedPolicy,
    cfg: TrainerConfig,
    *,
    tokenizer: Any,
    is_spread: bool,
) -> TrainedPolicy | None:
    """The teacher, ready to be compared with the policy; None if the algorithm asks for none."""
    if algo.loss.needs.teacher_kl is None:
        if teacher is not None:
            raise ConfigError(
                f"Trainer(teacher=…) was given, but {algo.name} does not compare distributions, so it would not be used. Use "
                'make_opd(kl="reverse"), or let a TeacherAnnotatedBatchSource score the samples.'
            )
        return None
    if teacher is None:
        raise ConfigError(
            f"{algo.name} compares the policy with a teacher in this process; give Trainer(teacher=LoadedModel(model, tokenizer, "
            'name)). For one behind a server use make_opd(kl="sampled").'
        )
    if is_spread:
        raise ConfigError(
            f"{algo.name} compares whole distributions, which is not supported for a model spread over ranks. Use "
            'make_opd(kl="sampled"), whose teacher scores samples before they are trained on.'
        )
    if teacher.model is policy.model:
        raise ConfigError(
            "Trainer(teacher=…) is the model that is trained: freezing it would end training, and its KL to itself is 0. Give a "
            "copy: copy.deepcopy(model)."
        )
    _require_same_vocabulary(teacher, tokenizer)
    made = _frozen(teacher.model, policy, cfg, tokenizer)
    if made.head.shape[0] != policy.head.shape[0]:
        raise ConfigError(
            f"The teacher {teacher.name} has {made.head.shape[0]} tokens and the student {policy.head.shape[0]}; take a teacher of "
            "the student's family."
        )
    return made


def _frozen(model: Any, policy: TrainedPolicy, cfg: TrainerConfig, tokenizer: Any) -> TrainedPolicy:
    placed = model if is_sharded(model) else model.to(policy.device)
    return TrainedPolicy(
        placed.eval().requires_grad_(False),
        packed=cfg.packed,
        mixed_precision_dtype=cfg.mixed_precision_dtype,
        images=image_processor_of(tokenizer),
    )


def _require_same_vocabulary(teacher: LoadedModel, tokenizer: Any) -> None:
    if tokenizer is None or teacher.tokenizer is None:
        missing = (
            "student's: Trainer(tokenizer=…)" if tokenizer is None else "teacher's: LoadedModel(…, tokenizer, name)"
        )
        raise ConfigError(f"Two models are compared token by token, so both tokenizers are needed. Give the {missing}.")
    if dict(teacher.tokenizer.get_vocab()) != dict(tokenizer.get_vocab()):
        raise ConfigError(
            f"The teacher {teacher.name} has another tokenizer than the student: the same ids mean other texts. Take a teacher of "
            "the student's family."
        )
