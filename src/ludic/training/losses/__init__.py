"""Losses: from action tokens to a scalar.

Algorithms choose one; `learner/gradients.py` calls it. Start with tokens.py (what a loss sees), then clipped.py.
"""

from ludic.training.losses.base import (
    BatchNormalized,
    ForeignLoss,
    Loss,
    Needs,
    as_loss,
    selective_log_softmax,
    tokens_from_logits,
)
from ludic.training.losses.clipped import (
    CISPOLoss,
    ClippedSurrogateLoss,
    GMPOLoss,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    TokenClippedSurrogateLoss,
)
from ludic.training.losses.composite import CompositeLoss, LossTerm, RoutedLoss
from ludic.training.losses.corrections import (
    CorrectedLoss,
    Correction,
    DivergenceMask,
    NegativeSequenceMask,
    SequenceMask,
    SequenceRejection,
    SequenceTruncation,
    TokenMask,
    TokenRejection,
    TokenTruncation,
    mismatch_stats,
)
from ludic.training.losses.kl import EntropyBonus, KLEstimator, KLLoss, Regularized, TokenKLLoss
from ludic.training.losses.preferences import KTOLoss, PreferencePairLoss
from ludic.training.losses.supervised import (
    DistillationLoss,
    MaskedCausalLMCrossEntropyLoss,
    ObservationLoss,
    ValueLoss,
)
from ludic.training.losses.tokens import ActionTokens, BatchFacts, ObservedTokens, Reduction, Stats

__all__ = [
    "Loss", "Needs", "ForeignLoss", "as_loss", "ActionTokens", "BatchFacts", "Reduction", "Stats", "TokenClippedSurrogateLoss",
    "KLLoss", "TokenKLLoss", "KLEstimator", "EntropyBonus", "Regularized", "ObservationLoss", "ObservedTokens", "BatchNormalized",
    "LossTerm", "CompositeLoss", "RoutedLoss", "CorrectedLoss", "Correction", "TokenTruncation", "SequenceTruncation",
    "TokenRejection", "SequenceRejection", "TokenMask", "SequenceMask", "NegativeSequenceMask", "DivergenceMask",
    "mismatch_stats", "selective_log_softmax", "tokens_from_logits",
    "ReinforceLoss", "ReinforceBaselineLoss", "ClippedSurrogateLoss", "CISPOLoss", "SAPOLoss", "GMPOLoss",
    "MaskedCausalLMCrossEntropyLoss", "DistillationLoss", "PreferencePairLoss", "KTOLoss", "ValueLoss",
]  # fmt: skip
