"""Algorithms: a credit rule and a loss each, one short file per idea. A loss of a single algorithm is in its file.

The registry and `run` make them by name. Start with grpo.py; algorithm.py is what all of them return.
"""

from ludic.training.algorithms.algorithm import RLAlgorithm, with_episode_credit
from ludic.training.algorithms.cispo import CISPOLoss, make_cispo, make_scalerl
from ludic.training.algorithms.gmpo import GMPOLoss, make_gmpo
from ludic.training.algorithms.grpo import (
    make_dapo,
    make_dr_grpo,
    make_echo,
    make_fold_grpo,
    make_gdpo,
    make_gigpo,
    make_grpo,
    make_maxrl,
    make_proposer_solver,
)
from ludic.training.algorithms.gspo import ClippedSurrogateLoss, make_gspo
from ludic.training.algorithms.imitation import MaskedCausalLMCrossEntropyLoss, make_rft, make_sft
from ludic.training.algorithms.mixed import Objective, mix_objectives
from ludic.training.algorithms.opd import DistillationLoss, make_grpo_opd, make_mopd, make_opd
from ludic.training.algorithms.ppo import ValueLoss, make_ppo
from ludic.training.algorithms.preferences import KTOLoss, PreferencePairLoss, make_dpo, make_ipo, make_kto
from ludic.training.algorithms.reinforce import (
    ReinforceBaselineLoss,
    ReinforceLoss,
    make_reinforce,
    make_reinforce_baseline,
    make_reinforce_pp,
    make_rloo,
)
from ludic.training.algorithms.sapo import SAPOLoss, make_sapo
from ludic.training.algorithms.spo import make_spo, spo_algorithm

__all__ = [
    "RLAlgorithm", "with_episode_credit", "make_grpo", "make_dr_grpo", "make_maxrl", "make_echo", "make_gdpo", "make_dapo",
    "make_gigpo", "make_gspo", "make_cispo", "make_scalerl", "make_sapo", "make_gmpo", "make_reinforce", "make_reinforce_baseline",
    "make_reinforce_pp", "make_rloo", "make_ppo", "make_spo", "spo_algorithm", "make_sft", "make_rft", "make_dpo", "make_ipo",
    "make_kto", "PreferencePairLoss", "KTOLoss", "make_opd", "make_grpo_opd", "make_mopd", "make_proposer_solver",
    "make_fold_grpo", "Objective", "mix_objectives", "CISPOLoss", "ClippedSurrogateLoss", "DistillationLoss", "GMPOLoss",
    "MaskedCausalLMCrossEntropyLoss", "ReinforceBaselineLoss", "ReinforceLoss", "SAPOLoss", "ValueLoss",
]  # fmt: skip
