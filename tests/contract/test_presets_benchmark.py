"""benchmarks/presets.py leaves no preset out, and its page and docs/algorithms/README.md show what was measured of each, also over
several turns."""

import json
import re
from statistics import fmean

import pytest
from benchmarks.presets import RECIPES, STATED_REWARD, VARIANTS

from ludic import registry
from ludic.run.resolve import MASKED_WHEN_OLD
from scripts.plot_seeds import table
from tests.contract.pages import DOCS

ROW = re.compile(
    r"^\| (\w+) \|(?: [^|\n]*[a-z][^|\n]* \|)? \d+ \| [\d.]+ \| ([\d.]+) \| (?:\d+|never) \| [\d.]+ \|$",
    re.MULTILINE,
)


def test_every_preset_has_a_recipe():
    assert set(RECIPES) == {*registry.list("algorithm"), "mix_objectives"}


def test_the_page_shows_a_result_of_every_preset_and_variant_that_is_good_enough():
    rows = {name: float(lowest) for name, lowest in ROW.findall((DOCS / "results" / "presets.md").read_text())}
    assert set(rows) == set(RECIPES | VARIANTS)
    assert min(rows.values()) >= STATED_REWARD


def late_rewards() -> dict[tuple[str, int], float]:
    """Mean over seeds, by way and lag."""
    late: dict[tuple[str, int], list[float]] = {}
    for record in map(json.loads, (DOCS / "results" / "stale_data_presets.jsonl").read_text().splitlines()):
        late.setdefault((record["way"], record["lag"]), []).append(record["late_reward"])
    return {key: fmean(rewards) for key, rewards in late.items()}


def test_presets_with_a_mask_by_default_are_those_that_lose_reward_on_old_samples_and_hold_it_with_the_mask():
    late = late_rewards()
    lost = {name: late[name, 0] - reward for (name, lag), reward in late.items() if lag == 4 and (name, 0) in late}
    assert set(MASKED_WHEN_OLD) == {name for name, reward in lost.items() if name in RECIPES and reward > 0.1}
    for name in MASKED_WHEN_OLD:
        for lag in (4, 16):
            assert late[f"{name}, negative mask", lag] > late[name, lag] + lost[name] / 2


def test_every_preset_has_its_measured_behaviour_in_the_comparison():
    """The numbers of the comparison are those of the two results."""
    measured = {
        name: numbers
        for name, *numbers in re.findall(
            r"^\| (\w+) \| \d+ \| ([\d.]+) \| [\d.]+ \| (\d+|never) \| ([\d.]+) \|$",
            (DOCS / "results" / "presets.md").read_text(),
            re.MULTILINE,
        )
    }
    late = late_rewards()
    shown = {
        name: numbers
        for name, *numbers in re.findall(
            r"^\| \[`(?:make_)?(\w+)`\].*? \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$",
            (DOCS / "algorithms" / "README.md").read_text(),
            re.MULTILINE,
        )
    }
    assert shown.keys() == RECIPES.keys()
    for name, numbers in shown.items():
        lags = [f"{late[name, lag]:.2f}" if (name, lag) in late else "–" for lag in (4, 16)]
        assert numbers == [*measured[name], *lags], name
    assert {name for name, lag in late if lag == 16} & shown.keys() == {
        name for name, numbers in shown.items() if numbers[-1] != "–"
    }


SEVERAL = re.compile(
    r"(\w+) +\d seeds .*?after (.+?)  lowest (\S+)  turns (\S+) ±.*?(?:  gain (.+?))?  to \S+ after (\w+)(.*)"
)


@pytest.mark.parametrize(
    ("game", "reach", "names"),
    [
        ("key_door_history", 0.6, {"grpo", "echo", "gigpo", "ppo", "reinforce", "reinforce_pp"}),
        ("page", 0.8, {"grpo", "fold_grpo"}),
        ("episode", 0.5, {"grpo", "fold_grpo"}),
    ],
)
def test_the_tables_of_several_turns_show_the_records(game, reach, names):
    page, comparison = ((DOCS / name).read_text() for name in ("results/presets.md", "algorithms/README.md"))
    records = map(json.loads, (DOCS / "results" / "several_turns.jsonl").read_text().splitlines())
    lines = table(
        [row for row in records if row["game"] == game], "grpo", reach=reach, extra=("any", "opened", "sharing")
    )
    measured = {}
    for line in lines:
        found = SEVERAL.match(line)
        assert found is not None, line
        name, after, lowest, turns, gain, to, rest = found.groups()
        ends = [f" {cell} |" for cell in re.findall(r"\w+ (\S+ → \S+)", rest)]
        assert f"| {name} | {after} | {lowest} | {gain or '–'} | {to} | {turns} |{''.join(ends)}" in page, line
        measured[name] = after.split()[0]
    assert measured.keys() == names
    for name, after in measured.items():
        assert f"`{name}` {after}" in comparison, (game, name)
