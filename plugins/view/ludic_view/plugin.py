"""Declarations of this plug-in: commands that show runs. Entry points name them."""

from ludic.cli.commands import Command

VIEW = Command(
    "ludic_view.command:view",
    "Look at runs in a browser: metrics, groups, rollouts, tokens.",
    "ludic view runs/ttt",
    is_usual=True,
)
SHOW = Command(
    "ludic_view.command:show", "Show a run's rollouts in the terminal.", "ludic show runs/ttt --worst", is_usual=True
)
PLOT = Command(
    "ludic_view.plot:plot",
    "Draw the curves of runs, in the terminal or as a picture.",
    "ludic plot runs/ttt --metric train/avg_total_reward",
    is_usual=True,
)
