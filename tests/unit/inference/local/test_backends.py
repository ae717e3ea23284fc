"""Which backend a model gets, and what is said where none suits or a plug-in is missing."""

import logging

import pytest

from ludic import plugins
from ludic.inference.local.backends import PagedBackend, choose_backend
from ludic.inference.local.cached import CachedBackend
from ludic.inference.local.runner import Backend
from ludic.models import attention
from ludic.types import ConfigError
from ludic.types.errors import MissingPlugin
from tests.tiny_families import family_model


class Installed:
    """An entry point that names a class, or whose package is gone."""

    name, package = "fast", "someones"

    def __init__(self, kind):
        self._kind = kind

    def load(self):
        if self._kind is None:
            raise MissingPlugin(self.package, "backend 'fast'")
        return self._kind


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(attention, "_said", set())

    def install(*kinds):
        points = [Installed(kind) for kind in kinds]
        monkeypatch.setattr(plugins, "points", lambda group: points if group == "backends" else [])

    return install


class Fast(Backend):
    def suits(self, model, needs):
        if needs.has_adapters:
            return "it is too fast for adapters"
        self.max_length = needs.max_length
        return None

    def runner(self, view, settings):
        raise NotImplementedError


class ForNothing(Fast):
    @classmethod
    def is_for(cls, model):
        return False


def test_a_backend_of_a_plug_in_comes_before_those_of_the_core(installed):
    model = family_model("llama")
    installed(Fast)
    assert type(choose_backend(model, 48)) is Fast
    assert choose_backend(model, 48).max_length == 48
    assert type(choose_backend(model, 48, has_adapters=True)) is PagedBackend
    installed(ForNothing)
    assert type(choose_backend(model, 48)) is PagedBackend


def test_the_reasons_of_all_are_named_where_none_suits(installed):
    installed(Fast)
    with pytest.raises(
        ConfigError, match=r"cannot run GPTJForCausalLM: it is too fast for adapters; its attention does not go"
    ):
        choose_backend(family_model("gptj"), 48, has_adapters=True)


def test_a_hybrid_without_the_plug_in_runs_slower_and_it_is_said_why(installed, caplog):
    installed(None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_backend(family_model("qwen3_next"), 48), CachedBackend)
    (said,) = [record.message for record in caplog.records if record.name.startswith("ludic")]
    assert "the backend 'fast' of someones is not installed; it has recurrent layers" in said
