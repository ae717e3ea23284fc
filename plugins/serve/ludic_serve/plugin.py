"""Declarations of this plug-in: commands that serve a model. Entry points name them."""

from ludic.cli.commands import Command

SERVE = Command(
    "ludic_serve.command:serve",
    "Serve a model over HTTP, in the way of OpenAI's API.",
    "ludic serve --model smollm2-135m --port 8000",
    is_usual=True,
)
GATEWAY = Command(
    "ludic_serve.gateway.command:gateway",
    "Serve a model to agents and record their sessions.",
    "ludic gateway --model tiny --save sessions.jsonl",
    is_usual=True,
)
