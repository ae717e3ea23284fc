"""Which forward pass a model gets, and what special kinds of models say where their plug-in is missing."""

import logging

import pytest
import torch

from ludic import plugins
from ludic.models import attention, kinds
from ludic.models.passes import ModulesPass, PackedPass, PassNeeds, choose
from ludic.types.errors import MissingPlugin
from tests.tiny_families import family_model

NEEDS = PassNeeds(device=torch.device("cpu"))


@pytest.fixture
def alone(monkeypatch):
    """The core without plug-ins."""
    monkeypatch.setattr(plugins, "points", lambda group: [])
    monkeypatch.setattr(attention, "_said", set())
    kinds.part.cache_clear()
    yield
    kinds.part.cache_clear()


class OfSomeone(PackedPass):
    """A pass of someone's package."""

    def suits(self):
        return None if self.needs.fused else "it is not asked for"


def test_a_pass_of_a_plug_in_comes_before_those_of_the_core(monkeypatch):
    point = plugins.Point("ludic.passes", "mine", "somewhere:OfSomeone", "someones")
    monkeypatch.setattr(plugins.Point, "load", lambda self: OfSomeone)
    monkeypatch.setattr(plugins, "points", lambda group: [point] if group == "passes" else [])
    model = family_model("llama")
    assert type(choose(model, NEEDS)) is OfSomeone
    assert type(choose(model, PassNeeds(device=NEEDS.device, fused=False))) is PackedPass
    assert type(choose(model, PassNeeds(device=NEEDS.device, packed=False))) is ModulesPass


def test_a_hybrid_is_trained_on_padded_samples_where_its_plug_in_is_missing(alone, caplog):
    with caplog.at_level(logging.WARNING):
        assert type(choose(family_model("qwen3_next"), NEEDS)) is ModulesPass
    (said,) = [record.message for record in caplog.records if "padded samples" in record.message]
    assert "it has recurrent layers" in said and "the plug-in ludic_gpu, which is not installed" in said


@pytest.mark.parametrize("name", sorted(kinds.PARTS))
def test_a_part_that_is_missing_names_its_plug_in_and_extra(alone, name):
    with pytest.raises(MissingPlugin, match=r"is in the plug-in ludic_gpu, which is not installed.*\[gpu\]"):
        kinds.part(name)
    assert kinds.part_if_installed(name) is None


def test_every_part_is_declared():
    assert {point.name for point in plugins.points("models")} == kinds.PARTS.keys()
