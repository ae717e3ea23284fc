"""Unchanged agents of real frameworks over the gateway: every sampled token is continued exactly, and trained once.

The model says what the script says, in the tool-call format of a real chat template; the agents are in gateway_agents.py.
"""

import importlib
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from ludic.batch_gen.stitching import stitch_rollouts
from ludic.inference import (
    HermesToolParser,
    HFChatTemplate,
    InferenceSpec,
    ReturnSpec,
    SamplingParams,
    ScriptedClient,
    tool_parser_for,
)
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_tokenizer
from ludic.types import Rollout
from ludic_serve.gateway.server import Gateway
from ludic_serve.gateway.session import Policy, Session
from ludic_serve.gateway.threads import session_rollouts
from tests.extended import cases
from tests.fakes import RecordingClient
from tests.unit.inference.test_real_templates import tokenizer_of

pytestmark = pytest.mark.integration

CLIENTS = [
    "openai_chat", "openai_chat_stream", "openai_responses", "openai_responses_stream", "openai_responses_by_id",
    "anthropic", "anthropic_stream",
    "openai_agents", "openai_agents_stream", "openai_agents_chat", "openai_agents_chat_stream",
    "langgraph_openai", "langgraph_openai_stream", "langgraph_openai_responses", "langgraph_anthropic", "langgraph_anthropic_stream",
    "pydantic_ai_openai", "pydantic_ai_openai_stream", "pydantic_ai_responses", "pydantic_ai_anthropic",
]  # fmt: skip
WITHOUT_TOOLS = "openai_chat_without_tools"
TALKS = ["openai_chat_talk", "openai_responses_talk", "anthropic_talk"]
TEMPLATES = ["smollm2", "qwen2_5", "qwen3", "qwen3_5_think"]
"""SmolLM2's writes no tools, Qwen 3's drops the thinking of earlier turns, Qwen 3.5's opens it in the prompt and has calls in XML."""
INFERENCE = InferenceSpec(sampling=SamplingParams(max_tokens=500), return_=ReturnSpec.for_rl())
ANSWER = "It is warmer in Zürich,\n\nby two degrees."


def hermes(name: str, city: str) -> str:
    """Spaced as no JSON library does."""
    return f'<tool_call>\n{{"name":"{name}",  "arguments" : {{"city":"{city}" }} }}\n</tool_call>'


def xml(name: str, city: str) -> str:
    return f"<tool_call>\n<function={name}>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"


SCRIPTS = {
    "smollm2": [
        f"I look both up. \n{hermes('weather', 'Zürich')}\n{hermes('weather', 'Rome')}",
        hermes("country", "Rome"),
        ANSWER,
    ],
    "qwen3": [
        f"<think>\nTwo cities,  so two calls.\n</think>\n\nI look both up.\n{hermes('weather', 'Zürich')}\n{hermes('weather', 'Rome')}",
        f"<think>\nAnd the country?\n</think>\n\n{hermes('country', 'Rome')}",
        f"<think>\nDone.\n</think>\n\n{ANSWER}",
    ],
    "qwen3_5_think": [
        f"Two cities,  so two calls.\n</think>\n\nI look both up.\n\n{xml('weather', 'Zürich')}\n{xml('weather', 'Rome')}",
        f"And the country?\n</think>\n\n{xml('country', 'Rome')}",
        f"Done.\n</think>\n\n{ANSWER}",
    ],
}
SCRIPTS["qwen2_5"] = SCRIPTS["smollm2"]
ASKED = [("weather", "Rome"), ("weather", "Zürich")], [("country", "Rome")]


@pytest.fixture(scope="session")
def gateway_agents() -> Any:
    """Imported here: the frameworks take seconds, in every worker."""
    return importlib.import_module("plugins.serve.tests.gateway_agents")


@cache
def smollm2_tokenizer() -> Any:
    return load_tokenizer(ModelSettings(model="smollm2-135m"))


@pytest.fixture(params=cases(TEMPLATES, default=["qwen3_5_think"]))
def template(request: pytest.FixtureRequest) -> HFChatTemplate:
    if request.param == "smollm2":
        return HFChatTemplate(smollm2_tokenizer(), tool_parser=HermesToolParser())
    tokenizer = tokenizer_of(request.param)
    return HFChatTemplate(tokenizer, tool_parser=tool_parser_for(tokenizer))


@dataclass
class Played:
    answer: str
    ask: Any
    calls: list[tuple[list[int], list[int]]]
    """Prompt and completion of each, as the engine saw them."""
    session: Session
    rollouts: list[Rollout]


async def play(gateway_agents: Any, name: str, template: HFChatTemplate, script: list[str]) -> Played:
    """One session of an agent."""
    client = RecordingClient(ScriptedClient(script, tokenizer=template.tokenizer))
    gateway = Gateway({"policy": Policy(client=client, chat_template=template, model="m")})
    await gateway.start()
    try:
        session = gateway.open_session(inference=INFERENCE, sampling_seed=3)
        ask = gateway_agents.Ask(gateway.url, session.api_key)
        answer = await (gateway_agents.AGENTS | gateway_agents.TALKS)[name](ask)
        session.close()
        return Played(answer, ask, client.calls, session, session_rollouts(session, reward=1.0))
    finally:
        await gateway.close()


def check_exact(played: Played) -> list[list[int]]:
    """Every call continues the one before, token for token, and every sampled token is trained once. Returns the tokens between."""
    counts, calls = played.session.counts, played.calls
    unwanted = {kind: counts[kind] for kind in ("forked", "rerendered", "foreign", "retried", "undelivered", "limited")}
    assert not any(unwanted.values()), [str(node.difference) for node in played.session.nodes]
    assert counts["calls"] == len(calls) and counts["continued"] + counts["healed"] == len(calls) - 1
    between = []
    for (prompt, completion), (following, _) in itertools.pairwise(calls):
        so_far = [*prompt, *completion]
        assert following[: len(so_far)] == so_far
        between.append(following[len(so_far) :])
    (rollout,) = played.rollouts
    weights = {(rollout.id, step.index): 1.0 for step in rollout.steps}
    (item,) = stitch_rollouts([rollout], weights, require_logprobs=True)
    last_prompt, last_completion = calls[-1]
    assert item.input_ids.tolist() == [*last_prompt, *last_completion]
    is_sampled = np.zeros(len(item.input_ids), bool)
    for prompt, completion in calls:
        is_sampled[len(prompt) : len(prompt) + len(completion)] = True
    np.testing.assert_array_equal(np.asarray(item.action_mask, bool), is_sampled)
    return between


@pytest.mark.parametrize("name", CLIENTS)
async def test_two_tool_turns_are_one_exact_chain(gateway_agents, name, template, request):
    script = SCRIPTS[request.node.callspec.params["template"]]
    played = await play(gateway_agents, name, template, script)
    between = check_exact(played)
    asked = played.ask.tools.asked
    assert played.answer == ANSWER
    assert (sorted(asked[:2]), asked[2:]) == ASKED  # frameworks run parallel calls in any order
    texts = [template.tokenizer.decode(ids) for ids in between]
    assert len(texts) == 2 and all(text.count("°C") == n for text, n in zip(texts, (2, 0), strict=True))
    assert texts[0].index("Zürich: ") < texts[0].index("Rome: ") and "Rome is in Italy." in texts[1]
    if played.ask.counts:
        assert played.ask.counts == [len(prompt) for prompt, _ in played.calls]


THOUGHTS = {"qwen3": "<think>\nHm.\n</think>\n\n", "qwen3_5_think": "Hm.\n</think>\n\n"}


async def test_an_agent_that_reads_calls_in_the_text_itself_is_one_exact_chain(gateway_agents, template, request):
    prefix = THOUGHTS.get(request.node.callspec.params["template"], "")
    script = ["I ask for the weather.", " Now\n the country.  ", ANSWER]
    played = await play(gateway_agents, WITHOUT_TOOLS, template, [prefix + text for text in script])
    check_exact(played)
    assert played.answer == ANSWER and played.ask.tools.asked == [("weather", "Rome"), ("country", "Rome")]


@pytest.mark.parametrize("name", TALKS)
async def test_three_questions_are_one_exact_chain(gateway_agents, name, template, request):
    prefix = THOUGHTS.get(request.node.callspec.params["template"], "")
    script = ["In Rome.", "Rome,\n again:\n* warm  ", "Yes."]
    played = await play(gateway_agents, name, template, [prefix + text for text in script])
    check_exact(played)
    assert [text.split() for text in played.answer.split("|")] == [text.split() for text in script]


def test_every_agent_is_tried(gateway_agents):
    assert gateway_agents.AGENTS.keys() == {*CLIENTS, WITHOUT_TOOLS} and gateway_agents.TALKS.keys() == {*TALKS}
