"""Declarations of this plug-in: commands that score, and search for prompts. Entry points name them."""

from ludic.cli.commands import Command

OPTIMIZE_PROMPT = Command(
    "ludic_judges.prompt_search.command:optimize_prompt",
    "Search for a better system prompt; no weights are changed.",
    "ludic optimize-prompt tic_tac_toe --model smollm2-135m --dry-run",
)
RESCORE = Command(
    "ludic_judges.command:rescore_run",
    "Score saved rollouts with another reward or judge.",
    "ludic rescore runs/ttt --reward length",
)
