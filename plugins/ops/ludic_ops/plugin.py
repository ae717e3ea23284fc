"""Declarations of this plug-in: commands about machines. Entry points name them."""

from ludic.cli.commands import Command

PLAN = Command("ludic_ops.plan:plan", "Say what fits on how many GPUs.", "ludic plan 7b --gpus 8")
DOCTOR = Command(
    "ludic_ops.doctor:doctor",
    "Check what works on this machine, and how to repair the rest.",
    "ludic doctor --json",
    is_usual=True,
)
