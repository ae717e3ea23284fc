"""Function calling with the samples of the Berkeley Function Calling Leaderboard (BFCL).

env.py is the environment, grading.py compares calls with the accepted answers, data.py reads the samples of the wheel `bfcl-eval`.
"""

from ludic_envs.adapters.bfcl.env import BFCLEnv

__all__ = ["BFCLEnv"]
