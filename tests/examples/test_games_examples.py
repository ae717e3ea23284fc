"""The examples of the games as separate processes: a script plays the built-in game of each, and wins."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ludic import registry
from ludic.types import load_rollouts

pytestmark = pytest.mark.skipif(
    not {"game_boy", "rustorio"} <= {*registry.envs.list()},
    reason="the packages in environments/ are not installed; make does it",
)

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 120


def start(script: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S)


def test_the_game_boy_script_finds_key_and_door_and_its_episode_can_be_read_again(tmp_path):
    pytest.importorskip("pyboy")
    out = tmp_path / "played.jsonl"
    done = start("game_boy/play_game_boy.py", "--summarise-after", 1, "--show", "--output", out)
    assert done.returncode == 0, done.stderr
    assert "> right 2 down 2 right 2 up 2 right 5" in done.stdout and "[write_note" in done.stdout
    assert (
        "reward 1, terminated, 2 turns, milestones: found the key, left by the door, presses left: 1976" in done.stdout
    )
    (rollout,) = load_rollouts(out)
    assert rollout.total_reward == 1.0
    assert [step.info.get("summary", False) for step in rollout.agent_steps] == [False, True, False, False]


def test_a_missing_cartridge_is_one_line(tmp_path):
    done = start("game_boy/play_game_boy.py", "--rom", tmp_path / "red.gb")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.match(r"play_game_boy: Cannot read the ROM .*red\.gb.*Ludic ships no games", done.stderr)


@pytest.mark.skipif(
    shutil.which("rustc") is None or shutil.which("bwrap") is None,
    reason="needs a Rust toolchain and bubblewrap (apt-get install cargo bubblewrap)",
)
def test_the_rustorio_script_errs_three_times_and_wins():
    done = start("rustorio/play_rustorio.py", "--par-ticks", 13)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "reward 0.75, terminated, programs: refused, compile_error, panicked, won, ticks: 26"


def test_a_missing_crate_is_one_line(tmp_path):
    done = start("rustorio/play_rustorio.py", "--game", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("play_rustorio: There is no crate in")
