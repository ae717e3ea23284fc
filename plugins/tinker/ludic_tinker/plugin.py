"""Declarations of this plug-in: a command that serves Tinker's protocol. Entry points name them."""

from ludic.cli.commands import Command

TINKER_SERVER = Command(
    "ludic_tinker.command:serve_tinker",
    "Serve LoRA training and sampling to clients of Tinker's SDK.",
    "ludic tinker-server --model tiny",
)
