"""The face of the command: greeting, list of commands, help pages, colours."""

import io
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from ludic.cli import main as cli
from ludic.cli.commands import commands
from ludic.cli.main import BASE, find_command
from ludic.cli.script import run_script
from ludic.cli.terminal import pages
from ludic.cli.terminal.colour import is_coloured
from ludic.cli.terminal.flags import flags_of_command
from tests.unit.cli.runner import invoke

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def rows(text: str, columns: int) -> int:
    """Lines on a terminal that wraps."""
    return sum(max(1, math.ceil(len(line) / columns)) for line in text.rstrip("\n").splitlines())


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_every_help_page_fits_one_screen(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in [["--help"], [], *([name, "--help"] for name in commands())]:
        shown = invoke(command)
        assert shown.exit_code == 0, shown.exception
        assert rows(shown.output, columns) <= 23 and max(map(len, shown.output.splitlines())) <= max(columns, 80), (
            command
        )


def test_help_names_every_command_and_help_all_says_what_each_does():
    short, long = invoke(["--help"]).output, invoke(["--help-all"]).output
    for name, command in commands().items():
        assert name in short and f"{name} " in long and command.summary in long


def test_help_all_has_every_flag_and_help_says_how_to_reach_them():
    flags = flags_of_command(find_command(["train"]))
    short, long = invoke(["train", "--help"]).output, invoke(["train", "--help-all"]).output
    assert len(flags) > 100 and all(flag.flag in long for flag in flags if not flag.is_positional)
    assert f"--help-all` has the other flags, {len(flags)} in all" in short and "--algo TEXT" in short
    assert "--micro-token-budget" not in short


def test_flags_as_data_are_what_tyro_reads():
    flags = {flag.name: flag for flag in flags_of_command(find_command(["train"]))}
    assert flags["target"].is_positional and not flags["target"].is_required
    assert flags["engine"].metavar == "{local,vllm,pipeline}" and flags["lr"].default == "1e-05"
    assert flags["data"].metavar == "PATH" and flags["set"].metavar == "NAME=VALUE"
    assert flags["save_rollouts"].spellings == ("--save-rollouts", "--no-save-rollouts")
    assert flags["dry_run"].spellings == ("--dry-run",) and not flags["dry_run"].metavar
    assert "id" not in flags and "league_every" not in flags  # the target has the id; a file has the league
    assert [flag.name for flag in flags_of_command(find_command(["serve"])) if flag.is_required] == ["model"]


def test_each_command_but_envs_shows_an_example_that_its_flags_allow():
    examples = {name: command.example for name, command in commands().items() if command.example}
    assert examples.keys() | {"envs"} == commands().keys()
    for name, example in examples.items():
        ludic, command, *words = example.split()
        flags = {flag.flag for flag in flags_of_command(find_command([name]))}
        assert (ludic, command) == ("ludic", name) and {word for word in words if word.startswith("-")} <= flags


def test_the_greeting_has_five_commands_that_exist():
    shown = invoke([])
    commands = [line.strip() for line in shown.output.splitlines() if line.startswith("     ludic ")]
    assert shown.exit_code == 0 and commands == [command for command, _ in pages.FIRST_STEPS] and len(commands) == 5
    for command in commands:
        name, *words = command.split()[1:]
        flags = {flag.flag for flag in flags_of_command(find_command([name]))}
        assert {word for word in words if word.startswith("-")} <= flags


@pytest.mark.parametrize(
    ("typed", "says"), [("trian", "Did you mean 'train'?"), ("xyzzy", "`ludic --help` lists them.")]
)
def test_a_wrong_command_is_answered_in_one_line(typed, says):
    error = str(invoke([typed]).exception)
    assert says in error and "\n" not in error


def test_messages_and_warnings_that_quote_others_cannot_control_the_terminal(tmp_path):
    (tmp_path / "evil\x1b[2J\u202e" / "rollouts").mkdir(parents=True)
    (tmp_path / "evil\x1b[2J\u202e" / "rollouts" / "x\x9b.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 no gzip")
    for place in (tmp_path, next(tmp_path.iterdir())):
        done = subprocess.run(
            [sys.executable, "-m", "ludic.cli.main", "show", place], capture_output=True, text=True, errors="strict"
        )
        assert done.returncode == 2 and "ludic: " in done.stderr and "\ufffd" in done.stderr
        assert not set(done.stderr) & {"\x1b", "\x9b", "\u202e"}
    assert "is damaged behind byte 0" in done.stderr


def test_a_closed_pipe_ends_the_command_quietly():
    ludic = f"{sys.executable} -m ludic.cli.main"
    done = subprocess.run(f"{ludic} --help-all | head -1", shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: ludic") and done.stderr == ""


def test_help_loads_the_standard_library_alone():
    code = (
        "import sys; from ludic.cli.main import find_command\n"
        "find_command(['--help'])([]), find_command([])([])\n"
        f"print({{'torch', *{BASE!r}}} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "set()", done.stderr


def test_a_missing_base_package_is_named_without_a_traceback():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {line.split(">")[0] for line in project["dependencies"]} == set(BASE)
    code = (
        "import sys; sys.modules['tyro'] = None; sys.argv = ['ludic', 'envs']; from ludic.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "'tyro' is missing" in done.stderr


CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 54.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 41.69 MiB is free. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_TEXT),
        torch.AcceleratorError("CUDA error: out of memory\nX"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_full_gpu_is_named_without_a_traceback(error, monkeypatch, capsys):
    def load(args):
        raise error

    monkeypatch.setattr(cli, "find_command", lambda args: load)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "expandable" not in said
    assert said.startswith("ludic: The GPU has no room. CUDA") and "`nvidia-smi` shows who holds" in said
    with pytest.raises(SystemExit, match="The GPU has no room. CUDA"):
        run_script(load)
    with pytest.raises(RuntimeError, match="tensor size"):
        run_script(lambda args: torch.ones(2) @ torch.ones(3))


# --- colours ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "settings", "coloured"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, True),
    ],
)
def test_one_function_decides_on_colours(stream, settings, coloured, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert is_coloured(stream) is coloured


@pytest.mark.parametrize("command", [[], ["train", "--help"], ["train", "--help-all"], ["envs"], ["doctor", "--help"]])
def test_escape_codes_are_written_where_colours_are_on_and_nowhere_else(command, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" not in invoke(command).output
    if command != ["envs"] and command != ["train", "--help-all"]:  # a plain table; tyro asks the stream itself
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert "\x1b[" in invoke(command).output
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b" not in invoke(command).output
