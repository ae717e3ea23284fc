"""What must not grow again, by the counts of scripts/structure.py."""

import pytest

from scripts import structure

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree() -> structure.Tree:
    return structure.Tree()


def test_the_viewer_loads_at_most_6000_lines(tree):
    loaded = tree.closure("ludic_view.server")
    assert {"ludic_view.api", "ludic.types.rollout"} <= loaded
    assert tree.lines(loaded) <= 6000, sorted((tree.modules[name].lines, name) for name in loaded)


def test_the_viewer_reads_run_folders_without_what_writes_them(tree):
    for name in ("ludic_view.server", "ludic_view.export"):
        loaded = tree.closure(name)
        writers = (
            "ludic.run.run",
            "ludic.run.config",
            "ludic.batch_gen",
            "ludic.training.trainer",
            "ludic.models.loading",
        )
        assert not [module for module in loaded if any(structure.is_in(module, writer) for writer in writers)]


def test_the_trainer_loads_at_most_19000_lines(tree):
    assert tree.lines(tree.closure("ludic.training.trainer")) <= 19_000


def test_the_program_of_the_training_page_loads_at_most_31000_lines(tree):
    assert tree.lines(tree.program()) <= 31_000


def test_there_are_no_circles_also_none_through_imports_in_functions(tree):
    assert structure.circles(tree.arrows(functions=True)) == []


def test_no_function_takes_more_than_13_parameters(tree):
    assert structure.parameters(tree.modules.values())[0] <= 13


def test_run_has_at_most_70_raises_of_config_error(tree):
    assert structure.config_errors(tree) <= 70


def test_docstrings_are_whole_sentences(tree):
    """Or noun phrases that stand alone; at most 2 % begin in mid-sentence."""
    fragments, texts = structure.docstrings(tree.modules.values())
    assert fragments <= texts * 0.02


def test_no_folder_has_more_than_14_files(tree):
    assert tree.folders().most_common(1)[0][1] <= 14


def test_neither_the_evaluation_nor_the_doctor_names_another_plug_in(tree):
    named = tree.arrows(functions=True)
    for part, own in (("ludic.cli.eval", "ludic"), ("ludic_ops", "ludic_ops"), ("ludic_view", "ludic_view")):
        inside = [name for name in named if structure.is_in(name, part)]
        assert inside
        others = {target for name in inside for target in named[name] if target.partition(".")[0] not in ("ludic", own)}
        assert others == set()


def test_it_counts_what_statements_load(tmp_path):
    """Names of a lazy face count as the module that has them; imports in functions and for type checkers do not load."""
    files = {
        "__init__.py": 'from ludic.util.lazy import lazy\n\n__getattr__ = lazy(__name__, {"parts": "Part"})\n',
        "util/__init__.py": "",
        "util/lazy.py": "def lazy(name, table):\n    return None\n",
        "parts.py": "class Part:\n    pass\n",
        "typed.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import ludic.heavy\n",
        "late.py": "def make():\n    from ludic.heavy import Heavy\n\n    return Heavy\n",
        "heavy.py": "import ludic.late\n\nclass Heavy:\n    pass\n",
        "user.py": "from ludic import Part\nimport ludic.typed\n",
    }
    for name, text in files.items():
        place = tmp_path / "src" / "ludic" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    small = structure.Tree(tmp_path)
    assert small.closure("ludic.user") == {
        "ludic", "ludic.user", "ludic.parts", "ludic.typed", "ludic.util", "ludic.util.lazy",
    }  # fmt: skip
    assert small.lines(["ludic.parts", "ludic.typed"]) == 6
    assert structure.circles(small.arrows(functions=False)) == []
    assert structure.circles(small.arrows(functions=True)) == [["ludic.heavy", "ludic.late"]]
