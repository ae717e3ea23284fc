"""Envs with tools on the command line: who plays them by default, and a person who calls the tools."""

import json

import pytest

from ludic.cli.eval.config import EvalConfig
from ludic.cli.play import Toolbox
from ludic.inference import HermesToolParser, HFChatTemplate, tool_parser_for
from ludic.models.loading import make_tiny
from ludic.run.config.env_and_agent import AgentSettings, EnvSettings
from ludic.run.given import env_factory
from ludic.run.resolve import resolve_play
from ludic.types import load_rollouts
from tests.unit.cli.runner import invoke

pytest.importorskip("bm25s", reason="the search extra is not installed")


def agent_for(**settings) -> AgentSettings:
    config = EvalConfig(env=EnvSettings(id="musique_search"), agent=AgentSettings(**settings))
    return resolve_play(config, env_factory("musique_search").suggested).agent


def test_an_env_suggests_an_agent_and_its_arguments():
    agent = agent_for()
    assert agent.agent == "react" and agent.agent_set == {"max_react_steps": 8} and agent.may_call_tools
    assert agent_for(agent_set={"max_react_steps": 2}).agent_set == {"max_react_steps": 2}


def test_arguments_of_the_suggested_agent_are_not_given_to_another():
    agent = agent_for(agent="tool_agent")
    assert agent.agent == "tool_agent" and agent.agent_set == {}


def test_an_env_that_suggests_nothing_is_played_by_the_plain_agent():
    config = EvalConfig(env=EnvSettings(id="key_door"))
    agent = resolve_play(config, env_factory("key_door").suggested).agent
    assert agent.agent == "agent" and not agent.may_call_tools


def test_the_tiny_model_is_told_of_the_tools_and_may_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample = env_factory("musique_search").example["sample"]
    (tmp_path / "q.jsonl").write_text(json.dumps(sample) + "\n")
    done = invoke(["eval", "musique_search", "--model", "tiny", "--data", "q.jsonl", "--max-tokens", "8"])
    assert done.exit_code == 0, done.output
    (rollouts,) = (tmp_path / "runs" / "eval" / "musique_search-tiny").rglob("rollouts/*.jsonl.gz")
    (rollout,) = load_rollouts(rollouts)
    prompt = make_tiny(0).tokenizer.decode(rollout.agent_steps[0].trace.prompt_token_ids.tolist())
    assert '"name": "search"' in prompt and rollout.meta["agent_name"] == "react_agent"


def test_the_tiny_template_continues_token_by_token_behind_a_tool_call():
    template = HFChatTemplate(make_tiny(0).tokenizer, tool_parser=HermesToolParser())
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    schema = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "one", "tool_call_id": "call00000", "name": "f"},
    ]
    end = template.tokenizer.eos_token_id
    delta = template.delta(messages, num_sent=1, completion_token_ids=[end], tools=schema)
    assert template.tokenizer.decode(delta.tolist()) == "<|user|>one<|end|><|assistant|>"
    assert "Tools: " in template.apply(messages[:1], tools=schema).prompt_text
    assert "Tools: " not in template.apply(messages[:1]).prompt_text
    assert isinstance(tool_parser_for(template.tokenizer), HermesToolParser)


# --- a person ---


def test_human_can_call_tools_and_answer():
    typed = '/search Alder Street\n/find x\n/search {"query": "Ida Morrow", "k": 9}\n/search alder street\n1871\n'
    done = invoke(["play", "musique_search", "--seed", "1"], input=typed)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "Tools: /search query k" in said and "It was founded by Ida Morrow in 1902." in said
    assert "There is no tool 'find'" in said and "argument 'k'" in said and "searched for that already" in said
    assert "total reward +0.9" in said


def test_the_reference_can_be_watched():
    done = invoke(["play", "musique_search", "--watch", "--seed", "1"])
    assert done.exit_code == 0 and "terminated: total reward +1" in done.output


async def test_without_tools_a_slash_is_for_the_env():
    assert await Toolbox([]).answer("/quit") is None and Toolbox([]).usage == ""
