"""A plug-in for Ludic in one file: an environment and a command, found through the entry points in pyproject.toml."""

import random
import sys

from ludic.catalog import Entry, Suggested
from ludic.cli.commands import Command
from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class Dice(SingleAgentEnv):
    """Say which of two dice shows more: l, r, or e if they are equal."""

    def env_reset(self, *, seed=None):
        dice = random.Random(seed)
        self.left, self.right = dice.randint(1, 6), dice.randint(1, 6)
        return f"{self.left} {self.right}", {}

    def env_step(self, action):
        right = action.strip() == self.reference_answer("agent_0")
        return StepOutcome("", reward=float(right), terminated=True)

    def legal_actions(self, agent_id):
        return ["l", "r", "e"]

    def reference_answer(self, agent_id):
        return "l" if self.left > self.right else "r" if self.left < self.right else "e"


DICE = Entry("dice_for_ludic:Dice", suggested=Suggested(max_steps=1, max_tokens=1))
ROLL = Command("dice_for_ludic:roll", "Roll two dice.", "ludic roll 7")


def roll(args: list[str]) -> int:
    env = Dice()
    env.env_reset(seed=int(args[0]) if args else None)
    sys.stdout.write(f"{env.left} {env.right}\n")
    return 0
