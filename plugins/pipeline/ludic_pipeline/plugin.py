"""Declarations of this plug-in: the commands of a run on many processes. Entry points name them."""

from ludic.cli.commands import Command

LAUNCH = Command(
    "ludic_pipeline.launch.command:launch",
    "Train with actors and a learner in separate processes.",
    "ludic launch tic_tac_toe --model smollm2-135m --actors 2",
)
ACTOR = Command(
    "ludic_pipeline.launch.command:actor", "Play for the learner of a pipeline.", "ludic actor runs/ttt --actor-index 1"
)
