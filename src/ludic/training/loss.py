"""An older import path of the losses, which live in `losses/`."""

from ludic.training import losses
from ludic.training.losses import *  # noqa: F403 - the same names, whatever is added there

__all__ = losses.__all__
