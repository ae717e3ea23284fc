"""Settings that the actor and the trainer of this folder share: the game, the algorithm, and where they meet."""

from pathlib import Path

from ludic.cli.script import ScriptFlags, parse_script
from ludic.run import RunConfig

TINY = Path(__file__).parents[1] / "tic_tac_toe" / "tiny" / "config.json"


def settings(description: str | None, args: list[str]) -> tuple[ScriptFlags, RunConfig]:
    """The same settings for both programs; give both the same flags.

    The algorithm is CISPO: what an actor sends is a few updates old, and CISPO is made for that. Every token counts with the
    ratio of the trained policy to the one that sampled it, cut off at 1.2: truncated importance sampling. The ratio is right for
    each token of a sample that several versions had a part in, since each comes with the log-probability under its own. GRPO's
    clip would take the gradient away from just those tokens that the last updates have moved, which are the ones that matter.
    And its credit needs the group only, which is all that an actor sees; rules that look at a whole batch (ScaleRL's) do not
    work here.
    """
    return parse_script(
        description, args, name="pipeline_rl", engine="pipeline", redis="redis://localhost:6379/0", model=str(TINY),
        set={"view": "compact"}, max_tokens=3, max_seq_len=128, algo="cispo", group_size=8, rollouts_per_update=128,
        max_lag=2,  # a group is trained on at most so many updates after its first token was sampled
        steps=60, lr=1e-3, weight_decay=0.0, dtype="float32", checkpoint_every=10, logger=("print",), seed=1,
    )  # fmt: skip
