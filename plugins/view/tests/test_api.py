"""The JSON API on a recorded run: what it says is what the files hold."""

import gzip
import json
import math
import re
import shutil

import numpy as np
import pytest

from ludic.types import (
    AgentStep,
    EnvironmentStep,
    Failure,
    ImageSpan,
    Rollout,
    TokenTrace,
    content_of,
    save_rollouts,
)
from ludic_envs.picture_grid import draw_grid
from ludic_view import api
from ludic_view.index import Runs
from ludic_view.tokens import TokenTexts
from plugins.view.tests.conftest import GROUP_SIZE, NUM_ROLLOUTS


def stored(recorded) -> dict[str, Rollout]:
    files = sorted((recorded / "letters" / "rollouts").glob("*.gz"))
    lines = [line for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    return {rollout.id: rollout for rollout in map(Rollout.from_json, lines)}


def ask(runs, path: str):
    found = api.answer(runs, path)
    json.dumps(found, allow_nan=False)  # plain JSON, whatever it holds
    return found


def test_runs_are_listed_with_their_settings_and_last_metrics(runs, recorded):
    found = ask(runs, "/api/runs")
    assert found["root"] == str(recorded)
    (run,) = found["runs"]
    assert (run["id"], run["state"], run["step"], run["steps_planned"]) == ("letters", "finished", 3, 3)
    assert run["model"] == "tiny" and run["algo"] == "grpo" and run["seed"] == 0
    assert "train/loss" in run["last"] and run["started"] <= run["updated"]


def test_a_run_that_an_error_has_ended_says_so(recorded, tmp_path):
    folder = tmp_path / "letters"
    shutil.copytree(recorded / "letters", folder)
    config = folder / "config.toml"
    config.write_text(re.sub(r"(?m)^steps = 3$", "steps = 9", config.read_text()))
    (run,) = ask(Runs(tmp_path), "/api/runs")["runs"]
    assert (run["state"], run["error"]) == ("running", None)
    for content, error in (
        ('{"error": "OSError: full"}', "OSError: full"),
        ("", "an error that could not be written down, since the disk was full"),
        ("{", None),
        ("[]", None),
        ('{"error": 5}', None),
    ):
        (folder / "failure.json").write_text(content)
        (run,) = ask(Runs(tmp_path), "/api/runs")["runs"]
        assert (run["state"], run["error"]) == ("failed" if error else "running", error)
    config.write_text(config.read_text().replace("steps = 9", "steps = 3"))  # it failed after its last step
    (folder / "failure.json").write_text("")
    assert ask(Runs(tmp_path), "/api/runs")["runs"][0]["state"] == "failed"


def test_run_says_what_it_has(runs):
    found = ask(runs, "/api/runs/letters")
    assert found["steps"] == [1, 3] and found["num_rollouts"] == 3 * NUM_ROLLOUTS
    assert found["has_tokens"] and found["has_text"] and found["is_complete"]
    assert "train/entropy" in found["metrics"] and found["config"]["algo"]["group_size"] == GROUP_SIZE


def test_metrics_are_columns_over_steps(runs):
    found = ask(runs, "/api/runs/letters/metrics?names=train/loss,nothing&since=1")
    assert found["steps"] == [2, 3]
    assert len(found["columns"]["train/loss"]) == 2 and found["columns"]["nothing"] == [None, None]
    assert len(ask(runs, "/api/runs/letters/metrics")["columns"]) > 20


def test_steps_count_what_the_rollouts_hold(runs, recorded):
    rows = ask(runs, "/api/runs/letters/steps")["steps"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    rewards = [rollout.total_reward for rollout in stored(recorded).values()]
    assert sum(row["reward_mean"] * row["num_rollouts"] for row in rows) == pytest.approx(sum(rewards))
    assert all(row["num_groups"] == NUM_ROLLOUTS // GROUP_SIZE and row["lag_max"] == 0 for row in rows)


def test_rollouts_are_filtered_sorted_and_paged(runs):
    def ids(query: str) -> list[str]:
        return [card["id"] for card in ask(runs, f"/api/runs/letters/rollouts?{query}")["rollouts"]]

    everything = ids("")
    assert len(everything) == 3 * NUM_ROLLOUTS
    assert ids("offset=3&limit=4") == everything[3:7] and ids("sort=-order") == everything[::-1]
    cards = ask(runs, "/api/runs/letters/rollouts?sort=-reward")["rollouts"]
    assert [c["reward"] for c in cards] == sorted((c["reward"] for c in cards), reverse=True)
    best = cards[0]["reward"]
    assert all(c["reward"] >= best for c in ask(runs, f"/api/runs/letters/rollouts?reward_min={best}")["rollouts"])
    assert set(ids("step=2")) == {c["id"] for c in cards if c["step"] == 2}
    assert set(ids(f"group={cards[0]['group']}")) == {c["id"] for c in cards if c["group"] == cards[0]["group"]}
    assert ids("failed=1") == [] and ids("parse_error=1") == [] and ids("failed=0") == everything
    assert ids("stop=terminated") == everything and ids("stop=max_steps") == []


def test_text_is_found_in_replies_and_prompts_and_not_in_the_json_around_them(runs, recorded):
    rollout = next(iter(stored(recorded).values()))
    action = rollout.agent_steps[0].action
    from urllib.parse import quote

    found = ask(runs, f"/api/runs/letters/rollouts?text={quote(action)}")
    assert rollout.id in {card["id"] for card in found["rollouts"]}
    assert ask(runs, "/api/runs/letters/rollouts?text=spell+ABC")["total"] == 3 * NUM_ROLLOUTS
    assert ask(runs, "/api/runs/letters/rollouts?text=prompt_messages")["total"] == 0


def test_a_rollout_with_pictures_is_searched_and_shows_them(recorded, tmp_path):
    shutil.copytree(recorded / "letters", tmp_path / "letters")
    picture = draw_grid(2, 8, 1)
    content = content_of("Which cell is red?", picture)
    trace = TokenTrace([1, 2, 3], [4], [-1.0], images=[ImageSpan(picture, 1, 2)])
    call = AgentStep(
        index=0, prompt_messages=[{"role": "user", "content": content}], action="2", trace=trace, turn_id="t"
    )
    then = EnvironmentStep(
        index=1, prev_obs=content, action="2", parsed_action="2", next_obs=content, source_agent_step_id=call.id,
        agent_step_ids=[call.id], reward=1.0, trace=trace, turn_id="t",
    )  # fmt: skip
    rollout = Rollout(steps=[call, then], meta={"engine": {}})
    save_rollouts([rollout], next((tmp_path / "letters" / "rollouts").iterdir()))
    runs = Runs(tmp_path)
    assert ask(runs, "/api/runs/letters/rollouts?text=cell+is+red")["total"] == 1
    (turn,) = ask(runs, f"/api/runs/letters/rollouts/{rollout.id}")["turns"]
    shown, env = turn["steps"]
    assert shown["messages_new"][0]["content"] == content and env["obs"] == content


@pytest.mark.parametrize("values", [[], [1.0], [0.0, 1.0, 1.0], list(range(100)), [2.0, 2.0]])
def test_histogram_counts_each_value_once(values):
    found = api.histogram(values)
    assert sum(found["counts"]) == len(values)
    assert found["edges"] == sorted(found["edges"])


def test_groups_are_those_with_a_matching_rollout(runs):
    everything = ask(runs, "/api/runs/letters/groups")
    assert everything["total"] > 0
    (first, *_) = everything["groups"]
    found = ask(runs, f"/api/runs/letters/groups?group={first['group']}")
    assert [row["group"] for row in found["groups"]] == [first["group"]]
    assert ask(runs, "/api/runs/letters/groups?text=nowhere-to-be-found")["total"] == 0


def test_a_bin_per_value_is_named_by_its_value():
    assert api.histogram([1.0, 0.0, 1.0, -0.5])["values"] == [-0.5, 0.0, 1.0]
    assert api.histogram([2.0, 2.0])["values"] == [2.0]
    assert "values" not in api.histogram([float(n) for n in range(100)])


def test_group_has_its_siblings_and_their_tree(runs, recorded):
    rows = ask(runs, "/api/runs/letters/groups?step=2&sort=-spread")["groups"]
    assert [row["spread"] for row in rows] == sorted((row["spread"] for row in rows), reverse=True)
    group = ask(runs, f"/api/runs/letters/groups/{rows[0]['group']}")
    assert [card["id"] for card in group["cards"]] == rows[0]["rollouts"] and len(group["cards"]) == GROUP_SIZE
    rollouts, nodes = stored(recorded), group["tree"]["nodes"]
    for number, id in enumerate(rows[0]["rollouts"]):  # every path from the root spells a rollout's tokens
        trace = rollouts[id].sampling_steps[-1].trace
        path = [node for node in nodes if number in node["rollouts"]]
        assert sum(node["length"] for node in path) == len(trace.prompt_token_ids) + len(trace.completion_token_ids)
        assert [node["start"] for node in path] == list(np.cumsum([0, *(n["length"] for n in path[:-1])]))
        sampled = sum(node["length"] for node in path if node["is_action"])
        assert sampled == sum(len(step.trace.completion_token_ids) for step in rollouts[id].sampling_steps)
        assert [node["id"] for node in path if number in node["ends"]] == [path[-1]["id"]]
    root = next(node for node in nodes if node["parent"] is None)
    assert len(root["rollouts"]) == GROUP_SIZE and "Spell abc." in root["text"] and not root["is_action"]
    difference = group["first_difference"]
    first = [rollouts[id].sampling_steps[0].trace for id in rows[0]["rollouts"]]
    same = [len(set(ids)) == 1 for ids in zip(*(t.completion_token_ids.tolist() for t in first), strict=False)]
    assert (difference["call"], difference["token"]) == (0, same.index(False)) and difference["is_action"]


def test_rollout_has_every_token_with_what_the_trainer_computed(runs, recorded):
    rollouts = stored(recorded)
    for id in list(rollouts)[::5]:
        shown = ask(runs, f"/api/runs/letters/rollouts/{id}?context=1")
        rollout, step = rollouts[id], shown["step"]
        with np.load(recorded / "letters" / "trained" / f"step_{step:06d}.rank0.npz") as record:
            place = record["rollout_id"].tolist().index(id.encode())
            end = int(record["num_tokens"][: place + 1].sum())
            logp = record["logp"][end - record["num_tokens"][place] : end]
            weight = record["weight"][place]
        calls = [step for turn in shown["turns"] for step in turn["steps"] if step["kind"] == "call"]
        tokens = {name: [value for call in calls for value in call["tokens"][name]] for name in calls[0]["tokens"]}
        assert tokens["id"] == [i for s in rollout.sampling_steps for i in s.trace.completion_token_ids.tolist()]
        np.testing.assert_allclose(tokens["trainer_logprob"], logp, rtol=1e-5)
        np.testing.assert_allclose(tokens["advantage"], weight, rtol=1e-5)
        np.testing.assert_allclose(tokens["ratio"], 1, atol=1e-3)  # on-policy
        assert set(tokens["mask"]) == {1} and set(tokens["clipped"]) == {0}
        assert set(tokens["version"]) == {step - 1} and min(tokens["entropy"]) > 0
        texts = ["".join(call["tokens"]["text"]).removesuffix("<|end|>") for call in calls]
        assert all(call["action"] in text or "<|" in text for call, text in zip(calls, texts, strict=True))
        assert "".join(shown["prompt"]["text"]).startswith("<|user|>Spell abc.")
        whole = [i for call in calls for i in (*call["context"]["id"], *call["tokens"]["id"])]
        last = rollout.sampling_steps[-1].trace
        assert whole == [*last.prompt_token_ids.tolist(), *last.completion_token_ids.tolist()]
        assert [turn["reward"] for turn in shown["turns"]] == [turn.reward for turn in rollout.turns()]
        assert sum(turn["reward"] for turn in shown["turns"]) == pytest.approx(shown["reward"])


def test_call_shows_the_messages_that_it_adds(runs):
    id = ask(runs, "/api/runs/letters/rollouts?limit=1")["rollouts"][0]["id"]
    first, second = (turn["steps"] for turn in ask(runs, f"/api/runs/letters/rollouts/{id}")["turns"])
    assert [m["role"] for m in first[0]["messages_new"]] == ["user"]
    assert [m["role"] for m in second[0]["messages_new"]] == ["assistant", "user"]
    assert first[1]["kind"] == "env" and first[1]["obs"] == "Again." and second[1]["terminated"]


def test_task_is_followed_over_all_updates(runs):
    (task,) = ask(runs, "/api/runs/letters/tasks")["tasks"]  # every episode has the same first prompt
    assert task["steps"] == [1, 2, 3] and task["num_rollouts"] == 3 * NUM_ROLLOUTS
    assert task["step_last"] == 3 and task["num_failed"] == 0 and len(task["rewards"]) == 3
    assert task["trend"] == pytest.approx((task["rewards"][2] - task["rewards"][0]) / 2)
    from urllib.parse import quote

    shown = ask(runs, f"/api/runs/letters/tasks/{quote(task['task'], safe='')}")
    assert [row["step"] for row in shown["by_step"]] == [1, 2, 3]
    assert all(len(row["rewards"]) == len(row["rollouts"]) == NUM_ROLLOUTS for row in shown["by_step"])


def test_tasks_have_their_statistics_over_the_run(tmp_path):
    def played(task: str, version: int, reward: float, failure: Failure | None = None) -> Rollout:
        text = f"question of {task}"
        trace = TokenTrace([1], [2], [-0.1], "stop", [(version, 1)])
        call = AgentStep(index=0, prompt_messages=[{"role": "user", "content": text}], action="x", trace=trace)
        end = EnvironmentStep(
            index=1, prev_obs=None, action="x", parsed_action="x", next_obs=None, source_agent_step_id=call.id,
            agent_step_ids=[call.id], reward=reward, terminated=True, trace=trace,
        )  # fmt: skip
        return Rollout(steps=[call, end], meta={"task_id": task}, failure=failure)

    folder = tmp_path / "runs" / "quiz"
    (folder / "rollouts").mkdir(parents=True)
    failed = Failure(error="KeyError", message="gone")
    found = [played("rises", step, 0.5 * step) for step in range(3)] + [
        played("falls", step, 1.0 - step) for step in range(2)
    ]
    found += [played("rises", 2, 0.0, failed), played("breaks", 1, 0.0, failed)]
    save_rollouts(found, folder / "rollouts" / "from_step_000000.jsonl")
    runs = Runs(tmp_path / "runs")
    rows = {row["task"]: row for row in ask(runs, "/api/runs/quiz/tasks")["tasks"]}
    rises, falls, breaks = rows["rises"], rows["falls"], rows["breaks"]
    assert rises["rewards"] == [0.0, 0.5, 1.0] and rises["trend"] == pytest.approx(0.5), (
        "a failed episode has no reward"
    )
    assert (rises["num_rollouts"], rises["num_failed"], rises["step_last"], rises["reward_mean"]) == (4, 1, 3, 0.5)
    assert (falls["gain"], falls["trend"], falls["step_last"]) == (-1.0, -1.0, 2)
    assert breaks["rewards"] == [None] and breaks["reward_mean"] is None and breaks["trend"] is None

    def order(sort: str) -> list[str]:
        return [row["task"] for row in ask(runs, f"/api/runs/quiz/tasks?sort={sort}")["tasks"]]

    assert order("trend") == ["falls", "rises", "breaks"] and order("-trend") == ["rises", "falls", "breaks"]
    assert order("-step_last")[0] == "rises" and order("-num_failed")[-1] == "falls"


def test_time_has_a_bar_per_episode(runs):
    found = ask(runs, "/api/runs/letters/time?step=1")
    assert len(found["episodes"]) == found["total"] == NUM_ROLLOUTS
    assert all(bar["started_ns"] <= bar["ended_ns"] for bar in found["episodes"])
    assert sum(found["lag_histogram"]["counts"]) == NUM_ROLLOUTS and found["pipeline"] is None


@pytest.mark.parametrize(
    "path",
    ["/api/runs/none", "/api/runs/letters/rollouts/none", "/api/runs/letters/groups/none", "/api/runs/letters/tasks/x",
     "/api/nothing", "/api/runs/letters/nothing", "/api/runs/..%2Fletters", "/api/runs/letters%2F..%2Fletters"],
)  # fmt: skip
def test_what_is_not_there_is_not_found(runs, path):
    with pytest.raises(api.NotFound):
        api.answer(runs, path)


@pytest.mark.parametrize(
    "query",
    ["step=x", "reward_min=nan", "limit=-1", "offset=-2", "sort=color", "reward_max=inf", "limit=1e9",
     *(f"{name}={'9' * 400}" for name in ("step", "offset", "limit", "reward_min"))],
)  # fmt: skip
def test_parameter_that_cannot_be_used_is_named(runs, query):
    with pytest.raises(api.BadQuery, match=query.partition("=")[0]):
        api.answer(runs, f"/api/runs/letters/rollouts?{query}")


def test_since_that_cannot_be_used_is_named(runs):
    with pytest.raises(api.BadQuery, match="since"):
        api.answer(runs, f"/api/runs/letters/metrics?since={'9' * 400}")


class HalfBytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["", "plain", "né", "日本 ok", "a🎲b", "🎲"])
def test_token_texts_join_to_the_text_and_no_half_character_shows(text):
    pieces = TokenTexts(HalfBytes()).of(list(text.encode()))
    assert "".join(pieces) == text and len(pieces) == len(text.encode())


def test_token_texts_end_with_what_never_became_a_character():
    assert "".join(TokenTexts(HalfBytes()).of(list("é".encode()[:1]))) == "\ufffd"


def test_numbers_that_json_does_not_have_are_null():
    from ludic_view.tokens import numbers

    assert numbers(np.array([1.0, math.nan, math.inf, -0.123456789])) == [1.0, None, None, -0.123457]


# --- records of several ranks and other samples ---------------------------------------------------------------------


def test_records_of_several_ranks_are_read_together(recorded, tmp_path, runs):
    shutil.copytree(recorded / "letters", tmp_path / "letters")
    file = tmp_path / "letters" / "trained" / "step_000002.rank0.npz"
    with np.load(file) as record:
        arrays = dict(record)
    half, tokens, weights = 3, int(arrays["num_tokens"][:3].sum()), int(arrays["num_weights"][:3].sum())
    ends = dict.fromkeys(("rollout_id", "segment", "num_tokens", "num_weights"), half)
    ends |= dict.fromkeys(("logp", "entropy", "gradient"), tokens) | {"weight": weights}
    np.savez(file, **{name: values[: ends[name]] for name, values in arrays.items()})
    np.savez(file.with_name("step_000002.rank1.npz"), **{name: values[ends[name] :] for name, values in arrays.items()})
    split = Runs(tmp_path)
    for card in ask(runs, "/api/runs/letters/rollouts?step=2")["rollouts"]:
        path = f"/api/runs/letters/rollouts/{card['id']}"
        assert ask(split, path)["turns"] == ask(runs, path)["turns"]


def test_sample_that_was_cut_has_null_behind_the_cut(recorded, tmp_path):
    shutil.copytree(recorded / "letters", tmp_path / "letters")
    file = tmp_path / "letters" / "trained" / "step_000001.rank0.npz"
    with np.load(file) as record:
        arrays = dict(record)
    num = int(arrays["num_tokens"][0])
    keep = np.ones(len(arrays["logp"]), dtype=bool)
    keep[num - 3 : num] = False
    arrays |= {name: arrays[name][keep] for name in ("logp", "entropy", "gradient")}
    arrays["num_tokens"][0] -= 3
    np.savez(file, **arrays)
    shown = ask(Runs(tmp_path), f"/api/runs/letters/rollouts/{arrays['rollout_id'][0].decode()}")
    tokens = [step["tokens"] for turn in shown["turns"] for step in turn["steps"] if step["kind"] == "call"]
    logps = [value for call in tokens for value in call["trainer_logprob"]]
    assert logps[-3:] == [None] * 3 and None not in logps[:-3]
    assert [m for call in tokens for m in call["mask"]] == [1] * (num - 3) + [0] * 3
