"""Features of plug-ins that are not installed: what needs one names it and its extra, and settings files can still be read."""

from dataclasses import dataclass, field

import pytest

from ludic.plugins import Point
from ludic.run import settings
from ludic.run.config.run_config import RunConfig
from ludic.run.features import base as plugged
from ludic.run.features.base import Engine, engine_of
from ludic.run.settings import Sections, from_table, settings_of, to_toml, with_given, with_values
from ludic.types import ConfigError
from ludic.types.errors import MissingPlugin


@pytest.fixture
def gone(monkeypatch):
    """The plug-ins' entry points are there, and their packages are not."""
    monkeypatch.setattr(
        plugged, "find", lambda group, name: Point(f"ludic.{group}", name, f"ludic_gone.{name}:FEATURE", "ludic-rl")
    )


def test_an_engine_whose_plugin_is_gone_is_named_with_its_extra(gone):
    config = with_values(RunConfig(), {"engine": "vllm"})
    with pytest.raises(MissingPlugin, match=r"engine = 'vllm' is in the plug-in ludic_gone.*'\.\[gone\]'"):
        engine_of(config)


class Mine(Engine):
    engine = "mine"


def test_an_engine_of_another_package_is_a_value_of_the_setting(monkeypatch):
    monkeypatch.setattr(plugged, "_found", lambda: {"mine": Mine()})
    monkeypatch.setattr(settings, "settings_of", settings.settings_of.__wrapped__)
    assert with_given(RunConfig(), {"engine": "mine"}).rollouts.engine == "mine"
    with pytest.raises(ConfigError, match="engine = 'vllm': expected one of 'local', 'mine'"):
        with_given(RunConfig(), {"engine": "vllm"})


def test_a_sandbox_whose_plugin_is_gone_is_named(gone):
    with pytest.raises(MissingPlugin, match="sandbox = 'docker' is in the plug-in"):
        with_values(RunConfig(), {"sandbox": "docker"})


def test_a_feature_that_no_package_has_is_named(monkeypatch):
    monkeypatch.setattr(plugged, "find", lambda group, name: None)
    with pytest.raises(ConfigError, match="judge = 'tiny' needs the feature 'what', which no installed package has"):
        plugged.plugged("what", "judge = 'tiny'")


@dataclass(frozen=True, kw_only=True)
class Here:
    """A section that is there."""

    speed: int = 1
    """How fast."""


@dataclass(frozen=True, kw_only=True)
class Config:
    plugins: Sections = field(default_factory=lambda: Sections(here=Here()))

    @staticmethod
    def added_sections() -> dict[str, type | None]:
        return {"here": Here, "away": None}


def test_the_section_of_a_plugin_is_read_written_and_changed():
    config = from_table(Config, {"here": {"speed": 3}}, "file")
    assert config.plugins["here"].speed == 3 and Config().plugins["here"].speed == 1
    assert [setting.flag for setting in settings_of(Config)] == ["--speed"]
    assert to_toml(with_values(config, {"speed": 4})) == "[here]\nspeed = 4\n"
    with pytest.raises(ConfigError, match="expected a whole number"):
        from_table(Config, {"here": {"speed": "fast"}}, "file")


def test_the_section_of_a_plugin_that_is_not_installed_is_passed_over():
    assert from_table(Config, {"away": {"speed": 3}}, "file") == Config()
