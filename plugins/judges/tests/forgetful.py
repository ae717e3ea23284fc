"""A search that merges: as a module for the tests, and as a process that is killed with SIGKILL at a given moment.

python -m plugins.judges.tests.forgetful FOLDER MOMENT NUMBER
"""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import EnvSpec, ProtocolSpec, RolloutRequest, StepOutcome
from ludic_judges.prompt_search import PromptSearch, search

RULES = {"calm": "Stay calm.", "shout": "Write capitals.", "count": "Write digits."}
START = "Stay calm. Answer."
BUDGET = 36


class Task(SingleAgentEnv):
    """Wants the reply that the rule of its kind leads to, and says so."""

    blocking = False

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def env_reset(self, *, seed=None):
        return self.kind, {}

    def env_step(self, action):
        told = {"feedback": f"A rule for {self.kind} is missing."}
        return StepOutcome("", float(action == "right"), terminated=True, info=told)


def follows_instructions(request):
    text = ByteTemplate().decode(request.prompt_token_ids)
    kind = re.search(r"<user>(\w+)", text)[1]
    return "right" if RULES[next(k for k in RULES if kind.startswith(k))] in text else "wrong"


def engine(reply=follows_instructions, env=Task):
    def protocol(system_prompt="", hint=""):
        said = f"{system_prompt} {hint}".strip()
        agent = Agent(
            client=ScriptedClient(reply), model="m", ctx=FullDialog(system_prompt=said or None), parser=raw_parser,
            chat_template=ByteTemplate(),
        )  # fmt: skip
        return SingleAgentProtocol(agent)

    return RolloutEngine(env_registry={"task": env}, protocol_registry={"play": protocol}, max_failed_share=1.0)


def tasks(*kinds):
    return [RolloutRequest(env=EnvSpec("task", {"kind": kind}), protocol=ProtocolSpec("play")) for kind in kinds]


class Forgetful:
    """Adds the rule of the first rollout that earned nothing, and forgets to stay calm: siblings are good at different tasks."""

    async def propose(self, prompt, rollouts):
        kinds = [r.steps[0].prompt_messages[-1]["content"] for r in rollouts if r.total_reward == 0]
        return f"{prompt.replace(RULES['calm'], '').strip()} {RULES[kinds[0]]}" if kinds else prompt


KINDS = ("calm", "shout", "count", "shout", "count", "calm")


def make(folder=None, reflector=None, reply=follows_instructions, kinds=KINDS, **settings):
    given = {"start": START, "shown": 1, "max_merges": 3, "seed": 0} | settings
    return PromptSearch(engine(reply), tasks(*kinds), reflector or Forgetful(), folder=folder, **given)


def killed_at(moment, number):
    """Settings of a search that kills its process at the n-th reflection, reply, or write of the state."""
    count = 0

    def once(result):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    class Dies(Forgetful):
        async def propose(self, prompt, rollouts):
            return once(await super().propose(prompt, rollouts))

    if moment == "reflection":
        return {"reflector": Dies()}
    if moment == "reply":
        return {"reply": lambda request: once(follows_instructions(request))}
    write = search.write_json  # between the rollouts of a candidate and the state that names it
    search.write_json = lambda *arguments: write(*once(arguments))
    return {}


if __name__ == "__main__":
    asyncio.run(make(Path(sys.argv[1]), **killed_at(sys.argv[2], int(sys.argv[3]))).search(BUDGET))
