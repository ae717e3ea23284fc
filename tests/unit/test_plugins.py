"""Entry points: one scan, kept until a folder of packages changes; what is missing says so."""

import importlib
import sys
from pathlib import Path

import pytest

from ludic import plugins
from ludic.types.errors import MissingPlugin


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a package with entry points, in a folder at the front of the path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def install(name: str, text: str) -> None:
        info = tmp_path / "site" / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(text)
        plugins._all_points.cache_clear()

    yield install
    plugins._all_points.cache_clear()


def test_points_of_a_package_are_found_and_kept_until_another_is_installed(installed, monkeypatch):
    installed("one", "[ludic.commands]\nfirst = nowhere:A\n[other]\nx = y:z\n")
    assert plugins.find("commands", "first") == ("ludic.commands", "first", "nowhere:A", "one")
    plugins._all_points.cache_clear()
    monkeypatch.setattr(plugins, "_scan", lambda: pytest.fail("the stored scan is used"))
    assert plugins.find("commands", "first") is not None
    monkeypatch.undo()


def test_a_new_package_is_seen(installed):
    installed("one", "[ludic.commands]\nfirst = nowhere:A\n")
    assert plugins.find("commands", "second") is None
    installed("two", "[ludic.commands]\nsecond = nowhere:B\n")
    assert plugins.find("commands", "second") is not None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', '{"key": null, "points": 3}'])
def test_a_damaged_cache_is_scanned_again(installed, content):
    installed("one", "[ludic.commands]\nfirst = nowhere:A\n")
    assert plugins.find("commands", "first") is not None
    plugins._cache_file().write_text(content)
    plugins._all_points.cache_clear()
    assert plugins.find("commands", "first") is not None


def test_a_cache_that_cannot_be_written_costs_time_only(installed, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    installed("one", "[ludic.commands]\nfirst = nowhere:A\n")
    assert plugins.find("commands", "first") is not None


def test_a_missing_plugin_is_named_with_its_extra(installed):
    installed("ludic-rl", "[ludic.commands]\ngone = ludic_gone.plugin:GONE\n")
    with pytest.raises(MissingPlugin, match=r"command 'gone' is in the plug-in ludic_gone, .* '\.\[gone\]'"):
        plugins.find("commands", "gone").load()


def test_an_error_inside_a_plugin_is_not_called_a_missing_plugin(installed, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "broken_plugin.py").write_text("import not_installed_either")
    importlib.invalidate_caches()
    point = plugins.Point("ludic.commands", "broken", "broken_plugin:X", "broken")
    with pytest.raises(ModuleNotFoundError, match="not_installed_either"):
        point.load()


def test_an_installation_older_than_the_clone_is_told_to_install_again(monkeypatch):
    monkeypatch.setattr(plugins, "_all_points", lambda: ())
    assert plugins.is_stale("commands", "view") and not plugins.is_stale("commands", "viewed")


def test_shims_have_the_names_of_their_plugin_and_no_others():
    import ludic.sandbox

    ludic_sandbox = pytest.importorskip("ludic_sandbox", reason="the plug-in is not there")
    assert ludic.sandbox.create_sandbox_pool is ludic_sandbox.create_sandbox_pool
    with pytest.raises(AttributeError, match=r"module 'ludic\.sandbox' has no attribute 'nothing'"):
        _ = ludic.sandbox.nothing
    assert Path(sys.modules["ludic.sandbox"].__file__).parent.name == "sandbox"


def test_a_plugin_that_another_one_needs_is_named_where_a_command_loads_it(monkeypatch, capsys):
    from ludic.cli import commands, main

    def load():
        raise ModuleNotFoundError("No module named 'ludic_vllm'", name="ludic_vllm")

    monkeypatch.setattr(
        commands, "find", lambda name: type("Found", (), {"load": staticmethod(lambda: lambda args: load())})
    )
    monkeypatch.setattr(sys, "argv", ["ludic", "launch", "tic_tac_toe"])
    with pytest.raises(SystemExit):
        main.main()
    said = capsys.readouterr().err
    assert (
        said.startswith("ludic: `ludic launch` is in the plug-in ludic_vllm, which is not installed.")
        and said.count("\n") == 1
    )


def test_an_env_whose_plugin_is_missing_names_it():
    from ludic import registry
    from ludic.util.errors import MissingPlugin

    registry.envs.register("of_nowhere", "ludic_nowhere:Env")
    with pytest.raises(MissingPlugin, match="The env 'of_nowhere' is in the plug-in ludic_nowhere"):
        registry.envs.make("of_nowhere")
