"""Tic-tac-toe: against a built-in opponent (TicTacToeEnv), or two agents against each other (TicTacToeDuel).

The registry makes both. Start with env.py; board.py holds the rules.
"""

from ludic.envs.tic_tac_toe.env import TicTacToeDuel, TicTacToeEnv

__all__ = ["TicTacToeEnv", "TicTacToeDuel"]
