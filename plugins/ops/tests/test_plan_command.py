"""`ludic plan` as a command, and docs/scaling.md, whose table it prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from ludic.types import ConfigError
from ludic_ops.scaling import GIB, SHAPES, TrainingSetup, training_memory
from tests.unit.cli.runner import invoke

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"


def run(*arguments: str):
    return invoke(["plan", *arguments])


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_page_shows_the_table_that_the_command_prints():
    printed = run("7b", "--gpus", "9", "--inference-gpus", "1", "--gpu-memory", "80")
    assert printed.exit_code == 0
    table = printed.output[printed.output.index("| model | GPUs |") :].strip()
    assert table in PAGE.read_text()


def test_more_gpus_per_copy_leave_more_room():
    printed = run("7b", "--gpus", "16", "--gpu-memory", "80")
    room = " tokens of keys and values"
    assert [(row[2], row[7], row[9].removesuffix(room)) for row in rows(printed.output)[-3:]] == [
        ("14.2", "16.4", "room for 1045108"),
        ("7.1", "9.2", "room for 2355828"),
        ("3.5", "5.6", "room for 4977268"),
    ]


def test_each_way_to_train_and_to_serve_is_a_row():
    done = run("7b", "--gpus", "8", "--inference-gpus", "4")
    assert done.exit_code == 0
    assert [row[1] for row in rows(done.output)] == [
        "4 train, sync last", "4 train, sync every", "4 train, ckpt, sync last", "4 train, ckpt, sync every",
        "4 train, ckpt, sync every, offload", "1 per copy", "2 per copy", "4 per copy",
    ]  # fmt: skip


def test_a_row_shows_the_peak_and_whether_it_fits():
    setup = TrainingSetup(ranks=6, micro_tokens=8192, micro_batches=2, sync_gradients="every")
    peak = training_memory(SHAPES["7b"], setup).peak / GIB
    command = ["7b", "--gpus", "8", "--inference-gpus", "2", "--micro-token-budget", "8192", "--gpu-memory"]
    for memory, fits in ((peak / 0.9 + 0.1, "yes"), (peak / 0.9 - 0.1, "no")):
        row = next(row for row in rows(run(*command, f"{memory}").output) if row[1] == "6 train, sync every")
        assert row[7:9] == [f"{peak:.1f}", fits]


def test_the_activations_of_lora_are_called_an_upper_bound():
    for flags, is_said in ((["--lora-rank", "16"], True), ([], False)):
        note = rows(run("7b", "--gpus", "1", "--inference-gpus", "0", *flags).output)[0][9]
        assert ("activations are an upper bound" in note) == is_said


def test_copies_take_gpus_that_divide_the_heads():
    served = [row[1] for row in rows(run("1.5b", "--gpus", "32").output) if "per copy" in row[1]]
    assert served == ["1 per copy", "2 per copy", "4 per copy"]  # 12 heads


def test_what_does_not_fit_ends_with_1_and_says_what_takes_less():
    done = run("7b", "70b", "--gpus", "2", "--gpu-memory", "80")
    assert done.exit_code == 1
    assert "7b, 70b does not fit" in done.output and "--lora-rank" in done.output
    assert run("7b", "--gpus", "2", "--gpu-memory", "80", "--lora-rank", "16").exit_code == 0


def test_one_gpu_trains_and_generates_on_the_same_weights():
    done = run("135m", "--gpus", "1")
    assert done.exit_code == 0 and "0 to generate" in done.output
    assert all("tokens of the embedded engine" in row[-1] for row in rows(done.output))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Which model"),
        (["no-such-model"], "neither a config.json"),
        (["7b", "--gpus", "0"], "at least one GPU generates"),
        (["7b", "--inference-gpus", "8"], "at least one trains"),
        (["7b", "--inference-gpus", "0"], "at least one GPU generates"),
        (["7b", "--gpu-memory", "0"], "must be above 0"),
        (["7b", "--micro-token-budget", "2048"], "longest sample, --max-tokens 4096"),
    ],
)
def test_invalid_arguments_are_named(arguments, message):
    done = run(*arguments)
    assert isinstance(done.exception, ConfigError) and message in str(done.exception)


def test_planning_loads_no_torch():
    probe = "import sys; from ludic_ops.plan import plan; import ludic_ops.scaling; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout.strip() == "False"
