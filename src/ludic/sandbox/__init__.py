"""Sandboxes for untrusted programs; the code is in the plug-in `ludic_sandbox`."""

from typing import TYPE_CHECKING

from ludic.plugins import forward

if TYPE_CHECKING:
    from ludic_sandbox import *  # noqa: F403

__getattr__ = forward(__name__, "ludic_sandbox")
