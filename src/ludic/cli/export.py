"""`ludic export`: a checkpoint of a run as a folder that transformers, vLLM or peft load elsewhere. See docs/checkpoints.md.

This file reads what was typed; the work is in run_export.py, whose imports take seconds.
"""

from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.run_command import need_extras


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint of the run; without it, the newest.")] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", help="Of a LoRA run: the adapter alone, for peft. Without it, base and adapter merged."
        ),
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            help="What the adapter was trained on, where no run folder says it: a folder, a hub id, a .gguf file."
        ),
    ] = None,
    with_optimizer: Annotated[
        bool,
        typer.Option(
            "--with-optimizer", help="Also what a run of one process needs to go on from it; an adapter stays one."
        ),
    ] = False,
) -> None:
    """Write a trained model in the format of Hugging Face."""
    need_extras("train", "ludic export")
    # Here and not above: torch takes seconds to load, and `ludic --help` should not.
    from ludic.run.export import Asked, export_run

    asked = Asked(
        run=run, target=target, step=step, adapter=adapter or with_optimizer, base=base, with_optimizer=with_optimizer
    )
    for line in export_run(asked):
        print(line)
