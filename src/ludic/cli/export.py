"""`ludic export`: a sharded checkpoint as a folder that everything reads. See docs/checkpoints.md."""

from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.run_command import need_extras


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run folder for its newest.")],
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="Also what a run of one process needs to go on from it.")
    ] = False,
) -> None:
    """Write a checkpoint of several ranks in the format of Hugging Face."""
    need_extras("train", "ludic export")
    # Here and not above: torch takes seconds to load, and `ludic --help` should not.
    from ludic.cli.run_model import checkpoint_in
    from ludic.training.export import export_checkpoint

    print(export_checkpoint(checkpoint_in(checkpoint) or checkpoint, target, with_optimizer=with_optimizer))
