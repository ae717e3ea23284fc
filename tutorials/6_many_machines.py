# # Many machines
#
# Actors play, a learner trains, Redis carries the samples. `ludic launch` starts all on one machine, with redis-server (`apt install redis-server`).

# %%
import os
import subprocess
import sys
from pathlib import Path

STEPS = os.environ.get("STEPS", "100")
Path("rps.py").write_text('''"""Rock, paper, scissors against an opponent who shows first."""

import random

from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome

BEATEN_BY = {"rock": "p", "paper": "s", "scissors": "r"}


class RockPaperScissors(SingleAgentEnv):
    def env_reset(self, *, seed=None):
        self.hand = random.Random(seed).choice(list(BEATEN_BY))
        return self.hand, {}

    def env_step(self, action):
        return StepOutcome("", reward=float(action == BEATEN_BY[self.hand]), terminated=True)
''')
ludic = [sys.executable, "-m", "ludic.cli.main"]
flags = "--model tiny --max-tokens 1 --group-size 16 --rollouts-per-update 64 --lr 3e-3 --actors 2 --name many"
command = [*ludic, "launch", "rps.py:RockPaperScissors", *flags.split(), "--steps", STEPS]
done = subprocess.run(command, capture_output=True, text=True)
said = [line.removeprefix("learner | ") for line in done.stdout.splitlines()]
print("\n".join(line for line in said if line.startswith(("Done", "Reward", "Samples"))))
assert done.returncode == 0, done.stderr

# %% [markdown]
# Every sample is in the last line. A process that is killed (`kill -9`) is started again; the learner resumes exactly.
#
# On several machines: `ludic actor FILE --redis redis://HOST` where episodes are played, `ludic train FILE --redis …` where the learner runs. Scripts for Slurm, Kubernetes and Ray: [pipelines](../pipeline.md).
