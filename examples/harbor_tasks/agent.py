"""An outside agent for Harbor tasks, in plain Python: it asks the model for a command and runs it with the env's shell tool.

    ludic eval harbor --set task=examples/harbor_tasks --agent examples/harbor_tasks/agent.py:solve --model smollm2-135m
    ludic eval harbor --set task=examples/harbor_tasks --agent-command 'python3 examples/harbor_tasks/agent.py' --model smollm2-135m

Shows: an agent outside of Ludic that uses the tools of an env, as a function and as a command in a sandbox.
Needs: a model; bubblewrap.
Takes: seconds for `--model tiny`.
"""

import json
import os
import re
import sys
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

MAX_TURNS = 6
HOW = (
    "You solve a task in a Linux workspace. Reply with one bash command in a code block:\n```bash\nls\n```\n"
    "You see what it writes. When the task is solved, reply without a code block."
)
COMMAND = re.compile(r"```(?:bash|sh)?\n(.*?)```", re.DOTALL)


def solve(task: str, *, base_url: str, api_key: str, model: str, tools_url: str) -> str:
    """Play one episode; the answer ends it."""
    messages = [{"role": "system", "content": HOW}, {"role": "user", "content": task}]
    text = ""
    for _ in range(MAX_TURNS):
        reply = post(f"{base_url}/chat/completions", api_key, {"model": model, "messages": messages})
        text = reply["choices"][0]["message"]["content"] or ""
        command = COMMAND.search(text)
        if command is None:
            break
        shown = post(f"{tools_url}/shell", api_key, {"command": command[1]})
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown["content"]}]
    return text


def post(url: str, api_key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = Request(url, data=json.dumps(body).encode(), headers=headers)
    with build_opener(ProxyHandler({})).open(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


if __name__ == "__main__":
    given = os.environ
    answer = solve(
        given["LUDIC_TASK"],
        base_url=given["OPENAI_BASE_URL"],
        api_key=given["OPENAI_API_KEY"],
        model=given["OPENAI_MODEL"],
        tools_url=given["LUDIC_TOOLS_URL"],
    )
    sys.stdout.write(answer)
