"""BFCL: the grading rules one by one, published samples with their accepted answers, and the agent that calls."""

import json
import zipfile

import pytest

from ludic import registry
from ludic.agents import CallAgent, ReActAgent
from ludic.envs import check_env
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import ConfigError, MissingPackage, UnknownName
from ludic_envs.adapters import bfcl
from ludic_envs.adapters.base import read_calls
from ludic_envs.adapters.bfcl import BFCLEnv, accepts, grade
from tests.data import read_jsonl
from tests.fakes import make_agent
from tests.unit.agents.test_tool_agents import call

SAMPLES = read_jsonl("bfcl")
EXAMPLE = registry.envs.spec("bfcl").example["sample"]
TYPES = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "size": {"type": "float"}, "flag": {"type": "boolean"},
    "sizes": {"type": "array", "items": {"type": "float"}}, "place": {"type": "dict"},
}  # fmt: skip


def verdict(arguments, accepted, *, required=()):
    function = {"name": "f.g", "parameters": {"type": "dict", "properties": TYPES, "required": list(required)}}
    return grade([("f_g", arguments)], [{"f.g": accepted}], [function])


def reward(sample, action: str) -> float:
    env = BFCLEnv(sample)
    env.reset(seed=0)
    return env.step({"agent_0": action})["agent_0"].reward


def calls_of(sample) -> list[dict]:
    return json.loads(BFCLEnv(sample).reference_action("agent_0"))


# --- the rules ---


@pytest.mark.parametrize(
    ("arguments", "accepted", "reason"),
    [
        ({"text": "New-York, N.Y."}, {"text": ["new york NY"]}, ""),
        ({"text": "it's"}, {"text": ['it"s']}, ""),
        ({"text": "Boston"}, {"text": ["New York"]}, 'text is "Boston", which is not accepted'),
        ({}, {"text": ["a", ""]}, ""),
        ({}, {"text": ["a"]}, "text is missing"),
        ({"text": "a", "flag": True}, {"text": ["a"]}, "flag is not expected"),
        ({"text": "a", "other": 1}, {"text": ["a"], "other": [1]}, "other is not expected"),
        ({"count": 3}, {"count": [3]}, ""),
        ({"count": 3.0}, {"count": [3]}, "count is 3.0, not of type integer"),
        ({"count": "3"}, {"count": [3]}, 'count is "3", not of type integer'),
        ({"count": True}, {"count": [1]}, "count is true, not of type integer"),
        ({"count": "n"}, {"count": ["n"]}, ""),  # a variable of the question
        ({"size": 3}, {"size": [3.0]}, ""),
        ({"flag": 1}, {"flag": [True]}, "flag is 1, not of type boolean"),
        ({"sizes": [1, 2.5]}, {"sizes": [[1.0, 2.5]]}, ""),
        ({"sizes": [2.5, 1]}, {"sizes": [[1.0, 2.5]]}, "sizes is [2.5, 1], which is not accepted"),
        ({"sizes": ["1"]}, {"sizes": [[1.0]]}, 'sizes is ["1"], which is not accepted'),
        ({"sizes": []}, {"sizes": []}, ""),
        ({"place": {"town": "BONN"}}, {"place": [{"town": ["Bonn", "Köln"], "zip": ["", "53111"]}]}, ""),
        ({"place": {"zip": "53111"}}, {"place": [{"town": ["Bonn"], "zip": ["", "53111"]}]}, "which is not accepted"),
        ({"place": {"town": "Bonn", "lat": 1}}, {"place": [{"town": ["Bonn"]}]}, "which is not accepted"),
    ],
)
def test_a_call_is_compared_by_type_and_value(arguments, accepted, reason):
    found = verdict(arguments, accepted)
    assert found.reason.endswith(reason) and found.is_right == (not reason)


def test_a_required_parameter_without_accepted_values_may_have_any_value_of_its_type():
    assert verdict({"text": "whatever"}, {}, required=["text"]).is_right
    assert verdict({}, {}, required=["text"]).reason == "text is missing"
    assert not verdict({"text": 1}, {}, required=["text"]).is_right


def test_objects_in_lists_and_lists_in_objects():
    option = [{"tags": [["a", "b"], []]}, {"n": [1]}]
    assert accepts(option, [{"tags": ["A", "b"]}, {"n": 1}]) and accepts(option, [{"tags": []}, {"n": 1}])
    assert not accepts(option, [{"tags": ["b", "a"]}, {"n": 1}]) and not accepts(option, [{"tags": []}])


def test_parallel_calls_may_come_in_any_order_but_each_answers_another_part():
    first, second = calls_of(EXAMPLE)
    assert reward(EXAMPLE, json.dumps([second, first])) == 1
    assert reward(EXAMPLE, json.dumps([first, first])) == 0
    assert reward(EXAMPLE, json.dumps([first])) == reward(EXAMPLE, json.dumps([first, second, first])) == 0


def test_calls_are_paired_even_if_one_fits_several_answers():
    function = {"name": "f", "parameters": {"properties": TYPES, "required": []}}
    accepted = [{"f": {"text": ["a", "b"]}}, {"f": {"text": ["a"]}}]  # "a" must leave the first answer to "b"
    assert grade([("f", {"text": "a"}), ("f", {"text": "b"})], accepted, [function]).is_right
    found = grade([("f", {"text": "b"}), ("f", {"text": "b"})], accepted, [function])
    assert found.reason == "two calls answer the same part of the question"


@pytest.mark.parametrize(
    "text", ["", "No.", "[1]", '{"name": "f"}', '[{"name": 1, "arguments": {}}]', "[" * 100_000, "9" * 5000]
)
def test_a_text_that_holds_no_calls_is_no_call(text):
    assert read_calls(text) is None and reward(EXAMPLE, text) == 0


# --- published samples ---


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["id"])
def test_accepted_answers_get_the_full_reward_and_changed_ones_none(sample):
    env = BFCLEnv(sample)
    env.reset(seed=0)
    names = [tool.name for tool in env.episode_tools("agent_0")]
    assert len(set(names)) == len(sample["function"]) and not any("." in name for name in names)
    assert reward(sample, env.reference_action("agent_0")) == 1
    if "irrelevance" in env.category:
        assert reward(sample, json.dumps([{"name": names[0], "arguments": {}}])) == 0
        return
    assert reward(sample, "I cannot do that.") == 0
    calls = calls_of(sample)
    assert reward(sample, json.dumps([{**calls[0], "name": "other"}, *calls[1:]])) == 0
    if sample.get("ground_truth"):
        assert reward(sample, json.dumps([*calls, calls[0]])) == 0
        assert (
            reward(sample, json.dumps([{**calls[0], "arguments": {**calls[0]["arguments"], "zz": 1}}, *calls[1:]])) == 0
        )


async def test_published_samples_keep_the_contract_of_envs():
    for sample in SAMPLES[::10]:
        await check_env(lambda sample=sample: BFCLEnv(sample), seeds=(0,))


def test_schemas_have_the_types_of_json():
    def types_in(schema):
        yield schema.get("type")
        for sub in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
            yield from types_in(sub)

    tools = [tool for sample in SAMPLES for tool in BFCLEnv(sample).episode_tools("agent_0")]
    found = {kind for tool in tools for kind in types_in(tool.parameters)}
    assert found - {None} == {"object", "string", "integer", "number", "boolean", "array"}


def test_a_sample_that_is_not_of_bfcl_is_refused():
    with pytest.raises(ConfigError, match="no 'function'"):
        BFCLEnv({"id": "simple_0", "question": []})
    with pytest.raises(ConfigError, match="no ground_truth"):
        BFCLEnv({**EXAMPLE, "ground_truth": None})
    with pytest.raises(ConfigError, match="2 turns"):
        BFCLEnv({**EXAMPLE, "question": EXAMPLE["question"] * 2})


def test_an_earlier_exchange_is_shown_with_its_speakers_and_a_system_message_apart():
    said = [("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Weather?")]
    env = BFCLEnv({**EXAMPLE, "question": [[{"role": role, "content": text} for role, text in said]]})
    assert env.suggested_sysprompt == "Be brief."
    assert env.reset(seed=0)["agent_0"][0] == "User: Hi.\n\nAssistant: Hello.\n\nUser: Weather?"


# --- agents ---


async def play(replies, cls=CallAgent, env=None, **settings):
    agent = make_agent(replies, cls=cls, parser=raw_parser, **settings)
    protocol = SingleAgentProtocol(agent, stop_on_parse_error=True)
    (rollout,) = await protocol.run(env=env or BFCLEnv(EXAMPLE), max_steps=1, env_seed=0)
    return rollout


def written(calls) -> str:
    return "".join(call(each["name"], **each["arguments"]) for each in calls)


async def test_the_calls_of_one_reply_are_the_action_and_the_functions_are_in_the_prompt():
    rollout = await play(["Let me see. " + written(calls_of(EXAMPLE))])
    assert rollout.total_reward == 1
    (step,) = rollout.agent_steps
    assert (
        step.action_target == "env"
        and [each["function"]["name"] for each in step.tool_calls] == ["weather_forecast"] * 2
    )
    assert "weather_forecast" in bytes(id for id in step.trace.prompt_token_ids.tolist() if id < 256).decode(
        "utf-8", "replace"
    )


async def test_a_reply_without_a_call_and_one_that_cannot_be_read_earn_nothing():
    assert (await play(["It will rain."])).total_reward == 0
    broken = await play(['<tool_call>{"name": '])
    assert broken.total_reward == 0 and broken.agent_steps[0].info["tool_parse_error"]


async def test_an_agent_that_runs_its_calls_is_graded_by_the_recorded_ones():
    first, second = calls_of(EXAMPLE)
    rollout = await play([written([first]), written([second]), "Done."], cls=ReActAgent)
    assert rollout.total_reward == 1


async def test_functions_can_be_described_in_the_system_prompt():
    env = BFCLEnv(EXAMPLE, functions_in_prompt=True, system_prompt="Work.")
    assert (
        env.suggested_sysprompt.startswith("Work.\n\nYou can call")
        and '"name": "weather_forecast"' in env.suggested_sysprompt
    )
    rollout = await play([written(calls_of(EXAMPLE))], env=env, tools_in_prompt=False)
    assert rollout.total_reward == 1


# --- reading the wheel ---


def test_samples_are_read_from_the_wheel_with_their_answers(tmp_path, capsys):
    published = {sample["id"]: sample for sample in SAMPLES if sample["id"].startswith(("multiple", "irrelevance"))}
    wheel = tmp_path / "bfcl.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for category in ("multiple", "irrelevance"):
            rows = [dict(sample) for id, sample in published.items() if id.startswith(category)]
            answers = [
                {"id": row["id"], "ground_truth": row.pop("ground_truth")} for row in rows if "ground_truth" in row
            ]
            for name, lines in (("", rows), ("possible_answer/", answers)):
                text = "\n".join(map(json.dumps, lines))
                archive.writestr(f"bfcl_eval/data/{name}BFCL_v4_{category}.json", text)
    bfcl.main(["multiple", "irrelevance", "--wheel", str(wheel)])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == list(published.values())


def test_what_is_missing_or_unknown_is_said(monkeypatch):
    monkeypatch.setattr(bfcl, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="pip install --no-deps bfcl-eval"):
        list(bfcl.read_bfcl(["multiple"]))
    with pytest.raises(UnknownName, match="simple_python"):
        list(bfcl.read_bfcl(["simple_java"]))
    with pytest.raises(SystemExit, match="bfcl-eval"):
        bfcl.main(["all"])
