import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludic.cli.main import app
from ludic.cli.play import matching_action, read_settings
from ludic.types import ConfigError

runner = CliRunner()


def ludic(*arguments: str, typed: str | None = None) -> subprocess.CompletedProcess:
    """The real command in a real process."""
    return subprocess.run(
        [sys.executable, "-m", "ludic.cli.main", *arguments], input=typed, capture_output=True, text=True, timeout=60
    )


def test_a_person_can_play_to_the_end():
    result = runner.invoke(app, ["play", "tic_tac_toe", "--seed", "3"], input="b2\na1\nc3\na3\nc1\nb1\nb3\n")
    assert result.exit_code == 0, result.output
    assert "You are X" in result.output and "total reward" in result.output and '"result"' in result.output


def test_an_impossible_move_is_asked_again_instead_of_losing_the_game():
    result = runner.invoke(app, ["play", "tic_tac_toe", "--seed", "3"], input="z9\nquit\n")
    assert "Not possible here" in result.output and "A1, A2" in result.output and "Bye" in result.output


def test_the_end_of_input_ends_the_game_politely():
    result = runner.invoke(app, ["play", "tic_tac_toe"], input="b2\n")
    assert result.exit_code == 0 and "Bye" in result.output


def test_two_people_can_play_a_two_player_env():
    result = runner.invoke(app, ["play", "tic_tac_toe_duel", "--seed", "1"], input="a1\nb1\na2\nb2\na3\n")
    assert result.exit_code == 0, result.output
    assert "X: total reward +1" in result.output and "O: total reward -1" in result.output


def test_simultaneous_players_are_both_asked():
    typed = "coop\ndefect\n" * 2
    result = runner.invoke(app, ["play", "prisoners_dilemma", "--set", "rounds=2"], input=typed)
    assert result.exit_code == 0, result.output
    assert "player_0: total reward +0" in result.output and "player_1: total reward +10" in result.output


@pytest.mark.parametrize("env", ["tic_tac_toe", "tic_tac_toe_duel", "key_door", "prisoners_dilemma", "gsm8k"])
def test_a_scripted_agent_can_be_watched(env):
    result = runner.invoke(app, ["play", env, "--watch", "--seed", "1"])
    assert result.exit_code == 0, result.output
    assert "terminated" in result.output and "total reward" in result.output


def test_a_longer_game_can_be_watched_up_to_a_limit():
    result = runner.invoke(app, ["play", "twenty_forty_eight", "--watch", "--seed", "1", "--max-steps", "5"])
    assert "max_steps" in result.output and "5 turn(s)" in result.output


def test_samples_come_from_a_file(tmp_path: Path):
    data = tmp_path / "questions.jsonl"
    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+3?", "answer": "#### 5"}]
    data.write_text("\n".join(map(json.dumps, rows)))
    result = runner.invoke(app, ["play", "gsm8k", "--data", str(data), "--index", "1"], input="5\n")
    assert "2+3?" in result.output and "total reward +1" in result.output


def test_the_same_seed_shows_the_same_game():
    shown = [runner.invoke(app, ["play", "tic_tac_toe", "--watch", "--seed", "7"]).output for _ in range(2)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["play", "tictactoe"], "Did you mean 'tic_tac_toe'"),
        (["play", "tic_tac_toe", "--set", "agent_start=true"], "agent_starts: bool = True"),
        (["play", "tic_tac_toe", "--set", "opponent=god"], "random and minimax"),
        (["play", "tic_tac_toe", "--set", "opponent"], "name=value"),
        (["play", "gsm8k", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["parts", "envs"], "Did you mean 'env'"),
    ],
)
def test_a_mistake_is_one_helpful_line_and_no_traceback(arguments, message):
    done = ludic(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_line_that_is_not_there_or_not_json_is_named(tmp_path: Path):
    data = tmp_path / "q.jsonl"
    data.write_text("not json\n")
    assert "0 to 0" in ludic("play", "gsm8k", "--data", str(data), "--index", "4").stderr
    assert "not JSON" in ludic("play", "gsm8k", "--data", str(data)).stderr


def test_listings_name_what_there_is():
    assert "tic_tac_toe" in runner.invoke(app, ["envs"]).output
    assert "react" in runner.invoke(app, ["parts", "agent"]).output
    assert "grpo" in runner.invoke(app, ["parts", "algorithm"]).output


def test_settings_are_json_where_they_can_be():
    assert read_settings(["a=true", "b=3", "c=minimax", "d=[1, 2]", "e="]) == {
        "a": True, "b": 3, "c": "minimax", "d": [1, 2], "e": "",
    }  # fmt: skip
    with pytest.raises(ConfigError):
        read_settings(["=3"])


def test_what_a_person_types_is_matched_generously():
    assert matching_action("A1", ["A1", "A2"]) == "A1" and matching_action("a1", ["A1"]) == "A1"
    assert matching_action("u", ["up", "down"]) == "up" and matching_action("a", ["A1", "A2"]) is None
    assert matching_action("", ["up"]) is None and matching_action("anything", None) == "anything"
