"""Algorithms: a credit rule and a loss under one name.

The registry and `run` make them by name. Start with presets.py, the table of them; algorithm.py is what all of them return.
"""

from ludic.training.algorithms.algorithm import Preset, RLAlgorithm, settings_of, with_episode_credit
from ludic.training.algorithms.distillation import make_grpo_opd, make_mopd, make_opd
from ludic.training.algorithms.imitation import make_rft, make_sft
from ludic.training.algorithms.mixed import Objective, mix_objectives
from ludic.training.algorithms.presets import (
    make_cispo,
    make_dapo,
    make_dpo,
    make_dr_grpo,
    make_echo,
    make_fold_grpo,
    make_gdpo,
    make_gigpo,
    make_gmpo,
    make_grpo,
    make_gspo,
    make_ipo,
    make_kto,
    make_maxrl,
    make_ppo,
    make_proposer_solver,
    make_reinforce,
    make_reinforce_baseline,
    make_reinforce_pp,
    make_rloo,
    make_sapo,
    make_scalerl,
    make_spo,
    spo_algorithm,
)
from ludic.training.losses import (
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
    "RLAlgorithm", "Preset", "settings_of", "with_episode_credit", "make_grpo", "make_dr_grpo", "make_maxrl", "make_echo",
    "make_gdpo", "make_dapo", "make_gigpo", "make_gspo", "make_cispo", "make_scalerl", "make_sapo", "make_gmpo",
    "make_reinforce", "make_reinforce_baseline", "make_reinforce_pp", "make_rloo", "make_ppo", "make_spo", "spo_algorithm",
    "make_sft", "make_rft", "make_dpo", "make_ipo", "make_kto", "PreferencePairLoss", "KTOLoss", "make_opd", "make_grpo_opd",
    "make_mopd", "make_proposer_solver", "make_fold_grpo", "Objective", "mix_objectives", "CISPOLoss", "ClippedSurrogateLoss",
    "DistillationLoss", "GMPOLoss", "MaskedCausalLMCrossEntropyLoss", "ReinforceBaselineLoss", "ReinforceLoss", "SAPOLoss",
    "ValueLoss",
]  # fmt: skip
