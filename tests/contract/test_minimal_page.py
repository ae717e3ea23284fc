"""docs/minimal.md: its program learns as it says, and its tables leave nothing out."""

import re

import pytest

import ludic.minimal
from ludic.minimal import GRPOConfig
from tests.contract.pages import BLOCK, DOCS, run

pytestmark = pytest.mark.docs

PAGE = (DOCS / "minimal.md").read_text()
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_the_program_learns_as_the_page_says(tmp_path):
    (_, code), (_, promised) = BLOCK.findall(PAGE)
    printed = run("python", code, tmp_path).splitlines()
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in promised.splitlines()]
    numbers = [list(map(float, NUMBER.findall(line))) for line in printed]
    assert numbers[0][1] < 0.3 and numbers[1][1] > 0.9


def test_every_protocol_and_every_type_is_on_the_page():
    helpers = {
        "ChatRenderer",
        "ClientPolicy",
        "Dialogue",
        "SavesWeights",
        "MetricsLogger",
        "TensorBoardLogger",
        "ToolSpec",
    }
    named = {name for name in ludic.minimal.__all__ if name not in PAGE} - helpers
    assert not named, f"docs/minimal.md does not speak of {named}"


def test_the_commands_of_the_page_use_flags_that_exist():
    import tyro

    from ludic.minimal.examples import gsm8k, musique_search

    commands = re.findall(r"python -m ludic\.minimal\.examples\.(\w+) ((?:.|\\\n)*?)\n\n", PAGE)
    assert [name for name, _ in commands] == ["gsm8k", "musique_search"]
    for name, flags in commands:
        program = {"gsm8k": gsm8k, "musique_search": musique_search}[name]
        settings = tyro.cli(program.Settings, args=flags.replace("\\\n", " ").split())
        assert settings.run_dir.name == name
    assert GRPOConfig().samples_per_prompt == 8
