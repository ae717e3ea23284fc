"""The gateway to a model for unchanged agents; the code is in the plug-in `ludic_serve`."""

from typing import TYPE_CHECKING

from ludic.plugins import forward

if TYPE_CHECKING:
    from ludic_serve.gateway import *  # noqa: F403

__getattr__ = forward(__name__, "ludic_serve.gateway")
