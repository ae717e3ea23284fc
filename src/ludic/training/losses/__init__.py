"""Losses: from action tokens to a scalar, one file per idea.

Algorithms choose one; `learner/gradients.py` calls it. Start with tokens.py (what a loss sees), then clipped.py.
"""

from ludic.training.losses.base import (
    BatchNormalized,
    ForeignLoss,
    Loss,
    as_loss,
    selective_log_softmax,
    tokens_from_logits,
)
from ludic.training.losses.cispo import CISPOLoss
from ludic.training.losses.clipped import ClippedSurrogateLoss, TokenClippedSurrogateLoss
from ludic.training.losses.composite import CompositeLoss, LossTerm, RoutedLoss
from ludic.training.losses.corrections import (
    CorrectedLoss,
    Correction,
    SequenceMask,
    SequenceRejection,
    SequenceTruncation,
    TokenMask,
    TokenRejection,
    TokenTruncation,
    mismatch_stats,
)
from ludic.training.losses.distillation import DistillationLoss
from ludic.training.losses.gmpo import GMPOLoss
from ludic.training.losses.kl import EntropyBonus, KLEstimator, KLLoss, TokenKLLoss
from ludic.training.losses.reinforce import ReinforceBaselineLoss, ReinforceLoss
from ludic.training.losses.sapo import SAPOLoss
from ludic.training.losses.supervised import MaskedCausalLMCrossEntropyLoss
from ludic.training.losses.tokens import ActionTokens, BatchFacts, Reduction, Stats
from ludic.training.losses.value import ValueLoss

__all__ = [
    "Loss",
    "ForeignLoss",
    "as_loss",
    "ActionTokens",
    "BatchFacts",
    "Reduction",
    "Stats",
    "ReinforceLoss",
    "ReinforceBaselineLoss",
    "ClippedSurrogateLoss",
    "TokenClippedSurrogateLoss",
    "CISPOLoss",
    "SAPOLoss",
    "GMPOLoss",
    "MaskedCausalLMCrossEntropyLoss",
    "KLLoss",
    "TokenKLLoss",
    "KLEstimator",
    "DistillationLoss",
    "EntropyBonus",
    "BatchNormalized",
    "ValueLoss",
    "LossTerm",
    "CompositeLoss",
    "RoutedLoss",
    "CorrectedLoss",
    "Correction",
    "TokenTruncation",
    "SequenceTruncation",
    "TokenRejection",
    "SequenceRejection",
    "TokenMask",
    "SequenceMask",
    "mismatch_stats",
    "selective_log_softmax",
    "tokens_from_logits",
]
