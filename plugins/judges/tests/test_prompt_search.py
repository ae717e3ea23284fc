"""Prompt search: a right instruction raises the score, prompts good at different tasks stay, merges, and resume after kill -9."""

import json
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.inference import ByteTemplate, ScriptedClient
from ludic.types import ConfigError
from ludic_judges import JudgeModel
from ludic_judges.prompt_search import ModelReflector, PromptSearch, merged_sentences, merged_texts
from plugins.judges.tests.forgetful import BUDGET, RULES, Forgetful, Task, engine, make, tasks

SENTENCES = st.lists(st.sampled_from([f"Rule {letter}." for letter in "abcdefgh"]), unique=True).map(" ".join)


# --- rounds ---


class Scripted:
    """Adds the rule of the first rollout that earned nothing."""

    async def propose(self, prompt, rollouts):
        kinds = [r.steps[0].prompt_messages[-1]["content"] for r in rollouts if r.total_reward == 0]
        return f"{prompt} {RULES[kinds[0]]}" if kinds else prompt


async def test_a_right_instruction_raises_the_score():
    search = make(reflector=Scripted(), kinds=("shout", "count") * 2, start="Answer.", shown=2, max_merges=0)
    best = await search.search(max_episodes=60)
    assert search.candidates[0].scores == (0.0, 0.0, 0.0, 0.0)
    assert best.scores == (1.0, 1.0, 1.0, 1.0) and best.prompt.count("Write") == 2
    assert best.parent is not None and search.candidates[best.parent].mean == 0.5
    assert search.num_episodes <= 60 and search.num_merges == 0


async def test_a_proposal_that_earns_no_more_is_rejected_after_the_shown_tasks():
    class Useless:
        async def propose(self, prompt, rollouts):
            return f"{prompt}!"

    search = make(reflector=Useless(), kinds=("shout", "count", "shout"))
    await search.search(max_episodes=3)
    assert not await search.round() and not await search.round()
    assert len(search.candidates) == 1 and (search.num_rejected, search.num_episodes) == (2, 5)


async def test_a_reflector_that_repeats_itself_ends():
    class Same:
        async def propose(self, prompt, rollouts):
            return prompt

    search = make(reflector=Same(), kinds=("shout",))
    await search.search(max_episodes=10)
    assert len(search.candidates) == 1 and search.num_episodes == 10


async def test_the_front_keeps_prompts_that_are_good_at_different_tasks():
    start = [RULES["shout"], RULES["count"], "neither"]
    search = make(reflector=Scripted(), kinds=("shout", "count", "shout"), start=start, shown=3, max_merges=0)
    await search.search(max_episodes=9)
    assert [candidate.scores for candidate in search.candidates] == [(1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
    assert search.front() == {0: 2, 1: 1}
    await search.search(max_episodes=30)
    best = max(search.front().items(), key=lambda pair: pair[1])
    assert search.candidates[best[0]].mean == 1.0 and list(search.front()) == [best[0]]  # it covers both


async def test_an_episode_that_fails_earns_nothing():
    class Broken(Task):
        def env_step(self, action):
            raise RuntimeError("broken")

    search = PromptSearch(engine(env=Broken), tasks("shout"), Scripted(), shown=1)
    await search.search(max_episodes=1)
    assert search.best.scores == (0.0,)


def model_reflector(asked, instruction):
    def reply(request):
        asked.append(ByteTemplate().decode(request.prompt_token_ids))
        mark = re.search(r'"mark": "(\w+)"', asked[-1])[1]
        return json.dumps({"mark": mark, "diagnosis": "both", "instruction": f" {instruction} "})

    return ModelReflector(JudgeModel(ScriptedClient(reply), model="r", chat_template=ByteTemplate()))


async def test_a_model_reflects_on_tasks_replies_and_rewards():
    asked = []
    search = make(reflector=model_reflector(asked, "Write capitals."), kinds=("shout",), start="Answer.")
    best = await search.search(max_episodes=2)
    assert best.prompt == "Write capitals." and best.mean == 1.0
    for part in ("Answer.", "shout", "wrong", "reward 0", "A rule for shout is missing"):
        assert part in asked[0]


# --- merged texts ---


@given(SENTENCES, SENTENCES)
def test_merging_with_an_unchanged_text_gives_the_changed_one(ancestor, changed):
    assert merged_sentences(ancestor, changed, ancestor) == (changed, False)
    assert merged_sentences(ancestor, ancestor, changed) == (changed, False)
    assert merged_sentences(ancestor, changed, changed) == (changed, False)


@given(SENTENCES, SENTENCES, SENTENCES)
def test_a_merge_has_no_sentence_that_neither_has_and_loses_none_that_both_have(ancestor, better, other):
    made, _ = merged_sentences(ancestor, better, other)
    found, first, second = (set(re.findall(r"Rule .", text)) for text in (made, better, other))
    assert found <= first | second
    assert first & second <= found


def test_changes_at_different_places_are_both_made():
    made = merged_sentences("Be kind.\nAnswer.\nStop.", "Be brief.\nAnswer.\nStop.", "Be kind.\nAnswer.\nStop early.")
    assert made == ("Be brief.\nAnswer.\nStop early.", False)


def test_a_passage_that_both_changed_is_the_better_ones():
    assert merged_sentences("Answer.", "Answer in capitals.", "Answer in digits.") == ("Answer in capitals.", True)


def test_of_several_texts_each_is_taken_from_the_candidate_that_changed_it():
    ancestor = {"system": "a", "hint": "b", "end": "c"}
    better, other = {"system": "A", "hint": "b", "end": "C1"}, {"system": "a", "hint": "B", "end": "C2"}
    assert merged_texts(ancestor, better, other) == ({"system": "A", "hint": "B", "end": "C1"}, True)


# --- merges ---


async def test_a_merge_has_what_two_siblings_learned():
    search = make()
    await search.search(BUDGET)
    merged = [candidate for candidate in search.candidates if candidate.merged_with is not None]
    assert merged and search.num_merges >= len(merged)
    first, second = search.candidates[merged[0].parent], search.candidates[merged[0].merged_with]
    assert merged[0].prompt in ("Answer. Write capitals. Write digits.", "Answer. Write digits. Write capitals.")
    assert {first.prompt, second.prompt} == {"Answer. Write capitals.", "Answer. Write digits."}
    assert merged[0].mean > max(first.mean, second.mean)
    assert first.parent == second.parent == 0, "siblings: neither is the other's ancestor"


async def test_a_merge_that_earns_less_is_rejected():
    class Hostile(Forgetful):
        """Each sibling's sentence is its whole prompt, and their merge is written by it."""

        async def propose(self, prompt, rollouts):
            proposed = await super().propose(prompt, rollouts)
            return proposed if proposed == prompt else f"Do this: {proposed.removeprefix('Answer. ')}"

        async def merge(self, ancestor, first, second):
            return "nonsense"

    search = make(reflector=Hostile())
    await search.search(BUDGET)
    assert search.num_merges and all(candidate.merged_with is None for candidate in search.candidates)
    assert "nonsense" not in [candidate.prompt for candidate in search.candidates]


async def test_a_model_merges_two_rewritten_prompts():
    asked = []
    assert await model_reflector(asked, "Both.").merge("Before.", "First.", "Second.") == "Both."
    assert all(text in asked[0] for text in ("Before.", "First.", "Second."))


async def test_several_texts_are_changed_in_turn():
    start = {"system_prompt": "Answer.", "hint": "Think."}
    search = PromptSearch(engine(), tasks("shout", "count"), Forgetful(), start=start, shown=2, seed=1)
    best = await search.search(20)
    assert best.mean == 1.0
    assert best.texts == {"system_prompt": "Answer. Write capitals.", "hint": "Think. Write digits."}
    with pytest.raises(ConfigError, match="several texts"):
        best.prompt  # noqa: B018


async def test_tasks_without_a_seed_get_one_for_all_candidates():
    search = make()
    await search.search(BUDGET)
    seeds = {tuple(r.meta["env_seed"] for own in rollouts for r in own) for rollouts in search._rollouts}
    assert len(seeds) == 1


# --- on disk ---


def state_of(search):
    return search.candidates, [getattr(search, name) for name in search._COUNTS], search._tried, search.front()


@pytest.mark.parametrize(
    ("moment", "number"), [("reflection", 3), ("reply", 14), ("state", 4)], ids=lambda value: str(value)
)
async def test_killed_search_goes_on_as_if_undisturbed(tmp_path, moment, number):
    whole = make()
    await whole.search(BUDGET)
    child = [sys.executable, "-m", "plugins.judges.tests.forgetful", str(tmp_path), moment, str(number)]
    assert subprocess.run(child, capture_output=True).returncode == -signal.SIGKILL
    resumed = make(tmp_path)
    assert len(resumed.candidates) > 0 and resumed.num_episodes < whole.num_episodes, "it was killed in the middle"
    await resumed.search(BUDGET)
    assert state_of(resumed) == state_of(whole) and whole.num_merges
    again = make(tmp_path)
    assert state_of(again) == state_of(whole), "what is on disk is the end"
    assert await again.search(BUDGET) == whole.best


async def test_a_folder_of_another_search_is_refused(tmp_path):
    await make(tmp_path).search(6)
    with pytest.raises(ConfigError, match=r"other settings \(start, seed, tasks\)"):
        make(tmp_path, start="Other.", seed=6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": ["Answer.", {"hint": RULES["calm"]}]}, "the same names"),
        ({"kinds": ("shout",), "shown": 2}, "shown=2"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)
