"""Rewards by the judgement of a model; the code is in the plug-in `ludic_judges`."""

from typing import TYPE_CHECKING

from ludic.plugins import forward

if TYPE_CHECKING:
    from ludic_judges import *  # noqa: F403

__getattr__ = forward(__name__, "ludic_judges")
