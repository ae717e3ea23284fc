"""Every registered part can be made, and every registered env keeps the contract."""

import pytest

from ludic import registry
from ludic.catalog import BUILTINS
from ludic.envs import check_env
from ludic.registry import EntrySpec

ENVS = sorted(BUILTINS["env"])
ALL = [(kind, id) for kind, entries in BUILTINS.items() for id in sorted(entries)]


@pytest.mark.parametrize("id", ENVS)
async def test_env_keeps_the_contract(id: str):
    example = registry.envs.spec(id).example
    await check_env(lambda: registry.envs.make(id, **example))


@pytest.mark.parametrize(("kind", "id"), ALL)
def test_every_entry_can_be_loaded_and_says_what_it_is(kind: str, id: str):
    spec: EntrySpec = registry.spec(kind, id)
    assert callable(spec.load()) and spec.summary


@pytest.mark.parametrize("kind", ["env", "context", "parser", "tool"])
def test_parts_that_stand_alone_can_be_made(kind: str):
    for id in BUILTINS[kind]:
        assert registry.make(kind, id, **registry.spec(kind, id).example) is not None


@pytest.mark.parametrize("id", ENVS)
def test_every_env_has_a_page(id: str):
    from pathlib import Path

    page = Path(__file__).parents[2] / "docs" / "envs" / f"{id.removesuffix('_duel')}.md"
    assert page.exists(), f"write docs/envs/{page.name}"
    headings = [line[3:] for line in page.read_text().splitlines() if line.startswith("## ")]
    assert headings[:5] == ["Task", "Action format", "Reward", "Reference score", "How it was validated"]
