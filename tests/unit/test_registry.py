import subprocess
import sys
from pathlib import Path

import pytest

from ludic import registry
from ludic.parsers import ParseResult
from ludic.types import ConfigError, UnknownName
from tests.fakes import CountingEnv


@pytest.fixture
def envs():
    return registry.Registry("env")


def test_a_registered_env_is_made_with_its_arguments(envs):
    envs.register("mine/count", CountingEnv, kwargs={"target": 5})
    assert envs.make("mine/count").target == 5
    assert envs.make("mine/count", target=2).target == 2
    assert "mine/count" in envs and envs.spec("mine/count").kwargs == {"target": 5}


def test_the_decorator_registers_and_returns_the_class(envs):
    @envs.register("mine/sub")
    class Sub(CountingEnv):
        """A counting env."""

    assert isinstance(envs.make("mine/sub"), Sub)
    assert envs.spec("mine/sub").summary == "A counting env."


def test_a_target_can_be_named_and_is_imported_late(envs):
    envs.register("mine/lazy", "tests.fakes:CountingEnv")
    assert isinstance(envs.make("mine/lazy"), CountingEnv)
    envs.register("mine/broken", "tests.fakes:NoSuchEnv")
    with pytest.raises(ConfigError, match="NoSuchEnv"):
        envs.make("mine/broken")


def test_builtin_ids_have_a_long_form(envs):
    assert envs.spec("ludic/tic_tac_toe") is envs.spec("tic_tac_toe")


def test_an_unknown_id_answers_with_the_nearest_ones(envs):
    with pytest.raises(UnknownName, match=r"Did you mean 'tic_tac_toe'"):
        envs.make("tictactoe")
    with pytest.raises(KeyError):
        envs.spec("nothing_like_it")


def test_a_wrong_argument_is_answered_with_the_right_ones(envs):
    envs.register("mine/count", CountingEnv)
    with pytest.raises(ConfigError, match=r"goal.*It takes: target: int = 3"):
        envs.make("mine/count", goal=3)


def test_a_missing_argument_is_named():
    with pytest.raises(ConfigError, match="sample"):
        registry.envs.make("gsm8k")


@pytest.mark.parametrize("bad", ["", "a b", "a/b/c", "/x", "ä"])
def test_ids_are_plain(envs, bad):
    with pytest.raises(ConfigError, match="not a valid env id"):
        envs.register(bad, CountingEnv)


def test_registering_twice_is_refused_unless_asked_for(envs):
    envs.register("mine/count", CountingEnv)
    with pytest.raises(ConfigError, match="registered already"):
        envs.register("mine/count", CountingEnv)
    envs.register("mine/count", CountingEnv, kwargs={"target": 9}, replace=True)
    assert envs.make("mine/count").target == 9
    envs.unregister("mine/count")
    assert "mine/count" not in envs


def test_parsers_are_things_and_not_factories():
    boxed = registry.parsers.make("boxed", success_reward=0.5)
    assert boxed(r"\boxed{4}") == ParseResult("4", 0.5, None)
    assert registry.parsers.make("xml_tag", tag="a")("<a>x</a>").action == "x"
    assert registry.tools.make("calculator")("6*7") == "42"


def test_the_module_functions_speak_of_kinds():
    assert "tic_tac_toe" in registry.list("env")
    assert registry.spec("protocol", "single_agent").target == "ludic.interaction:SingleAgentProtocol"
    registry.register("env", "test/module_level", CountingEnv)
    try:
        assert registry.make("env", "test/module_level", target=1).target == 1
    finally:
        registry.envs.unregister("test/module_level")
    with pytest.raises(UnknownName, match="Did you mean 'env'"):
        registry.list("envs")


def test_an_installed_package_adds_its_parts(tmp_path: Path):
    """A real distribution on the path, found by its metadata in a fresh interpreter."""
    (tmp_path / "acme_robots.py").write_text(
        "from tests.fakes import CountingEnv\n\nclass Robot(CountingEnv):\n    '''Walks.'''\n"
    )
    info = tmp_path / "acme_robots-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-robots\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ludic.envs]\nrobot = acme_robots:Robot\n")
    code = "from ludic import registry; print(registry.envs.list(), registry.envs.make('acme-robots/robot', target=4).target)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env={"PYTHONPATH": f"{tmp_path}:{root}"}
    )
    assert done.returncode == 0, done.stderr
    assert "'acme-robots/robot'" in done.stdout and done.stdout.strip().endswith("4")
