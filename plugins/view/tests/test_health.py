"""Advisories: each has a run that raises it, and a healthy run has none."""

import json

import pytest

from ludic.training.causes import why_nothing_was_learned
from ludic.util.line_writer import LineWriter
from ludic_view.health import PARITY_TOLERANCE, advisories
from ludic_view.index import RunIndex
from plugins.view.tests.test_index import line_of

SECOND = 10**9
FINE = {"train/loss": 0.1, "train/grad_norm": 1.0, "train/entropy": 1.0, "train/logp_difference_abs": 0.001, "train/ess": 0.99,
        "train/clip_frac": 0.01, "train/num_stale": 0.0, "train/lag_max": 0.0}  # fmt: skip


def run_of(tmp_path, *, change=lambda number, row: None, metrics=lambda step: {}, steps=12, config="") -> list[dict]:
    """The advisories of a run of two groups of four per update; `change` edits a rollout before it is stored."""
    folder = tmp_path / "a b"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(config or "[rollouts]\nmax_failed_share = 0.5\n")
    writer = LineWriter(folder / "rollouts" / "from_step_000000.jsonl")
    for number in range(8 * steps):
        row = json.loads(line_of(number, version=number // 8, reward=float(number % 2)))
        row["steps"][0]["ts_ns"] = (number // 8 * 100 + number % 8) * SECOND + 10**18
        change(number, row)
        writer.append(json.dumps(row).encode() + b"\n")
    lines = [json.dumps({"step": s, "time": float(s), **FINE, **metrics(s)}) for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    index = RunIndex("a b", folder)
    index.refresh(float("inf"))
    return advisories(index)


def test_an_error_that_ended_the_run_is_shown(tmp_path):
    run_of(tmp_path)
    (tmp_path / "a b" / "failure.json").write_text('{"error": "OSError: the disk is full"}')
    index = RunIndex("a b", tmp_path / "a b")
    index.refresh(float("inf"))
    found = only(advisories(index), "failed_run")
    assert found["detail"] == "OSError: the disk is full" and found["level"] == "error"


def only(found: list[dict], code: str) -> dict:
    assert [each["code"] for each in found] == [code]
    assert found[0]["advice"] and found[0]["title"] and found[0]["detail"]
    assert found[0]["link"].startswith("#/run/a%20b/")
    return found[0]


def test_healthy_run_has_none(tmp_path):
    assert run_of(tmp_path) == []


def test_groups_of_one_reward(tmp_path):
    found = only(
        run_of(tmp_path, change=lambda n, row: row.update(total_reward=0.0 if n % 16 < 12 else n % 2)), "zero_spread"
    )
    assert found["level"] == "warning" and "zero_spread=1" in found["link"] and found["step"] is not None


def test_groups_of_one_reward_long_ago_are_forgotten(tmp_path):
    assert run_of(tmp_path, change=lambda n, row: row.update(total_reward=0.0) if n < 40 else None) == []


def test_truncation(tmp_path):
    def cut(number, row):
        if number % 3 == 0:
            row["stop"] = "max_steps"

    assert "max_steps" in only(run_of(tmp_path, change=cut), "truncation")["detail"]


def test_reply_that_ran_out_of_tokens_counts_as_truncated(tmp_path):
    def cut(number, row):
        row["steps"][0]["trace"]["finish_reason"] = "length"

    assert "max_tokens" in only(run_of(tmp_path, change=cut), "truncation")["detail"]


@pytest.mark.parametrize("setting", ['cut_off = "read"', "max_tokens = 1"])
def test_replies_that_are_read_as_they_are_count_only_if_their_episode_was_cut(tmp_path, setting):
    def cut(number, row):
        row["steps"][0]["trace"]["finish_reason"] = "length"

    config = f"[rollouts]\nmax_failed_share = 0.5\n[agent]\n{setting}\n"
    assert run_of(tmp_path / "replies", change=cut, config=config) == []
    ended = run_of(tmp_path / "episodes", change=lambda n, row: row.update(stop="max_steps"), config=config)
    assert "max_steps" in only(ended, "truncation")["detail"]


def test_parse_errors(tmp_path):
    def unreadable(number, row):
        row["steps"][0]["info"] = {"parse_error": number % 2 == 0}

    assert "50%" in only(run_of(tmp_path, change=unreadable), "parse_errors")["title"]


def test_a_few_unread_replies_do_not_hide_that_groups_have_one_reward(tmp_path):
    def one_of_ten(number, row):
        row["steps"] = [row["steps"][0] | {"index": n, "turn_id": str(n)} for n in range(10)]
        row["steps"][4] = row["steps"][4] | {"info": {"parse_error": number % 10 < 5}}
        row["total_reward"] = 0.0

    found = run_of(tmp_path, change=one_of_ten, metrics=lambda step: {"train/grad_norm": 0.0})
    assert [each["code"] for each in found] == ["zero_spread", "parse_errors"]


@pytest.mark.parametrize(("finish", "code"), [("stop", "parse_errors"), ("length", "truncation")])
def test_replies_of_which_none_is_read_are_the_only_cause_by_their_name(tmp_path, finish, code):
    def unread(number, row):
        row["steps"][0]["info"] = {"parse_error": True}
        row["steps"][0]["trace"]["finish_reason"] = finish
        row["total_reward"] = 0.0

    only(run_of(tmp_path, change=unread, metrics=lambda step: {"train/grad_norm": 0.0}), code)


IDLE = {"train/grad_norm": 0.0, "train/zero_weight_rate": 1.0, "train/parse_error_rate": 0.0, "train/same_reply_rate": 0.05,
        "train/unreadable_rate": 0.0, "train/total_reward_std": 0.4, "train/avg_total_reward": 0.5}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "the reward seems to ignore the reply"),
        ({"train/same_reply_rate": 1.0}, "All replies to one task were the same"),
        ({"train/total_reward_std": 0.0}, "All episodes earned the same reward, 0.5"),
    ],
)
def test_groups_of_one_reward_have_the_cause_that_the_terminal_names(tmp_path, facts, says):
    rows = [IDLE | facts] * 12
    found = run_of(
        tmp_path, change=lambda n, row: row.update(total_reward=n // 4 % 2), metrics=lambda step: IDLE | facts
    )
    advice = only([each for each in found if each["code"] != "solved"], "zero_spread")["advice"]
    assert says in advice and advice in (why_nothing_was_learned(rows) or "")


def test_replies_that_are_cut_and_some_unreadable_get_the_advice_of_the_terminal(tmp_path):
    def unread(number, row):
        row["steps"][0]["info"] = {"parse_error": True}
        row["steps"][0]["trace"]["finish_reason"] = "stop" if number % 4 == 0 else "length"
        row["total_reward"] = 0.0

    metrics = IDLE | {"train/parse_error_rate": 1.0, "train/unreadable_rate": 0.25}
    for number, setting in enumerate(("cut_off = 'read'", "max_tokens = 8")):
        found = run_of(
            tmp_path / str(number), change=unread, metrics=lambda step: metrics, config=f"[agent]\n{setting}\n"
        )
        assert "--max-tokens" in only(found, "truncation")["advice"]
    assert "--max-tokens" in (why_nothing_was_learned([metrics]) or "")


@pytest.mark.parametrize(
    ("metrics", "code", "level", "says"),
    [
        ({"train/logp_difference_abs": 0.2}, "mismatch", "warning", "by 0.200 nats"),
        ({"train/ess": 0.2}, "ess", "warning", "Only 20% of the tokens"),
        ({"train/clip_frac": 0.6}, "clipping", "info", "clips 60%"),
        ({"train/grad_norm": 0.0}, "no_gradient", "warning", "5 of the last 5"),
        ({"train/num_stale": 3.0}, "stale", "warning", "15 samples"),
        ({"train/lag_max": 2.0}, "lag", "info", "max_lag=2"),
    ],
)
def test_a_metric_beyond_its_limit(tmp_path, metrics, code, level, says):
    found = only(run_of(tmp_path, config="[rollouts]\nmax_lag = 2\n", metrics=lambda step: metrics), code)
    assert found["level"] == level and says in found["title"]


def test_collapse_of_entropy(tmp_path):
    found = only(
        run_of(tmp_path, metrics=lambda step: {"train/entropy": 0.8**step / 2 if step > 5 else 1.0}), "entropy_collapse"
    )
    assert found["step"] == 12


def test_entropy_that_falls_within_three_updates_is_the_cause_and_says_where_it_began(tmp_path):
    entropies = [4.6, 2.0, 0.0008]
    found = run_of(
        tmp_path,
        change=lambda n, row: row.update(total_reward=0.0) if n >= 24 else None,
        metrics=lambda step: {"train/entropy": entropies[min(step, 3) - 1], "train/grad_norm": float(step < 4)},
    )
    collapse = only(found, "entropy_collapse")
    assert "from 4.6 to 0.0008" in collapse["title"] and collapse["advice"].startswith("Lower --lr")


def test_a_solved_run_is_said_to_be_solved_and_nothing_else(tmp_path):
    found = run_of(
        tmp_path,
        change=lambda n, row: row.update(total_reward=1.0) if n >= 40 else None,
        metrics=lambda step: {"train/entropy": 1 / step**2, "train/grad_norm": float(step < 6)},
    )
    solved = only(found, "solved")
    assert solved["level"] == "info" and "best reward, 1," in solved["title"]


def test_failed_episodes_are_not_groups_of_one_reward(tmp_path):
    def fail(number, row):
        if number >= 56:
            row |= {"failure": {"error": "KeyError", "message": "'x'"}, "stop": "failed", "total_reward": 0.0}

    only(run_of(tmp_path, change=fail), "failed_episodes")


def test_entropy_of_a_short_run_is_not_judged(tmp_path):
    assert run_of(tmp_path, steps=4, metrics=lambda step: {"train/entropy": 0.01**step}) == []


@pytest.mark.parametrize(("every", "level"), [(8, "warning"), (80, "info")])
def test_failed_episodes(tmp_path, every, level):
    def fail(number, row):
        if number % every == 0:
            row |= {"failure": {"error": "TimeoutError", "message": "env.step took 600 s"}, "stop": "failed"}

    found = only(run_of(tmp_path, change=fail), "failed_episodes")
    assert found["level"] == level and "TimeoutError: env.step took 600 s" in found["detail"]
    assert found["link"].startswith("#/run/a%20b/rollout/r")


def test_stragglers(tmp_path):
    def late(number, row):
        if number % 8 == 7:
            row["steps"][0]["ts_ns"] += 60 * SECOND

    found = only(run_of(tmp_path, change=late), "stragglers")
    assert "of 67 s" in found["title"] and "time?step=" in found["link"]


def test_stale_samples_of_a_run_without_a_readable_limit_name_none(tmp_path):
    assert "max_lag" not in only(run_of(tmp_path, metrics=lambda step: {"train/num_stale": 3.0}), "stale")["detail"]


def test_damaged_lines(tmp_path):
    def damage(number, row):
        if number == 3:
            row["steps"] = "gone"

    only(run_of(tmp_path, change=damage), "damaged")


def test_warnings_come_first(tmp_path):
    found = run_of(tmp_path, metrics=lambda step: {"train/clip_frac": 0.6, "train/grad_norm": 0.0})
    assert [each["level"] for each in found] == ["warning", "info"]


def test_run_without_anything_has_no_advisory(tmp_path):
    (tmp_path / "rollouts").mkdir()
    index = RunIndex("x", tmp_path)
    index.refresh()
    assert advisories(index) == []


def test_the_tolerance_of_the_mismatch_is_the_trainers():
    from ludic.training.config import TrainerConfig

    assert TrainerConfig().parity_tolerance == PARITY_TOLERANCE
