"""OpenEnv's training traces, schema 1, as rollouts and as items."""

import gzip
import json

import numpy as np
import pytest

from ludic.batch_gen import OfflineBatchSource, stitch_rollout
from ludic.batch_gen.training_traces import read_training_traces, rollout_of_trace
from ludic.training import make_reinforce
from ludic.types import ConfigError, save_rollouts


def turn(node, prompt, sampled, mask, *, sampling=None, text="said"):
    return {
        "node_id": node,
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": [-0.1 * (i + 1) for i in range(len(sampled))],
        "loss_mask": [0] * len(prompt) + mask,
        "request": {"messages": [{"role": "user", "content": "task"}], "tools": None},
        "response": {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]},
        "metadata": {"sampling_params": {"temperature": 0.7, "top_p": 1.0, **(sampling or {})}},
    }


def trace(*turns, **more):
    return {"schema_version": 1, "turns": list(turns), **more}


TWO_TURNS = trace(turn("a", [1, 2], [3, 4], [1, 1]), turn("b", [1, 2, 3, 4, 5], [6, 7, 8], [1, 0, 1]), reward=0.5)


def items(rollout):
    return stitch_rollout(rollout, {(rollout.id, step.index): 1.0 for step in rollout.steps})


def test_calls_of_one_conversation_become_one_item_and_masked_tokens_are_state():
    rollout = rollout_of_trace(TWO_TURNS)
    assert rollout.total_reward == 0.5 and len(rollout.turns()) == 2
    (item,) = items(rollout)
    assert item.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert item.action_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    np.testing.assert_allclose(item.attachments.actor_logps.token_logps, [-0.1, -0.2, -0.1, -0.3], rtol=1e-6)
    assert item.attachments.temperature == 0.7 and item.attachments.untrainable_sampling is None
    assert rollout.sampling_steps[-1].trace.finish_reason == "stop"


def test_cut_distributions_are_marked():
    found = rollout_of_trace(trace(turn("a", [1], [2], [1], sampling={"top_p": 0.9, "top_k": -1}), reward=0))
    assert found.sampling_steps[0].trace.untrainable_sampling == "top_p=0.9"


def test_harbor_export_brings_reward_and_task(tmp_path):
    entry = turn("a", [1], [2], [1])
    entry["metadata"]["node_id"] = entry.pop("node_id")
    export = {
        "schema_version": 1,
        "task_id": "t1",
        "harness": "h",
        "reward": 1.0,
        "trace_entries": [entry],
        "turns": [],
    }
    path = tmp_path / "export.json"
    path.write_text(json.dumps(export, indent=2))
    (rollout,) = read_training_traces(path)
    assert (rollout.total_reward, rollout.group_id) == (1.0, "t1")
    assert rollout.meta["openenv"] == {"task_id": "t1", "harness": "h"}


async def test_file_of_traces_is_trained_from(tmp_path):
    traces = tmp_path / "traces.jsonl.gz"
    with gzip.open(traces, "wt") as file:
        file.writelines(json.dumps({**TWO_TURNS, "reward": None, "task_id": n // 2}) + "\n" for n in range(4))
    rollouts = list(read_training_traces(traces, rewards=[1, 0, 1, 0]))
    assert [r.group_id for r in rollouts] == ["0", "0", "1", "1"]
    save_rollouts(rollouts, tmp_path / "rollouts.jsonl")
    source = OfflineBatchSource(tmp_path / "rollouts.jsonl", algorithm=make_reinforce(), batch_size=4)
    batch = await source.next_batch()
    assert sorted(item.weight for item in batch.items) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"schema_version": 2, "turns": []}, "schema_version is 2"),
        ([1], "schema_version is None"),
        ({"schema_version": 1, "reward": 1}, "neither `turns`"),
        (trace(turn("a", [1], [2], [1])), "its reward is None"),
        (trace(turn("a", [1], [2], [1]), reward=float("nan")), "its reward is nan"),
        (trace(turn("a", [1], [2], [1]), turn("a", [1], [2], [1]), reward=1), "same node_id twice"),
        (trace(turn("a", [1], [2], [1, 1]), reward=1), "loss_mask"),
        (trace({**turn("a", [1], [2], [1]), "loss_mask": [1, 1]}, reward=1), "loss_mask"),
        (trace({**turn("a", [1], [2], [1]), "per_token_logps": []}, reward=1), "0 log-probs"),
        (trace({**turn("a", [1], [2], [1]), "prompt_token_ids": "12"}, reward=1), "prompt_token_ids"),
    ],
)
def test_damaged_traces_are_refused_with_their_place(tmp_path, document, problem):
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(TWO_TURNS) + "\n" + json.dumps(document) + "\n")
    with pytest.raises(ConfigError, match="Line 2 of") as caught:
        list(read_training_traces(path))
    assert problem in str(caught.value)


def test_file_and_rewards_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "traces.jsonl"
    with pytest.raises(ConfigError, match="no file"):
        list(read_training_traces(path))
    path.write_text(json.dumps(TWO_TURNS) + "\nnonsense\n")
    with pytest.raises(ConfigError, match="Line 2 of .* is not JSON"):
        list(read_training_traces(path))
    path.write_bytes(json.dumps(TWO_TURNS).encode() + b'\n"\xff"\n')
    with pytest.raises(ConfigError, match="Line 2 of .* is not JSON: 'utf-8'"):
        list(read_training_traces(path))
    path.write_text(json.dumps(TWO_TURNS) + "\n" + json.dumps(TWO_TURNS))
    with pytest.raises(ConfigError, match="one per trace"):
        list(read_training_traces(path, rewards=[1.0]))


def test_turn_masked_as_a_whole_is_only_context():
    rollout = rollout_of_trace(
        trace(turn("a", [1], [2, 3], [0, 0]), turn("b", [1, 2, 3], [4], [1])), reward=1.0, group_id="g"
    )
    (item,) = items(rollout)
    assert (item.input_ids.tolist(), item.action_mask.astype(int).tolist()) == ([1, 2, 3, 4], [0, 0, 0, 1])
    assert rollout.group_id == "g"
    assert rollout_of_trace(trace(turn("a", [1], [2], [0])), reward=1.0) is None
