"""The stored form of a rollout, format 1. Files that people have on disk must stay readable."""

import json
from pathlib import Path

from ludic.types import MessageView, Rollout, StopReason, VersionRun

FILE = Path(__file__).parent / "data" / "rollout_format_1.json"


def test_a_file_of_format_1_reads_as_it_was_written():
    rollout = Rollout.from_json(FILE.read_text())
    assert rollout.stop is StopReason.TERMINATED and rollout.meta["env_name"] == "CountingEnv"
    first, second = rollout.agent_steps
    assert first.trace.prompt_token_ids.tolist() == [1, 2, 3]
    assert second.trace.prompt_token_ids.tolist() == [1, 2, 3, 10, 11, 4, 5]
    assert second.trace.version_runs == (VersionRun(7, 1), VersionRun(8, 1))
    assert second.trace.completion_logprobs.tolist() == [-0.5, -0.25]
    assert isinstance(second.prompt_messages, MessageView) and len(second.prompt_messages) == 3
    (env_step,) = rollout.env_steps
    assert env_step.trace is second.trace and env_step.reward == 1.1 and env_step.parsed_action == "inc"
    assert rollout.total_reward == 1.1 - 1.0


def test_writing_it_again_gives_the_same_file():
    stored = json.loads(FILE.read_text())
    again = json.loads(Rollout.from_dict(json.loads(FILE.read_text())).to_json())
    assert again == stored
