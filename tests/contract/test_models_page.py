"""docs/models.md says what the code decides for a tiny model of each family."""

import pytest

from scripts.model_table import COLUMNS, PAGE, PUSHED, VLLM, page, support
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.docs


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text() == page(), "run: PYTHONPATH=src:. python scripts/model_table.py"


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_is_refused(name):
    cells = dict(zip(COLUMNS, support(name), strict=True))
    assert "no" not in cells.values()


def test_vllm_knows_every_architecture():
    """Read from the source of an installed vLLM, which is another environment's."""
    root = PAGE.parents[1]
    found = list(root.glob(".venv-vllm/lib/python3*/site-packages/vllm/model_executor/models/registry.py"))
    if not found:
        pytest.skip(f"no .venv-vllm with vLLM {VLLM}")
    registry = found[0].read_text()
    assert [family.model for family in FAMILIES.values() if f'"{family.model}"' not in registry] == []


def test_what_is_said_of_pushes_is_what_the_push_tests_try():
    pytest.importorskip("peft", reason="the lora extra is not installed")
    from plugins.vllm.tests.test_vllm_families import SIZES
    from plugins.vllm.tests.test_vllm_weights import mixture_config
    from plugins.vllm.tests.vllm_fixtures import tiny_config

    tried = {tiny_config().model_type, mixture_config().model_type, *SIZES}
    assert {name for name, cell in PUSHED.items() if cell == "yes"} == tried
