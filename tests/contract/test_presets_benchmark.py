"""benchmarks/presets.py leaves no preset out, and what it prints is what the presets' page shows."""

import re

from benchmarks.presets import RECIPES, STATED_REWARD, VARIANTS

from ludic import registry
from tests.contract.pages import DOCS

ROW = re.compile(
    r"^\| (\w+) \|(?: [^|\n]*[a-z][^|\n]* \|)? \d+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| ([\d.]+) \| (?:\d+|never) \| [\d.]+ \|$",
    re.MULTILINE,
)


def test_every_preset_has_a_recipe():
    assert set(RECIPES) == set(registry.list("algorithm"))


def test_the_page_shows_a_result_of_every_preset_and_variant_that_is_good_enough():
    rows = {name: float(lowest) for name, lowest in ROW.findall((DOCS / "results" / "presets.md").read_text())}
    assert set(rows) == set(RECIPES | VARIANTS)
    assert min(rows.values()) >= STATED_REWARD
