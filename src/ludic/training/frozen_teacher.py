"""A teacher in the trainer's process, for losses that compare whole distributions (`DistillationLoss`)."""

from typing import Any

from ludic.models.loading import LoadedModel
from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import ConfigError


def frozen_teacher(
    teacher: LoadedModel | None,
    algo: RLAlgorithm,
    policy: TrainedPolicy,
    cfg: TrainerConfig,
    *,
    tokenizer: Any,
    is_spread: bool,
) -> TrainedPolicy | None:
    """The teacher, ready to be compared with the policy; None where the algorithm wants none."""
    if algo.loss.needs.teacher_kl is None:
        if teacher is not None:
            raise ConfigError(
                f"Trainer(teacher=…) was given, but {algo.name} does not compare distributions: it would never be asked. Use "
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
            f"{algo.name} compares whole distributions, which is not there for a model whose weights are spread over ranks. Use "
            'make_opd(kl="sampled"), whose teacher scores samples before they are trained on.'
        )
    if teacher.model is policy.model:
        raise ConfigError(
            "Trainer(teacher=…) is the model that is trained: freezing it would end training, and its KL to itself is 0. Give a "
            "copy: copy.deepcopy(model)."
        )
    _require_same_vocabulary(teacher, tokenizer)
    frozen = teacher.model.to(policy.device).eval().requires_grad_(False)
    made = TrainedPolicy(frozen, packed=cfg.packed, mixed_precision_dtype=cfg.mixed_precision_dtype)
    if made.head.shape[0] != policy.head.shape[0]:
        raise ConfigError(
            f"The teacher {teacher.name} chooses among {made.head.shape[0]} tokens and the student among {policy.head.shape[0]}; "
            "take a teacher of the student's family."
        )
    return made


def _require_same_vocabulary(teacher: LoadedModel, tokenizer: Any) -> None:
    if tokenizer is None or teacher.tokenizer is None:
        whose = (
            "student's: Trainer(tokenizer=…)" if tokenizer is None else "teacher's: LoadedModel(model, tokenizer, name)"
        )
        raise ConfigError(
            f"To compare two models token by token, their tokenizers must be known. Missing is the {whose}."
        )
    if dict(teacher.tokenizer.get_vocab()) != dict(tokenizer.get_vocab()):
        raise ConfigError(
            f"The teacher {teacher.name} has another tokenizer than the student: the same ids mean other texts. Take a teacher of "
            "the student's family."
        )
