"""An actor: plays games with the newest weights it can get, and pushes every group of them to Redis.

Shows: an engine that follows the trainer's weights while it plays, pacing, a clean end.
Needs: Redis (see README.md), run_trainer.py beside it with the same flags. Start as many as you like, in any order.
Takes: until it is stopped (Ctrl-C).

    python examples/pipeline_rl/run_actor.py
"""

import logging

from shared import settings

from ludic.cli.script import run_script
from ludic.run.given import env_factory
from ludic_pipeline.launch.actor import run_actor


def main(args: list[str]) -> int:
    """`run_actor` puts together what `ludic.batch_gen.pipeline.run_pipeline_actor` needs."""
    _, config = settings(__doc__, args)
    code = run_actor(config, env_factory("tic_tac_toe"), index=0)
    return 0 if code > 128 else code  # a signal is how an actor is meant to end


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    run_script(main)
