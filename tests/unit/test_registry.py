import json
import os
import pickle
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from ludic import registry
from ludic.catalog import PACKAGES
from ludic.parsers import ParseResult
from ludic.registry import load_own
from ludic.types import ConfigError, UnknownName
from ludic.types.errors import how_to_install_package
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


def test_a_target_string_is_imported_on_first_use(envs):
    envs.register("mine/lazy", "tests.fakes:CountingEnv")
    assert isinstance(envs.make("mine/lazy"), CountingEnv)
    envs.register("mine/broken", "tests.fakes:NoSuchEnv")
    with pytest.raises(ConfigError, match="NoSuchEnv"):
        envs.make("mine/broken")


def test_builtin_ids_have_a_long_form(envs):
    assert envs.spec("ludic/tic_tac_toe") is envs.spec("tic_tac_toe")


def test_error_for_an_unknown_id_suggests_similar_ones(envs):
    with pytest.raises(UnknownName, match=r"Did you mean 'tic_tac_toe'"):
        envs.make("tictactoe")
    with pytest.raises(KeyError):
        envs.spec("nothing_like_it")
    with pytest.raises(UnknownName, match=r"'harbor_family' is now examples/harbor_tasks/family.py:HarborFamilyEnv"):
        envs.make("harbor_family")


def test_error_for_a_wrong_argument_lists_the_accepted_ones(envs):
    envs.register("mine/count", CountingEnv)
    with pytest.raises(ConfigError, match=r"goal.*It takes: target: int = 3"):
        envs.make("mine/count", goal=3)


def test_a_missing_argument_is_named():
    with pytest.raises(ConfigError, match="sample"):
        registry.envs.make("gsm8k")


@pytest.mark.parametrize("bad", ["", "a b", "a/b/c", "/x", "ä"])
def test_invalid_ids_are_refused(envs, bad):
    with pytest.raises(ConfigError, match="not a valid env id"):
        envs.register(bad, CountingEnv)


def test_registering_twice_needs_replace(envs):
    envs.register("mine/count", CountingEnv)
    with pytest.raises(ConfigError, match="registered already"):
        envs.register("mine/count", CountingEnv)
    envs.register("mine/count", CountingEnv, kwargs={"target": 9}, replace=True)
    assert envs.make("mine/count").target == 9
    envs.unregister("mine/count")
    assert "mine/count" not in envs


def test_make_binds_arguments_to_a_parser():
    boxed = registry.parsers.make("boxed", success_reward=0.5)
    assert boxed(r"\boxed{4}") == ParseResult("4", 0.5, None)
    assert registry.parsers.make("xml_tag", tag="a")("<a>x</a>").action == "x"
    assert registry.tools.make("calculator")("6*7") == "42"


def test_arguments_behind_the_name_are_refused_with_the_flag_that_takes_them():
    with pytest.raises(ConfigError, match=r"--parser-set tag=move \(in a file or `build`: parser_set\)"):
        registry.parsers.spec("xml_tag:tag=move")


def test_module_functions_take_a_kind():
    assert "tic_tac_toe" in registry.list("env")
    assert registry.spec("protocol", "single_agent").target == "ludic.interaction:SingleAgentProtocol"
    registry.register("env", "test/module_level", CountingEnv)
    try:
        assert registry.make("env", "test/module_level", target=1).target == 1
    finally:
        registry.envs.unregister("test/module_level")
    with pytest.raises(UnknownName, match="Did you mean 'env'"):
        registry.list("envs")


ROOT = Path(__file__).parents[2]


def install(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """A distribution's metadata, as pip writes it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("".join(points))


def printed(code: str, *path: Path) -> str:
    """By a fresh interpreter that has these folders on its path."""
    paths = ":".join(map(str, (*path, ROOT / "src", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_installed_package_adds_its_parts(tmp_path: Path):
    (tmp_path / "acme_robots.py").write_text(
        "from ludic.catalog import Entry, Suggested\nfrom tests.fakes import CountingEnv\n\n"
        "class Robot(CountingEnv):\n    '''Walks.'''\n\n"
        "SLOW = Entry('acme_robots:Robot', example={'target': 9}, suggested=Suggested(max_steps=3))\n"
    )
    install(tmp_path, "acme-robots", {"ludic.envs": {"robot": "acme_robots:Robot", "slow": "acme_robots:SLOW"}})
    code = "from ludic import registry; print(registry.envs.list(), registry.envs.make('acme-robots/robot', target=4).target)"
    shown = printed(code, tmp_path)
    assert "'acme-robots/robot'" in shown and shown.endswith("4")
    code = (
        "from ludic import registry; spec = registry.envs.spec('acme-robots/slow'); "
        "print(spec.summary, dict(spec.example), spec.suggested.max_steps, registry.envs.make('acme-robots/slow', target=4).target)"
    )
    assert printed(code, tmp_path) == "Walks. {'target': 9} 3 4"


@pytest.mark.parametrize("folder", sorted(path.parent for path in (ROOT / "environments").glob("*/pyproject.toml")))
def test_packages_of_this_repository_have_short_ids(folder: Path, tmp_path: Path):
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    listed = {(kind, id) for kind, ids in PACKAGES.items() for id, package in ids.items() if package == project["name"]}
    points = {(group.removeprefix("ludic.")[:-1], id) for group, ids in project["entry-points"].items() for id in ids}
    assert points == listed
    install(tmp_path, project["name"], project["entry-points"])
    code = f"from ludic import registry; print([registry.spec(*part).summary != '' for part in {sorted(listed)}])"
    assert printed(code, tmp_path, folder / "src") == str([True] * len(listed))


def test_error_names_the_package_of_a_part_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("ludic.plugins.points", lambda group: [])
    envs = registry.Registry("env")
    assert "game_boy" not in envs
    with pytest.raises(
        UnknownName, match="in the package ludic-game-boy, which is not installed.*-e environments/game_boy;"
    ):
        envs.make("game_boy")
    for package in {package for ids in PACKAGES.values() for package in ids.values()}:
        (name,) = re.findall(r"install -e (\S+);", how_to_install_package(package))
        assert tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]["name"] == package


# --- user's own parts ---

ENV = """
from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome
from %s import WORTH

class Mine(SingleAgentEnv):
    def env_reset(self, *, seed=None):
        return "?", {}

    def env_step(self, action):
        import later_%s
        return StepOutcome("", reward=WORTH + later_%s.BONUS, terminated=True)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder; what files in it import is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    loaded = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - loaded:
        del sys.modules[name]


def write_env(folder: Path, helper: str, worth: float) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "env.py").write_text(ENV % (helper, helper, helper))
    (folder / f"{helper}.py").write_text(f"WORTH = {worth}")
    (folder / f"later_{helper}.py").write_text("BONUS = 0.5")


def reward(env: object) -> float:
    env.env_reset()
    return env.env_step("x").reward


def test_a_file_is_loaded_with_the_modules_beside_it(here, envs):
    write_env(here / "one", "rules_one", 1.0)
    write_env(here / "two", "rules_two", 2.0)
    one, two = envs.make("one/env.py:Mine"), envs.make(f"{here}/two/env.py:Mine")
    assert (reward(one), reward(two)) == (1.5, 2.5), "also what is imported inside a function"
    assert type(one) is type(envs.make("one/../one/env.py:Mine")) and type(one) is not type(two)
    assert type(pickle.loads(pickle.dumps(one))) is type(one)


def test_a_module_of_the_current_folder_needs_no_path(here, envs):
    write_env(here / "package", "rules_three", 3.0)
    (here / "package" / "__init__.py").touch()
    (here / "rules_three.py").write_text("WORTH = 7")
    (here / "later_rules_three.py").write_text("BONUS = 0")
    assert reward(envs.make("package.env:Mine")) == 7.0


def test_modules_beside_a_file_do_not_shadow_installed_ones(here, envs):
    """Not the standard library's at any time, nor an installed package's once the file is loaded."""
    write_env(here / "one", "rules_four", 1.0)
    assert "tabnanny" not in sys.modules and "this_is_installed" not in sys.modules
    for name in ("tabnanny", "this_is_installed"):
        (here / "one" / f"{name}.py").write_text("raise RuntimeError('mine')")
    with (here / "one" / "env.py").open("a") as file:
        file.write("import tabnanny")
    installed = here / "site-packages"
    installed.mkdir()
    (installed / "this_is_installed.py").touch()
    sys.path.append(str(installed))
    envs.make("one/env.py:Mine")
    import this_is_installed

    assert this_is_installed.__file__.startswith(str(installed))


def test_two_helper_modules_of_one_name_are_refused(here, envs):
    write_env(here / "one", "rules_five", 1.0)
    write_env(here / "two", "rules_five", 2.0)
    envs.make("one/env.py:Mine")
    with pytest.raises(ConfigError, match=r"two/rules_five.py, but .*one/rules_five.py has that name already. Rename"):
        envs.make("two/env.py:Mine")


@pytest.mark.parametrize(
    ("file", "helper", "message"),
    [
        ("x = 1\ny = x / 0\n", "", r"bad\.py, line 2, `y = x / 0`, raised ZeroDivisionError: division by zero\.$"),
        ("import not_there_at_all\n", "", r"bad\.py, line 1, `import not_there_at_all`, raised ModuleNotFoundError"),
        (
            "import bad_helper\n",
            "\nopen('/nowhere')\n",
            r"bad_helper\.py, line 2, `open\('/nowhere'\)`, raised FileNotFound",
        ),
        ("import json\n\njson.loads('{')\n", "", r"bad\.py, line 3, `json.loads\('\{'\)`, raised JSONDecodeError"),
        ("def broken(:\n", "", r"bad\.py, line 1, `def broken\(:`, raised SyntaxError: invalid syntax"),
        ("import bad_helper\n", "x ==\n", r"bad_helper\.py, line 1, `x ==`, raised SyntaxError"),
        ("import sys\nsys.exit('done')\n", "", r"bad\.py, line 2, `sys.exit\('done'\)`, raised SystemExit: done"),
        ("from ludic.types import ConfigError\nMine = 3\n", "", r"bad.py:Mine is 3; for the env, name a class"),
    ],
)
def test_error_for_a_broken_file_names_the_users_line(here, envs, file, helper, message):
    (here / "bad.py").write_text(file)
    (here / "bad_helper.py").write_text(helper)
    for _ in range(2):  # a failed attempt leaves nothing half loaded
        with pytest.raises(ConfigError, match=message) as raised:
            envs.make("bad.py:Mine")
        assert "\n" not in str(raised.value)


def test_error_for_a_missing_name_lists_the_names_in_the_file(here, envs):
    (here / "some.py").write_text("from pathlib import Path\nclass Maze: ...\n")
    with pytest.raises(UnknownName, match=r"No env in some.py named 'Mase'. Did you mean 'Maze'\? Known: Maze\."):
        envs.make("some.py:Mase")
    with pytest.raises(ConfigError, match=r"There is no file other.py in "):
        envs.make("other.py:Maze")


def test_own_parsers_and_tools_may_be_functions_or_classes(here):
    (here / "own.py").write_text(
        "from ludic.parsers import ParseResult\n"
        "def shout(text, mark='!'):\n    return ParseResult(text.upper() + mark, 0.0, None)\n"
        "class Shout:\n"
        "    def __init__(self, mark): self.mark = mark\n"
        "    def __call__(self, text): return shout(text, self.mark)\n"
        "def fails(): return {}['key']\n"
    )
    assert registry.parsers.make("own.py:shout")("a").action == "A!"
    assert registry.parsers.make("own.py:shout", mark="?")("a").action == "A?"
    assert registry.parsers.make("own.py:Shout", mark="#")("a").action == "A#"
    assert registry.tools.make("own.py:shout") is registry.parsers.make("own.py:shout")
    with pytest.raises(ConfigError, match=r"The parser 'own.py:shout' cannot be made like that: .*'loud'"):
        registry.parsers.make("own.py:shout", loud=True)
    with pytest.raises(
        ConfigError, match=r"Cannot make the algorithm 'own.py:fails': .*own.py, line 7, .*KeyError: 'key'"
    ):
        registry.algorithms.make("own.py:fails")


def test_a_file_that_another_thread_is_loading_is_waited_for(tmp_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gate_of_this_test", SimpleNamespace(begun=begun, go=go))
    file = tmp_path / "slow.py"
    file.write_text("import gate_of_this_test as gate\ngate.begun.set()\ngate.go.wait(60)\ndef solve(): pass\n")
    first = threading.Thread(target=load_own, args=(f"{file}:solve", "agent"))
    first.start()
    assert begun.wait(60)
    threading.Timer(0.05, go.set).start()
    assert load_own(f"{file}:solve", "agent").__name__ == "solve"
    first.join()


def test_a_file_that_another_thread_is_loading_holds_up_no_other(tmp_path, monkeypatch):
    """What it waits for may be a module that this thread imports: with one lock for all, neither would go on."""
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gate_of_this_test", SimpleNamespace(begun=begun, go=go))
    (tmp_path / "slow.py").write_text(
        "import gate_of_this_test as gate\ngate.begun.set()\ngate.go.wait(60)\ndef f(): pass\n"
    )
    (tmp_path / "other.py").write_text("def solve(): pass\n")
    first = threading.Thread(target=load_own, args=(f"{tmp_path / 'slow.py'}:f", "agent"))
    first.start()
    assert begun.wait(60)
    assert load_own(f"{tmp_path / 'other.py'}:solve", "agent").__name__ == "solve"
    assert load_own("json:dumps", "agent") is json.dumps
    assert first.is_alive(), "it was waited for"
    go.set()
    first.join()
