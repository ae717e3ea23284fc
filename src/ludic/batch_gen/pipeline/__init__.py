"""Actors and learners with a queue between them; the code is in the plug-in `ludic_pipeline`."""

from typing import TYPE_CHECKING

from ludic.plugins import forward

if TYPE_CHECKING:
    from ludic_pipeline.queue import *  # noqa: F403

__getattr__ = forward(__name__, "ludic_pipeline.queue")
