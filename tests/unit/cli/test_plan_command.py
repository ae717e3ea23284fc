"""`ludic plan` as a command, and docs/scaling.md, whose table it prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from ludic.types import ConfigError
from tests.unit.cli.runner import invoke

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"


def run(*arguments: str):
    return invoke(["plan", *arguments])


def table_in(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| model | GPUs |"))
    return [line for line in lines[start : start + 18] if line.startswith("|")]


def test_the_page_shows_the_table_that_the_command_prints():
    printed = run("--table")
    assert printed.exit_code == 0
    assert len(table_in(printed.output)) == 18  # four shapes, two numbers of GPUs, two sizes; and the head
    assert table_in(PAGE.read_text()) == table_in(printed.output)


def test_a_plan_that_fits_says_memory_speed_and_split():
    done = run("7b", "--gpus", "8", "--gpu-memory", "141")
    assert done.exit_code == 0 and "It fits." in done.output
    for part in (
        "split ",
        "settings ",
        "optimizer ",
        "activations ",
        "keys and values ",
        "tokens/s",
        "updates per hour",
    ):
        assert part in done.output, part


def test_a_plan_that_does_not_fit_says_so_and_what_to_change():
    done = run("70b", "--gpus", "8", "--gpu-memory", "80", "--no-offload")
    assert done.exit_code == 1
    assert "It does not fit" in done.output and "most of it is optimizer" in done.output
    assert "What helps" in done.output and "LoRA adapter" in done.output and "32 GPUs" in done.output
    assert "updates per hour" not in done.output.split("What helps")[0]  # nothing runs at any speed


def test_one_gpu_is_planned_with_the_embedded_engine():
    done = run("135m", "--gpus", "1")
    assert done.exit_code == 0 and "in turns" in done.output and "one after the other" in done.output


def test_measured_rates_are_used_and_said():
    done = run("1.5b", "--training-tokens-per-s", "10000", "--generation-tokens-per-s", "8192", "--inference-gpus", "4")
    assert "training 16.4 s" in done.output and "generation 16.0 s" in done.output
    assert "as you measured them" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Which model"),
        (["no-such-model"], "neither a config.json"),
        (["7b", "--rollouts-per-update", "100"], "whole groups"),
        (["7b", "--table"], "neither a model"),
    ],
)
def test_mistakes_are_named(arguments, message):
    done = run(*arguments)
    assert isinstance(done.exception, ConfigError) and message in str(done.exception)


def test_planning_loads_no_torch():
    probe = "import sys; from ludic.cli.plan import plan; import ludic.scaling; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout.strip() == "False"
