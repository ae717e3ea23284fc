"""Every registered part can be made, and every registered env keeps the contract."""

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from ludic import registry
from ludic.catalog import BUILTINS, PACKAGES
from ludic.envs import check_env
from ludic.registry import EntrySpec
from ludic.types import MissingPackage

pytestmark = pytest.mark.slow

PAGES = Path(__file__).parents[2] / "docs" / "envs"
PACKAGED = [(kind, id) for kind, entries in PACKAGES.items() for id in sorted(entries)]
ENVS = sorted([*BUILTINS["env"], *PACKAGES["env"]])
ALL = [*((kind, id) for kind, entries in BUILTINS.items() for id in sorted(entries)), *PACKAGED]


def need_package(kind: str, id: str) -> None:
    """`make` installs the packages of environments/; a checkout alone has no entry points."""
    package = PACKAGES.get(kind, {}).get(id)
    try:
        assert package is None or distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed; make does it")
    if kind == "env":
        try:
            registry.envs.make(id, **registry.envs.spec(id).example)
        except MissingPackage as error:  # no extra of Ludic: `make` does not install it
            pytest.skip(str(error))


@pytest.mark.parametrize("id", ENVS)
async def test_env_keeps_the_contract(id: str):
    need_package("env", id)
    if id == "openenv":
        pytest.skip("its example is the address of a server; plugins/envs/tests/adapters/test_openenv.py starts one")
    example = registry.envs.spec(id).example
    await check_env(lambda: registry.envs.make(id, **example))


@pytest.mark.parametrize(("kind", "id"), ALL)
def test_every_entry_can_be_loaded_and_says_what_it_is(kind: str, id: str):
    need_package(kind, id)
    spec: EntrySpec = registry.spec(kind, id)
    assert callable(spec.load()) and spec.summary


@pytest.mark.parametrize("kind", ["env", "context", "parser", "tool"])
def test_parts_that_stand_alone_can_be_made(kind: str):
    for id in BUILTINS[kind]:
        with suppress(MissingPackage):
            assert registry.make(kind, id, **registry.spec(kind, id).example) is not None


@pytest.mark.parametrize("id", ENVS)
def test_every_env_has_a_page(id: str):
    page = PAGES / f"{id.removesuffix('_duel')}.md"
    assert page.exists(), f"write docs/envs/{page.name}"
    headings = [line[3:] for line in page.read_text().splitlines() if line.startswith("## ")]
    assert headings[:5] == ["Task", "Action format", "Reward", "Reference score", "How it was validated"]


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_every_page_has_a_command(page: str):
    commands = re.findall(r"^```bash\n(.+?)^```$", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
    assert any(re.search(r"\b(ludic|python) ", block) for block in commands), (
        f"docs/envs/{page} shows no command that runs the env"
    )
