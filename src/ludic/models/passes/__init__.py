"""Forward passes of a model in training, and which one a model gets.

Those of plug-ins (entry-point group `ludic.passes`) are asked first, then the core's, which end with the one that suits every
module and is slowest. Start with base.py.
"""

from typing import Any

from ludic import plugins
from ludic.models.attention import say_once
from ludic.models.head import plain_model
from ludic.models.kinds import is_vision_model, part
from ludic.models.passes.base import ForwardPass, ModulesPass, Outputs, PackedPass, PassNeeds
from ludic.types import MissingExtra

__all__ = ["ForwardPass", "ModulesPass", "Outputs", "PackedPass", "PassNeeds", "choose"]


def choose(model: Any, needs: PassNeeds) -> ForwardPass:
    """The first pass that suits the model, ready to compute."""
    reason = None
    kinds: list[type[ForwardPass]] = [*_installed(), PackedPass]
    for kind in kinds:
        if kind.is_for(model, needs):
            found = kind(model, needs)
            if (reason := found.suits()) is None:
                found.prepare()
                return found
    inner = plain_model(model)
    if is_vision_model(inner):
        part("vision")  # its pass is in the same plug-in, which this names
    if reason is not None:
        name = type(inner).__name__
        say_once(f"{name} is trained on padded samples instead of packed ones, which is slower: {reason}.")
    last = ModulesPass(model, needs)
    last.prepare()
    return last


def _installed() -> list[type[ForwardPass]]:
    found: list[type[ForwardPass]] = []
    for point in plugins.points("passes"):
        try:
            found.append(point.load())
        except MissingExtra:
            continue  # a model that needs it is told so where it is recognised (`ludic.models.kinds.part`)
    return found
