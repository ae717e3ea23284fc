"""`ludic.training` names everything and imports nothing until it is asked for."""

import importlib
import subprocess
import sys

import pytest

import ludic.training

TABLE = ludic.training._NAMES_BY_MODULE


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_light_names_load_no_torch():
    light = ["ludic.training.credit_assignment", "ludic.training.filters"]
    names = " ".join(TABLE[module] for module in light).split()
    code = (
        "import sys, ludic.training; ludic.training.MonteCarloReturn; "
        f"from ludic.training import {', '.join(names)}; "
        "print({'torch', 'transformers', 'ludic.batch_gen'} & set(sys.modules))"
    )
    assert run(code) == "set()"


def test_importing_the_package_imports_none_of_its_parts():
    code = "import sys, ludic.training; print([m for m in sys.modules if m.startswith('ludic.training.')])"
    assert run(code) == "[]"


@pytest.mark.parametrize("module", TABLE)
def test_lazy_names_are_those_of_the_module(module):
    loaded = importlib.import_module(module)
    for name in TABLE[module].split():
        assert getattr(ludic.training, name) is getattr(loaded, name)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'ludic.training' has no attribute 'make_gpro'"):
        _ = ludic.training.make_gpro
    with pytest.raises(ImportError, match="make_gpro"):
        exec("from ludic.training import make_gpro")
