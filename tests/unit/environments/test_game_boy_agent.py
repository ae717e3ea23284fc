"""The harness for long games, with a scripted model: notes, ways back, summaries; on its own and in a real episode."""

import json

import pytest

from ludic.batch_gen.stitching import stitch_rollout
from ludic.context import FullDialog, SummarisedDialog
from ludic.inference import ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import ConfigError
from ludic_game_boy import GameBoyAgent, GameBoyEnv
from ludic_game_boy.agent import ExploredMap, in_buttons
from tests.fakes import CountingEnv, RecordingClient, make_agent


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def harness(replies, *, max_turns=100, **kwargs) -> GameBoyAgent:
    ctx = SummarisedDialog(max_turns=max_turns)
    agent = make_agent(replies, cls=GameBoyAgent, ctx=ctx, parser=raw_parser, **kwargs)
    agent.reset()
    agent.on_env_reset("first view", {"place": [1, 1]})
    return agent


def explored(*track) -> ExploredMap:
    made = ExploredMap()
    made.arrive([1, 1])
    made.follow(track)
    return made


# --- navigation ---


def test_paths_lead_over_visited_cells():
    known = explored(["right", 2, 1], ["right", 3, 1], ["down", 3, 2], ["down", 3, 3])
    assert known.path((1, 1)) == ["up", "up", "left", "left"]
    assert known.path((3, 3)) == [] and known.path((3, 4)) == ["down"]
    assert known.path((1, 3)) is None
    assert known.drawn() == "Top left is x=1, y=1; you are at x=3, y=3.\n...\n  .\n  @"
    assert in_buttons(["up", "up", "left", "up"]) == "up 2 left up"


def test_a_direction_is_blocked_after_two_bumps_not_one():
    once = explored(["down", 1, 1])
    assert once.path((1, 2)) == ["down"]
    assert explored(["down", 1, 1], ["down", 1, 1]).path((1, 2)) is None


def test_areas_are_kept_apart():
    known = ExploredMap()
    known.arrive([4, 4, 7])
    known.follow([["up", 4, 3, 7], ["up", 9, 9, 8]])
    assert known.path((4, 4)) is None
    known.follow([["down", 4, 3, 7]])
    assert known.path((4, 4)) == ["down"]


def test_without_a_place_the_map_stays_empty():
    assert ExploredMap().path((0, 0)) is None and ExploredMap().drawn() == "Nothing is known yet."


# --- the agent ---


async def test_notes_are_kept_replaced_deleted_and_gone_with_the_episode():
    agent = harness([call("write_note", title="door", text="needs a key") + call("read_notes"), "up"])
    first, _ = (await agent.act()).steps
    assert [result["content"] for result in first.tool_results] == ["Noted.", "- door: needs a key"]
    assert agent.write_note("door", "is east") == "Noted." and agent.read_notes() == "- door: is east"
    assert agent.write_note("door", " ") == "Deleted." and agent.read_notes() == "There are no notes."
    agent.write_note("door", "again")
    agent.reset()
    assert agent.read_notes() == "There are no notes."


def test_the_number_of_notes_is_limited():
    agent = harness([])
    answers = {agent.write_note(f"note {n}", "x" * 900) for n in range(40)}
    assert answers == {"Noted.", "There are 32 notes already; delete one first."}
    assert max(len(line) for line in agent.read_notes().split("\n")) < 520


async def test_a_full_dialogue_is_summarised_in_a_separate_call_and_folded():
    client = RecordingClient(ScriptedClient(["up", "left", " I look for the key. ", "down", "right"]))
    agent = harness(client, max_turns=2)
    agent.write_note("door", "east")
    for view in ("second view", "third view"):
        (only,) = (await agent.act()).steps
        assert only.action_target == "env"
        agent.on_after_step(view, {"track": []})
    summary, action = (await agent.act()).steps
    assert summary.action_target == "internal" and summary.parse_result is None and summary.info["summary"]
    asked = summary.prompt_messages[-1]["content"]
    assert asked.startswith("third view\n\nBefore you go on: everything above will be forgotten.")
    (shown,) = action.prompt_messages
    assert shown["content"] == (
        "What you wrote down before:\nI look for the key.\n\nYour notes:\n- door: east\n\nthird view"
    )
    assert action.info["new_segment"] and "new_segment" not in summary.info
    agent.on_after_step("fourth view", {})
    (last,) = (await agent.act()).steps
    prompts = [prompt for prompt, _ in client.calls]
    assert prompts[4][: len(prompts[3])] == prompts[3], "after the fold the prompt grows again"
    assert "new_segment" not in last.info


async def test_a_summary_of_thinking_alone_is_shown_as_nothing_and_said_to_be_empty():
    agent = make_agent(
        ["<a>inc</a>", "<think>hm</think>", "<a>inc</a>"], cls=GameBoyAgent, ctx=SummarisedDialog(max_turns=1)
    )
    (rollout,) = await SingleAgentProtocol(agent).run(env=CountingEnv(2), max_steps=8)
    (fold,) = [step for step in rollout.agent_steps if step.info.get("summary")]
    assert fold.info["summary_empty"] and fold.action == "<think>hm</think>", "the record keeps what was sampled"
    assert rollout.agent_steps[2].prompt_messages[-1]["content"] == "What you wrote down before:\n(nothing)\n\ncount=1"


def test_it_asks_for_a_dialogue_that_can_be_folded():
    with pytest.raises(ConfigError, match="give it ctx=SummarisedDialog"):
        make_agent([], cls=GameBoyAgent, ctx=FullDialog())
    with pytest.raises(ConfigError, match="at least one turn"):
        SummarisedDialog(max_turns=0)


async def test_a_whole_game_is_played_and_every_sampled_token_is_on_the_record():
    replies = [
        "right 2 down 2 right 2 up 2 right 5",
        call("path_to", x=9, y=1),
        "left",
        call("write_note", title="key", text="I have it") + call("show_map"),
        "down 2",
        "I have the key and go to the door.",
        "right down 2 left",
        call("path_to", x=1, y=1),
        "down 2 right 2",
    ]
    client = RecordingClient(ScriptedClient(replies))
    agent = make_agent(client, cls=GameBoyAgent, ctx=SummarisedDialog(max_turns=3), parser=raw_parser)
    env = GameBoyEnv("demo", hold_frames=2, settle_frames=2)
    (rollout,) = await SingleAgentProtocol(agent).run(env=env, max_steps=10)
    await env.async_close()
    assert rollout.total_reward == 1.0 and rollout.stop == "terminated"
    answers = [result["content"] for step in rollout.agent_steps for result in step.tool_results or ()]
    assert answers[:2] == ["left", "Noted."] and answers[3] == "right up 2 left up 2 left 4 down 2 left 2 up 2 left 2"
    assert [step.info.get("summary", False) for step in rollout.agent_steps].count(True) == 1
    items = stitch_rollout(rollout, dict.fromkeys(((rollout.id, step.index) for step in rollout.steps), 1.0))
    assert len(items) == 2, "one token segment before the fold, one behind it"
    seen = [[*prompt, *completion] for prompt, completion in client.calls]
    assert [item.input_ids.tolist() for item in items] == [seen[5], seen[-1]]
