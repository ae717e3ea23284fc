"""MuSiQue: multi-hop questions, each with a small knowledge base that the agent searches.

The registry makes it. Start with env.py.
"""

from ludic.envs.musique_search.env import MAX_K, MuSiQueSearchEnv
from ludic.envs.musique_search.grading import exact_match, normalized, token_f1
from ludic.envs.musique_search.sample import Hop, MuSiQueSample, Paragraph

__all__ = ["MuSiQueSearchEnv", "MuSiQueSample", "Paragraph", "Hop", "MAX_K", "exact_match", "token_f1", "normalized"]
