"""Episodes of outside agents: plain functions that talk HTTP to the gateway, a scripted model behind it."""

import asyncio
import gc
import threading
import time
import warnings
from typing import Any

import httpx
import pytest

from ludic.batch_gen import RolloutEngine
from ludic.envs import DatasetQAEnv
from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import InteractionProtocol
from ludic.parsers import boxed_parser
from ludic.run.protocols.agents import is_agent_function
from ludic.types import (
    ConfigError,
    EnvSpec,
    InferenceSpec,
    PolicyGone,
    PromptTooLong,
    ProtocolSpec,
    ReturnSpec,
    Rollout,
    RolloutRequest,
    SamplingParams,
    StopReason,
)
from ludic_serve.gateway.agents import AgentFunction, answer_text
from ludic_serve.gateway.protocol import GatewayProtocol, TaskEnv, read_rewards
from ludic_serve.gateway.session import RETRY_GRACE_S, Policy, SessionLimits
from tests.fakes import CountingEnv

pytestmark = pytest.mark.slow

INFERENCE = InferenceSpec(sampling=SamplingParams(max_tokens=100), return_=ReturnSpec.for_rl())
SAMPLE = {"question": "2 + 2?", "answer": "4", "id": "q1"}


async def say(
    text: Any, *, base_url: str, api_key: str, model: str, history: list[Any] | None = None
) -> dict[str, Any]:
    """One chat completion."""
    messages = [*(history or []), {"role": "user", "content": str(text)}]
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(
            f"{base_url}/chat/completions",
            json={"model": model, "messages": messages},
            headers={"Authorization": f"Bearer {api_key}"},
        )
    answer.raise_for_status()
    return answer.json()


async def ask(task: Any, *, base_url: str, api_key: str, model: str) -> str:
    answer = await say(task, base_url=base_url, api_key=api_key, model=model)
    return answer["choices"][0]["message"]["content"]


async def ask_twice(task: Any, *, base_url: str, api_key: str, model: str) -> str:
    await ask(task, base_url=base_url, api_key=api_key, model=model)
    return await ask("again", base_url=base_url, api_key=api_key, model=model)


async def raise_after_a_call(task: Any, *, base_url: str, api_key: str, model: str) -> None:
    await ask(task, base_url=base_url, api_key=api_key, model=model)
    raise KeyError("tool")


def ask_blocking(task: Any, base_url: str, api_key: str, model: str) -> str:
    return asyncio.run(ask(task, base_url=base_url, api_key=api_key, model=model))


def protocol(agent: Any = ask, replies: Any = ("4",), **settings: Any) -> GatewayProtocol:
    client = ScriptedClient(replies)
    template = ByteTemplate(tool_parser=HermesToolParser())
    return GatewayProtocol(agent, client=client, model="small", chat_template=template, **settings)


async def play(made: GatewayProtocol, env: Any = None) -> list[Rollout]:
    env = env or DatasetQAEnv(SAMPLE, system_prompt="Answer with a number.")
    return await made.run(env=env, max_steps=5, env_seed=3, sampling_seed=4, inference=INFERENCE)


async def record(made: InteractionProtocol, env: Any = None, **limits: Any) -> list[Rollout]:
    """The episode under a rollout engine, where errors become failed rollouts."""
    engine = RolloutEngine(
        env_registry={"qa": lambda: env or DatasetQAEnv(SAMPLE)},
        protocol_registry={"outside": lambda: made},
        max_failed_share=1.0,
        max_retries=0,
        **limits,
    )
    request = RolloutRequest(env=EnvSpec("qa"), protocol=ProtocolSpec("outside"), inference=INFERENCE)
    return await engine.generate_rollouts([request], max_steps=1, concurrency=1)


# --- a whole episode ---


@pytest.mark.parametrize("agent", [ask, ask_blocking])
async def test_an_agent_answers_and_the_env_grades(agent):
    (rollout,) = await play(protocol(agent))
    call, end = rollout.steps
    assert call.action == "4" and call.trace.completion_logprobs is not None
    assert end.reward == 1.0 and end.terminated and end.info["correct"] and end.reward_components == {"env": 1.0}
    assert rollout.stop is StopReason.TERMINATED and not rollout.is_sub_task
    assert rollout.agent_id == "agent_0" and rollout.env_seed == 3 and rollout.sampling_seed == 4
    assert rollout.policy == "small" and rollout.meta["agent_name"] == agent.__name__


async def test_optional_arguments_are_given_by_name():
    seen: dict[str, Any] = {}

    async def agent(question, *, base_url, api_key, model, session_id, system_prompt, env_info, sample):
        seen.update(question=question, system=system_prompt, info=env_info, sample=sample, session=session_id)
        return await ask(question, base_url=base_url, api_key=api_key, model=model)

    (rollout,) = await play(protocol(agent))
    assert seen == {
        "question": "2 + 2?",
        "system": "Answer with a number.",
        "info": {"question_id": "q1"},
        "sample": SAMPLE,
        "session": rollout.meta["session"],
    }


async def test_a_given_system_prompt_replaces_that_of_the_env():
    async def agent(task, *, system_prompt, **access):
        return await ask(system_prompt, **{name: access[name] for name in ("base_url", "api_key", "model")})

    (rollout,) = await play(protocol(agent, system_prompt="Be brief."))
    assert rollout.steps[0].prompt_messages[-1]["content"] == "Be brief."


async def test_the_parser_reads_the_answer_where_it_can():
    (rollout,) = await play(protocol(replies=[r"It is \boxed{4}."], parser=boxed_parser))
    assert rollout.total_reward == 1.0
    (rollout,) = await play(protocol(replies=["4"], parser=boxed_parser))
    assert rollout.total_reward == 1.0  # an answer without a box is taken as it is


async def test_answers_that_are_no_text():
    assert answer_text(None) == "" and answer_text({"a": [1, "é"]}) == '{"a": [1, "é"]}' and answer_text(4) == "4"
    with pytest.raises(TypeError, match="answered with a object"):
        answer_text(object())

    async def agent(task, **access):
        await ask(task, **{name: access[name] for name in ("base_url", "api_key", "model")})
        return 4

    (rollout,) = await play(protocol(agent))
    assert rollout.total_reward == 1.0


async def test_a_conversation_is_one_rollout_and_a_second_one_a_thread():
    async def agent(task, *, base_url, api_key, model):
        access = {"base_url": base_url, "api_key": api_key, "model": model}
        await say("a side question", **access)
        first = await say(task, **access)
        message = first["choices"][0]["message"]
        history = [{"role": "user", "content": task}, {"role": "assistant", "content": message["content"]}]
        last = await say("Sure?", history=history, **access)
        return last["choices"][0]["message"]["content"]

    main, side = await play(protocol(agent, ["side", "5?", "4"]))
    assert [step.action for step in main.agent_steps] == ["5?", "4"] and main.total_reward == 1.0
    assert [step.action for step in side.agent_steps] == ["side"] and side.is_thread and not main.is_thread
    assert main.meta["gateway"]["calls"] == 3 and main.meta["gateway"]["continued"] == 1


# --- rewards ---


async def test_a_reward_function_replaces_the_env():
    def score(task, answer, session):
        assert task == {"question": "2 + 2?"} and answer == "4" and session.counts["calls"] == 1
        return 0.5

    (rollout,) = await play(protocol(reward=score), TaskEnv({"question": "2 + 2?"}))
    assert rollout.total_reward == 0.5

    async def score_parts(task, answer, session):
        return {"right": 1, "short": 0.25}

    (rollout,) = await play(protocol(reward=score_parts))
    assert rollout.total_reward == 1.25 and rollout.steps[-1].reward_components == {"right": 1.0, "short": 0.25}


async def test_a_reward_of_a_call_is_a_step_after_it():
    ids: list[str] = []

    async def agent(task, *, base_url, api_key, model):
        access = {"base_url": base_url, "api_key": api_key, "model": model}
        first = await say(task, **access)
        ids.append(first["id"])
        history = [{"role": "user", "content": task}, first["choices"][0]["message"]]
        await say("And?", history=history, **access)
        return ""

    (rollout,) = await play(protocol(agent, ["one", "two"], reward=lambda task, answer, session: {ids[0]: 1.0}))
    assert [step.reward for step in rollout.steps] == [0.0, 1.0, 0.0, 0.0]
    assert read_rewards({ids[0]: 1, "style": 2}) == ({"style": 2.0}, {ids[0]: 1.0})


@pytest.mark.parametrize("given", [None, "1", float("nan"), float("inf"), {"a": None}, [1.0]])
async def test_what_is_no_reward_fails_the_episode(given):
    (rollout,) = await record(protocol(reward=lambda task, answer, session: given))
    assert rollout.stop is StopReason.FAILED and "a reward is a finite number" in rollout.failure.message


async def test_tasks_need_a_reward_function():
    with pytest.raises(ConfigError, match="TaskEnv grades nothing"):
        await play(protocol(), TaskEnv("say hi"))


# --- failures ---


async def test_an_agent_that_raises_fails_its_episode_and_keeps_its_calls():
    (rollout,) = await record(protocol(raise_after_a_call))
    assert rollout.stop is StopReason.FAILED and rollout.failure.error == "KeyError"
    assert [step.action for step in rollout.steps] == ["4"]


async def test_with_a_failed_reward_an_error_of_the_agent_ends_its_episode_with_that_reward():
    (rollout,) = await record(protocol(raise_after_a_call, failed_reward=-1.0))
    assert rollout.failure is None and rollout.stop is StopReason.TERMINATED
    call, end = rollout.steps
    assert call.action == "4" and end.reward_components == {"env": -1.0}
    assert end.info["agent_error"] == "KeyError: 'tool'" and rollout.meta["gateway"]["raised"] == 1


async def test_what_is_not_the_agents_own_error_gets_no_failed_reward():
    async def without_a_call(task):
        raise KeyError("tool")

    def model_breaks(request):
        if "again" in str(request.prompt_text):
            raise OSError("The server is gone.")
        return "4"

    for made in (protocol(without_a_call, failed_reward=0.0), protocol(ask_twice, model_breaks, failed_reward=0.0)):
        (rollout,) = await record(made)
        assert rollout.stop is StopReason.FAILED and not rollout.total_reward


@pytest.mark.parametrize("wait_s", [0.0, 2 * RETRY_GRACE_S], ids=["still running", "cancelled"])
async def test_an_agent_whose_client_times_out_gets_no_failed_reward(wait_s: float):
    class Slow(ScriptedClient):
        async def complete_tokens(self, request):
            await asyncio.sleep(60.0 if "again" in str(request.prompt_text) else 0.0)
            return await super().complete_tokens(request)

    async def agent(task, *, base_url, api_key, model):
        access = {"base_url": base_url, "api_key": api_key, "model": model}
        await ask(task, **access)
        try:
            await asyncio.wait_for(ask("again", **access), 0.2)
        finally:
            await asyncio.sleep(wait_s)

    template = ByteTemplate(tool_parser=HermesToolParser())
    made = GatewayProtocol(agent, client=Slow(("4",)), model="small", chat_template=template, failed_reward=0.0)
    (rollout,) = await record(made)
    assert rollout.stop is StopReason.FAILED and rollout.failure.error == "TimeoutError"


async def test_an_agent_that_ran_out_of_context_gets_its_failed_reward():
    def reply(request):
        if "again" in str(request.prompt_text):
            raise PromptTooLong(9, 8)
        return "4"

    (rollout,) = await record(protocol(ask_twice, reply, failed_reward=0.0))
    assert rollout.failure is None and "agent_error" in rollout.steps[-1].info


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_a_blocking_agent_cannot_end_the_program(error):
    def agent(task):
        raise error

    (rollout,) = await record(protocol(agent))
    assert rollout.failure.error == "RuntimeError" and type(error).__name__ in rollout.failure.message


async def test_an_agent_without_a_model_call_is_told_how_to_make_one():
    async def agent(task):
        return "4"

    (rollout,) = await record(protocol(agent))
    assert "made no model call" in rollout.failure.message and "OPENAI_BASE_URL" in rollout.failure.message


@pytest.mark.parametrize("error", [ConfigError("wrong set-up"), PolicyGone("all servers are gone")])
async def test_errors_that_every_episode_would_meet_end_the_run(error):
    def reply(request):
        raise error

    with pytest.raises(type(error), match=str(error)):
        await record(protocol(replies=reply))


async def test_an_agent_may_raise_a_config_error():
    async def agent(task):
        raise ConfigError("The agent needs a file of rules.")

    with pytest.raises(ConfigError, match="file of rules"):
        await record(protocol(agent))


async def test_an_env_with_several_turns_is_refused():
    with pytest.raises(ConfigError, match="CountingEnv goes on after the agent's answer"):
        await play(protocol(), CountingEnv())


async def test_the_limits_of_a_session_hold():
    rollouts = await play(protocol(ask_twice, ["4", "4"], limits=SessionLimits(max_calls=1)))
    assert sum(len(rollout.agent_steps) for rollout in rollouts) == 1


async def test_an_episode_that_runs_out_of_time_is_cancelled():
    ended = asyncio.Event()

    async def agent(task, *, base_url, api_key, model):
        await ask(task, base_url=base_url, api_key=api_key, model=model)
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    (rollout,) = await record(protocol(agent), episode_timeout_s=3.0)
    assert ended.is_set() and "episode_timeout_s" in rollout.failure.message
    assert len(rollout.agent_steps) == 1


async def test_a_thread_that_outlives_its_episode_gets_no_more_answers():
    statuses: list[int] = []
    over = threading.Event()

    def agent(task, base_url, api_key, model):
        try:
            while True:
                time.sleep(0.05)
        finally:
            body = {"model": model, "messages": [{"role": "user", "content": "late"}]}
            headers = {"Authorization": f"Bearer {api_key}"}
            with httpx.Client(trust_env=False) as client:
                statuses.append(client.post(f"{base_url}/chat/completions", json=body, headers=headers).status_code)
            over.set()

    await record(protocol(agent), episode_timeout_s=2.0)
    assert await asyncio.to_thread(over.wait, 60)
    assert statuses in ([400], [401])


# --- policies ---


async def test_a_frozen_policy_answers_by_its_name_and_is_in_no_rollout():
    template = ByteTemplate(tool_parser=HermesToolParser())
    judge = Policy(client=ScriptedClient(["judged"]), chat_template=template, model="big", is_trained=False)

    async def agent(task, *, base_url, api_key, model):
        access = {"base_url": base_url, "api_key": api_key}
        assert await ask(task, model="judge", **access) == "judged"
        return await ask(task, model="gpt-of-any-name", **access)

    (rollout,) = await play(protocol(agent, policies={"judge": judge}))
    assert [step.action for step in rollout.agent_steps] == ["4"]
    with pytest.raises(ConfigError, match="name of the trained model"):
        protocol(policies={"small": judge})


# --- which functions are agents ---


def test_signatures_are_checked_at_once():
    with pytest.raises(ConfigError, match=r"agent\(\) cannot be called.*first argument is the task"):

        def agent():
            pass

        AgentFunction(agent)
    with pytest.raises(ConfigError, match="missing a required.*'url'"):
        AgentFunction(lambda task, url: None)
    with pytest.raises(ConfigError, match="multiple values for argument 'base_url'"):
        AgentFunction(lambda base_url, api_key, model: None)
    AgentFunction(lambda task: None)
    AgentFunction(lambda task, **rest: None)
    AgentFunction(lambda task, base_url, extra=1: None)


def test_agents_of_ludic_are_told_from_functions():
    from ludic.agents import Agent

    assert is_agent_function(ask) and is_agent_function(ask_blocking)
    assert not is_agent_function(Agent) and not is_agent_function(lambda **parts: Agent(**parts))
    assert not is_agent_function(lambda client, model, ctx, parser, chat_template: None)
    assert not is_agent_function(None)


# --- the server ---


async def test_episodes_share_one_server_until_it_is_closed():
    urls = set()

    async def agent(task, *, base_url, api_key, model):
        urls.add(base_url)
        return await ask(task, base_url=base_url, api_key=api_key, model=model)

    outside, client = AgentFunction(agent), ScriptedClient(lambda request: "4")
    made = [GatewayProtocol(outside, client=client, model="small", chat_template=ByteTemplate()) for _ in range(8)]
    rollouts = await asyncio.gather(*map(play, made))
    assert len(urls) == 1 and all(len(of_episode) == 1 for of_episode in rollouts)
    assert len(outside.gateways) == 1
    outside.gateways.close()
    async with asyncio.timeout(60):
        while len(outside.gateways):
            await asyncio.sleep(0.01)
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient(trust_env=False).get(urls.pop())


def test_a_server_ends_with_its_event_loop():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what other tests of this process have left open
        warnings.simplefilter("error")
        made = protocol()
        (rollout,) = asyncio.run(play(made))
        gc.collect()
    assert rollout.total_reward == 1.0 and not len(made.agent.gateways)


def test_a_server_is_closed_from_another_thread():
    client, ready, done = ScriptedClient(lambda request: "4"), threading.Event(), threading.Event()
    made = GatewayProtocol(ask, client=client, model="small", chat_template=ByteTemplate())

    async def main() -> bool:
        await play(made)
        ready.set()
        await asyncio.to_thread(done.wait, 10)
        return len(made.agent.gateways) > 0

    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(main())))
    thread.start()
    assert ready.wait(60)
    made.agent.gateways.close()
    done.set()
    thread.join(10)
    assert found == [False]
