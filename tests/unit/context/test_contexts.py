import pytest

from ludic.context import FullDialog, SlidingWindow, SummarisedDialog, TruncatedThinkingContext
from ludic.types import ChatResponse


def say(ctx, text):
    ctx.on_after_act(ChatResponse(text=text, prompt_token_ids=[1], completion_token_ids=[2]))


def play(ctx, turns):
    ctx.reset()
    ctx.on_env_reset("obs0", {})
    for number, text in enumerate(turns, start=1):
        say(ctx, text)
        ctx.on_after_step(f"obs{number}", {})
    return ctx.on_before_act()


def contents(messages):
    return [message["content"] for message in messages]


def test_full_dialog_keeps_and_shows_everything():
    ctx = FullDialog("be brief")
    shown = play(ctx, ["a", "b"])
    assert contents(shown) == ["be brief", "obs0", "a", "obs1", "b", "obs2"]
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert not ctx.rewrites_history and ctx.supports_tools and ctx.default_system_prompt == "be brief"


def test_reset_prefers_the_given_system_prompt_over_the_default():
    ctx = FullDialog("default")
    ctx.reset(system_prompt="given")
    assert contents(ctx.messages) == ["given"]
    ctx.reset()
    assert contents(ctx.messages) == ["default"]
    plain = FullDialog()
    plain.reset()
    assert plain.messages == []


def test_a_note_is_appended_to_a_pending_observation():
    ctx = FullDialog()
    ctx.on_env_reset("obs", {})
    ctx.add_note("answer now")
    assert contents(ctx.messages) == ["obs\n\nanswer now"]
    ctx.add_tool_result("c", "t", "1")
    ctx.add_note("answer now")
    assert [m["role"] for m in ctx.messages] == ["user", "tool"] and ctx.messages[-1]["content"] == "1\n\nanswer now"
    ctx.on_after_step("obs2", {})
    assert ctx.messages[-1]["content"] == "1\n\nanswer now\n\nobs2"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("<think>long\nthought</think>A1", "<think>[TRUNCATED]</think>A1"),
        ("  <THINK>x</THINK> A1", "  <THINK>[TRUNCATED]</THINK> A1"),
        ("A1", "A1"),
        ("<think>no end A1", "<think>no end A1"),
        ("<think>x</think>", "<think>x</think>"),
        ("<think>x</think>  \n", "<think>x</think>  \n"),
        ("A1 <think>x</think> B2", "A1 <think>x</think> B2"),
    ],
)
def test_only_a_leading_closed_think_block_with_an_answer_is_truncated(said, shown):
    ctx = TruncatedThinkingContext()
    prompt = play(ctx, [said])
    assert contents(prompt)[1] == shown
    assert contents(ctx.messages)[1] == said  # memory stays whole


def test_a_note_in_a_truncated_context_is_shown_once():
    ctx = TruncatedThinkingContext()
    play(ctx, ["<think>x</think>A1"])
    ctx.add_note("now")
    assert contents(ctx.on_before_act()) == ["obs0", "<think>[TRUNCATED]</think>A1", "obs1\n\nnow"]
    ctx.reset()
    assert ctx.on_before_act() == []


def test_a_window_shows_the_system_prompt_and_the_last_turns():
    ctx = SlidingWindow("sys", max_turns=2)
    assert contents(play(ctx, ["a", "b", "c"])) == ["sys", "obs2", "c", "obs3"]
    assert len(ctx.messages) == 8 and ctx.rewrites_history


def test_slide_by_drops_several_turns_at_a_time():
    ctx = SlidingWindow(max_turns=4, slide_by=3)
    lengths = [len(play(ctx, ["x"] * n)) for n in range(10)]
    assert lengths == [1, 3, 5, 7, 3, 5, 7, 3, 5, 7]


def test_keep_first_turn():
    ctx = SlidingWindow("sys", max_turns=2, keep_first_turn=True)
    assert contents(play(ctx, ["a", "b", "c"])) == ["sys", "obs0", "a", "obs3"]


def test_a_turn_keeps_its_tool_results_and_notes():
    ctx = SlidingWindow(max_turns=1)
    play(ctx, ["a"])
    ctx.add_assistant_step("", [{"id": "1"}])
    ctx.add_tool_result("1", "t", "r")
    ctx.add_note("now")
    assert contents(ctx.on_before_act()) == ["obs1", "", "r\n\nnow"]


def test_fold_keeps_the_last_env_observation_also_after_a_parse_error():
    ctx = SummarisedDialog(max_turns=2)
    ctx.reset(system_prompt="Play.")
    ctx.on_env_reset("You are in a room.", {})
    ctx.on_after_step("You are in a garden.", {})
    ctx.on_after_step("That was no button.", {"parse_error": True})
    ctx.fold("I have left the room.")
    (_, shown) = ctx.on_before_act()
    assert shown["content"] == "I have left the room.\n\nYou are in a garden.\n\nThat was no button."
