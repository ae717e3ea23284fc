"""The trainer of a pipeline: takes groups from Redis, learns from them, publishes its weights, accounts for every item.

Shows: a run whose samples come from a queue (engine = "pipeline"), an off-policy algorithm, resuming.
Needs: Redis (see README.md), run_actor.py beside it, here or on other machines.
Takes: three minutes for 60 updates of the tiny model with one actor, on two CPU cores that others used too.

    python examples/pipeline_rl/run_trainer.py
    python examples/pipeline_rl/run_trainer.py --resume --steps 120
"""

import logging

from shared import settings

from ludic.cli.script import run_script, train_script
from ludic.run import build


def main(args: list[str]) -> int:
    flags, config = settings(__doc__, args)
    return train_script(build(config, env="tic_tac_toe"), flags)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    run_script(main)
