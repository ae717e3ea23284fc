"""What docs/results/presets.md says of several turns: the scripts run for one update, and in them the presets' own terms act."""

import json
from pathlib import Path

import pytest

from ludic.cli.train import train
from ludic.types import load_rollouts
from tests import programs

pytest.importorskip("torch", reason="the local extra is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "examples" / "configs"


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_echo_learns_observations_of_key_door_where_prompts_hold_all_turns(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    games = tmp_path / "games.jsonl"
    programs.load(ROOT / "examples" / "turn_credit" / "key_door.py").main(output=games, episodes=32, max_turns=20)
    common = ["--runs", str(tmp_path), "--steps", "1", "--checkpoint-every", "1", "--logger", "none"]
    window = ["--context-set", "max_turns=20"]
    warm_up = [str(CONFIGS / "key_door_warm_up.toml"), "--rollouts", str(games), "--name", "warm"]
    assert train([*warm_up, *window, *common]) == 0
    for name, turns in (("all", "20"), ("one", "1")):
        start = [str(CONFIGS / "key_door.toml"), "--model", str(tmp_path / "warm"), "--algo", "echo", "--name", name]
        flags = ["--context-set", f"max_turns={turns}", "--eval-every", "0", "--no-eval-at-start"]
        assert train([*start, *flags, *common]) == 0
    seen, unseen = (metrics(tmp_path / name)[0] for name in ("all", "one"))
    assert seen["train/observation/avg_observation_tokens"] > 50 and seen["train/observation/observation_logp_mean"] < 0
    assert unseen["train/observation/avg_observation_tokens"] == 0, "with one turn in a prompt ECHO is GRPO"


def test_branches_are_opened_trained_and_share_their_prefix(tmp_path, capsys):
    branching = programs.load(ROOT / "benchmarks" / "branching.py")
    settings = branching.Settings(
        seeds=(0,), earned_by=("episode",), warm_up=1, episodes=64, updates=1, eval_episodes=8, runs=tmp_path
    )
    branching.main(settings)
    script = list(load_rollouts(tmp_path / "script-0.jsonl"))
    found = [branching.branches(rollout) for rollout in script]
    opened = [own["opened"] for own in found]
    shared = [own["opened"] > 0 for own in found if own["sharing"] > 1]
    assert shared and all(shared), "what a branch returned to begins as the branch does"
    assert 0 < sum(opened) / len(opened) < branching.NUM_PAGES
    without = [rollout.total_reward for rollout, num in zip(script, opened, strict=True) if num == 0]
    assert max(without) == 0.5, "the main context has room for two pages"
    told = capsys.readouterr().out
    assert "grpo " in told and "fold_grpo" in told and "sharing" in told
    assert all(metrics(tmp_path / f"episode-{algo}-0")[1]["train/num_rollouts"] == 32 for algo in ("grpo", "fold_grpo"))


async def test_a_script_that_reads_all_pages_in_branches_earns_all(monkeypatch):
    branching = programs.load(ROOT / "benchmarks" / "branching.py")
    monkeypatch.setattr(branching, "SCRIPTED_BRANCHES", 1.0)
    rollout = await branching.scripted(0)
    assert rollout.total_reward == 1.0 and branching.branches(rollout)["opened"] == branching.NUM_PAGES
