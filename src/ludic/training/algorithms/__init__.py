"""Algorithms: a credit rule and a loss each, one short file per idea.

The registry and `run` make them by name. Start with grpo.py; algorithm.py is what all of them return.
"""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.cispo import make_cispo, make_scalerl
from ludic.training.algorithms.gigpo import make_gigpo
from ludic.training.algorithms.gmpo import make_gmpo
from ludic.training.algorithms.grpo import make_dapo, make_dr_grpo, make_grpo
from ludic.training.algorithms.gspo import make_gspo
from ludic.training.algorithms.imitation import make_rft, make_sft
from ludic.training.algorithms.mixed import Objective, mix_objectives
from ludic.training.algorithms.opd import make_grpo_opd, make_mopd, make_opd
from ludic.training.algorithms.ppo import make_ppo
from ludic.training.algorithms.reinforce import make_reinforce, make_reinforce_baseline, make_reinforce_pp, make_rloo
from ludic.training.algorithms.sapo import make_sapo
from ludic.training.algorithms.spo import make_spo, spo_algorithm

__all__ = [
    "RLAlgorithm",
    "make_grpo",
    "make_dr_grpo",
    "make_dapo",
    "make_gspo",
    "make_cispo",
    "make_sapo",
    "make_gmpo",
    "make_gigpo",
    "make_rloo",
    "make_reinforce",
    "make_reinforce_baseline",
    "make_reinforce_pp",
    "make_ppo",
    "make_scalerl",
    "make_sft",
    "make_rft",
    "Objective",
    "mix_objectives",
    "make_opd",
    "make_grpo_opd",
    "make_mopd",
    "make_spo",
    "spo_algorithm",
]
