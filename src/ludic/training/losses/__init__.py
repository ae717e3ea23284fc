"""Losses: from action tokens to a scalar. Those of a single algorithm are in its file, under `algorithms/`, and found here too.

Algorithms choose one; `learner/gradients.py` calls it. Start with tokens.py (what a loss sees), then clipped.py.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ludic.training.losses.base import (
    BatchNormalized,
    ForeignLoss,
    Loss,
    Needs,
    as_loss,
    selective_log_softmax,
    tokens_from_logits,
)
from ludic.training.losses.clipped import TokenClippedSurrogateLoss
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
from ludic.training.losses.observations import ObservationLoss
from ludic.training.losses.tokens import ActionTokens, BatchFacts, ObservedTokens, Reduction, Stats

if TYPE_CHECKING:
    from ludic.training.algorithms import (
        CISPOLoss,
        ClippedSurrogateLoss,
        DistillationLoss,
        GMPOLoss,
        KTOLoss,
        MaskedCausalLMCrossEntropyLoss,
        PreferencePairLoss,
        ReinforceBaselineLoss,
        ReinforceLoss,
        SAPOLoss,
        ValueLoss,
    )

__all__ = [
    "Loss", "Needs", "ForeignLoss", "as_loss", "ActionTokens", "BatchFacts", "Reduction", "Stats", "TokenClippedSurrogateLoss",
    "KLLoss", "TokenKLLoss", "KLEstimator", "EntropyBonus", "Regularized", "ObservationLoss", "ObservedTokens", "BatchNormalized",
    "LossTerm", "CompositeLoss", "RoutedLoss", "CorrectedLoss", "Correction", "TokenTruncation", "SequenceTruncation",
    "TokenRejection", "SequenceRejection", "TokenMask", "SequenceMask", "NegativeSequenceMask", "DivergenceMask",
    "mismatch_stats", "selective_log_softmax", "tokens_from_logits",
    "ReinforceLoss", "ReinforceBaselineLoss", "ClippedSurrogateLoss", "CISPOLoss", "SAPOLoss", "GMPOLoss",
    "MaskedCausalLMCrossEntropyLoss", "DistillationLoss", "PreferencePairLoss", "KTOLoss", "ValueLoss",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ludic.training.algorithms"), name)
