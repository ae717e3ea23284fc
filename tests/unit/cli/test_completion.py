"""The completion scripts: bash completes in a real bash; zsh and fish read theirs without a complaint where they are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ludic import registry
from ludic.cli.main import COMMANDS
from tests.unit.cli.runner import invoke

ASK = """
source "$1"; shift
while [ $# -gt 0 ]; do
    IFS='|' read -ra COMP_WORDS <<< "$1|"
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
    _ludic; echo "${COMPREPLY[*]}"; shift
done
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("completion"), {}
    for shell in ("bash", "zsh", "fish"):
        shown = invoke(["completion", shell])
        assert shown.exit_code == 0, shown.exception
        made[shell] = folder / f"ludic.{shell}"
        made[shell].write_text(shown.output)
    return made


def completed(script: Path, *lines: str) -> list[list[str]]:
    """What bash offers for each line, whose words are separated by |; the last word is the one being typed."""
    command = ["bash", "--norc", "-i", "-c", ASK, "bash", str(script), *lines]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.split("\n")[: len(lines)]]


def test_bash_completes_commands_flags_choices_and_parts(scripts):
    asked = {
        "ludic|tr": ["train"],
        "ludic|train|tic_tac": [id for id in registry.list("env") if id.startswith("tic_tac")],
        "ludic|train|--algo-": ["--algo-set"],
        "ludic|train|tic_tac_toe|--algo|dr_": ["dr_grpo"],
        "ludic|train|x|--engine|=|v": ["vllm"],
        "ludic|train|x|--engine|=": ["local", "vllm", "pipeline"],
        "ludic|train|x|--dry-run|--res": ["--resume"],
        "ludic|train|--no-save": ["--no-save-rollouts", "--no-save-optimizer"],
        "ludic|train|--logger|tens": ["tensorboard"],
        "ludic|train|--dry-run|key_": [id for id in registry.list("env") if id.startswith("key_")],
        "ludic|parts|algo": ["algorithm"],
        "ludic|new|": ["env"],
        "ludic|completion|z": ["zsh"],
        "ludic|serve|--model|ti": ["tiny"],
        "ludic|train|x|--data|": [],
        "ludic|train|x|--steps|": [],
        "ludic|nothing|--a": [],
    }
    assert dict(zip(asked, completed(scripts["bash"], *asked), strict=True)) == asked


def test_bash_offers_every_command_and_the_general_flags(scripts):
    (offered,) = completed(scripts["bash"], "ludic|")
    assert set(offered) == {*COMMANDS, "--help", "--help-all", "--version"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_reads_its_script(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", scripts[shell]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes_in_fish(scripts):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    ask = f"source {scripts['fish']}; complete -C 'ludic tra'; complete -C 'ludic train x --engine v'; complete -C 'ludic parts algo'"
    done = subprocess.run(["fish", "--no-config", "-c", ask], capture_output=True, text=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["train", "vllm", "algorithm"], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_the_other_shells_have_every_command_and_env(scripts, shell):
    text = scripts[shell].read_text()
    assert all(name in text for name in (*COMMANDS, *registry.list("env"), *registry.list("algorithm")))
