import asyncio

import pytest

from ludic.agents import ReActAgent
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate, InferenceSpec, SamplingParams, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import EnvContractError, PromptTooLong, Rollout, StepOutcome, StopReason
from tests.fakes import CountingEnv, RandomTokenClient, RecordingClient, make_agent
from tests.unit.agents.test_tool_agents import add, ask, call


async def run(replies, *, env=None, max_steps=10, protocol=None, agent=None, **kwargs):
    agent = agent or make_agent(replies, **kwargs)
    protocol = protocol or {}
    (rollout,) = await SingleAgentProtocol(agent, **protocol).run(env=env or CountingEnv(2), max_steps=max_steps)
    return rollout


def kinds(rollout: Rollout) -> list[str]:
    return [step.kind for step in rollout.steps]


async def test_an_episode_alternates_agent_and_env_steps_until_the_env_ends_it():
    rollout = await run(["<a>inc</a>", "<a>inc</a>"])
    assert kinds(rollout) == ["agent", "env"] * 2 and [s.index for s in rollout.steps] == [0, 1, 2, 3]
    first, last = rollout.env_steps
    assert first.prev_obs == "count=0" and first.next_obs == "count=1" and not first.terminated
    assert last.terminated and last.next_obs is None and last.info["count"] == 2
    assert rollout.stop is StopReason.TERMINATED
    assert last.info["final_obs"] == "count=2"
    assert rollout.meta == {
        "agent_id": "agent_0", "agent_name": "agent", "model": "fake", "env_name": "CountingEnv", "env_seed": None,
        "sampling_seed": None, "episode_id": rollout.meta["episode_id"], "episode_truncated": False,
        "truncation_reason": None,
    }  # fmt: skip


async def test_parser_reward_is_counted_once():
    rollout = await run(["<a>inc</a>", "<a>inc</a>"])
    assert [s.reward for s in rollout.agent_steps] == [0.0, 0.0]
    assert rollout.env_steps[1].reward_components == {"env": 1.0, "parser": 0.1}
    assert rollout.total_reward == pytest.approx(1.2) == pytest.approx(rollout.total_reward_all())


async def test_an_unparsed_reply_does_not_reach_the_env():
    rollout = await run(["what?", "<a>inc</a>", "<a>inc</a>"])
    assert kinds(rollout) == ["agent", "agent", "env", "agent", "env"]
    failed = rollout.steps[0]
    assert failed.info["parse_error"] is True and failed.reward == -1.0
    shown = rollout.steps[1].prompt_messages[-1]
    assert shown["role"] == "user" and shown["content"] == failed.info["parse_feedback_obs"]
    assert rollout.steps[0].turn_id != rollout.steps[1].turn_id
    assert rollout.total_reward == pytest.approx(-1.0 + 0.1 + 1.1)


async def test_stop_on_parse_error_terminates_on_the_agent_step():
    rollout = await run(["what?"], protocol={"stop_on_parse_error": True})
    assert kinds(rollout) == ["agent"] and rollout.steps[0].terminated and rollout.stop is StopReason.PARSE_ERROR
    assert rollout.meta["episode_truncated"] is False


async def test_max_steps_truncates_the_last_env_step():
    rollout = await run(["<a>inc</a>"] * 2, env=CountingEnv(9), max_steps=2)
    first, last = rollout.env_steps
    assert last.truncated and last.next_obs is None and last.info["truncation_reason"] == "max_steps"
    assert not first.truncated and first.next_obs == "count=1"
    assert rollout.stop is StopReason.MAX_STEPS
    assert rollout.meta["episode_truncated"] is True and rollout.meta["truncation_reason"] == "max_steps"


async def test_a_parse_error_in_the_last_turn_truncates_only_that_turn():
    rollout = await run(["<a>inc</a>", "what?"], env=CountingEnv(9), max_steps=2)
    env_step, failed = rollout.env_steps[0], rollout.steps[-1]
    assert not env_step.truncated and env_step.next_obs == "count=1"
    assert failed.kind == "agent" and failed.truncated and failed.info["truncation_reason"] == "max_steps"
    assert "parse_feedback_obs" in failed.info


class TimeLimit(CountingEnv):
    def env_step(self, action):
        outcome = super().env_step(action)
        return StepOutcome(outcome.obs, 0.0, truncated=True, terminated=False, info={"truncation_reason": "mine"})


async def test_truncation_by_the_env_and_by_the_protocol_have_different_reasons(caplog):
    rollout = await run(["<a>inc</a>"], env=TimeLimit(9))
    (step,) = rollout.env_steps
    assert step.truncated and not step.terminated and step.info["truncation_reason"] == "env"
    assert rollout.stop is StopReason.ENV_TRUNCATED and rollout.meta["truncation_reason"] == "env"
    assert "reserved" in caplog.text  # the env cannot speak in Ludic's name


async def test_system_prompt_of_the_context_overrides_the_envs():
    env_prompt = (await run(["<a>inc</a>"] * 2)).steps[0].prompt_messages[0]
    assert env_prompt == {"role": "system", "content": "Say inc."}
    own = (await run(["<a>inc</a>"] * 2, ctx=FullDialog("Mine."))).steps[0].prompt_messages[0]
    assert own["content"] == "Mine."


async def test_every_model_call_has_its_own_seed_and_the_same_seeds_give_the_same_episode():
    def play():
        template = ByteTemplate()
        inner = RandomTokenClient(vocab_size=261, end_ids=(260,), decode=template.decode_reply)
        client = RecordingClient(inner)
        agent = make_agent(client, parser=raw_parser, chat_template=template, reject_incomplete_completions=False)
        spec = InferenceSpec(sampling=SamplingParams(max_tokens=8))
        return client, SingleAgentProtocol(agent).run(
            env=CountingEnv(9), max_steps=4, sampling_seed=5, env_seed=1, inference=spec
        )

    (one, first), (two, second) = play(), play()
    await asyncio.gather(first, second)
    assert one.calls == two.calls
    seeds = [request.seed for request in one.requests]
    assert len(set(seeds)) == 4


# --- tools ---


def answer_all(content="x"):
    """A handler that gives every call the same answer."""
    return lambda calls: [{"tool_call_id": c["id"], "tool_name": "ask", "content": content} for c in calls]


def asking_agent(replies=None, **settings):
    """Asks once and then acts, unless there are other replies."""
    replies = replies or [call("ask", question="why"), "<a>inc</a>", "<a>inc</a>"]
    return make_agent(replies, cls=ReActAgent, external_tools=[ask], **settings)


async def test_a_tool_loop_is_one_turn():
    agent = make_agent([call("add", a=1, b=2), "<a>inc</a>", "<a>inc</a>"], cls=ReActAgent, tools=[add])
    rollout = await run(None, agent=agent)
    tool_step, action_step, env_step = rollout.steps[:3]
    assert tool_step.turn_id == action_step.turn_id == env_step.turn_id
    assert list(env_step.agent_step_ids) == [tool_step.id, action_step.id]
    assert action_step.parent_id == tool_step.id and action_step.loop_index == 1
    assert tool_step.reward == 0.0 and "parse_error" not in tool_step.info
    assert rollout.total_reward == pytest.approx(1.2)


async def test_handler_answers_external_calls_in_the_same_turn():
    seen = []

    async def handler(calls):
        seen.extend(calls)
        return answer_all("because")(calls)

    rollout = await run(None, agent=asking_agent(), protocol={"external_tool_handler": handler})
    external, action = rollout.steps[:2]
    assert external.action_target == "external" and external.turn_id == action.turn_id and action.loop_index == 1
    shown = {"role": "tool", "tool_call_id": "call00000", "name": "ask", "content": "because"}
    assert action.prompt_messages[-1] == shown
    assert [c["function"]["name"] for c in seen] == ["ask"]


async def test_external_calls_without_a_handler_are_an_error_that_names_them():
    with pytest.raises(RuntimeError, match=r"\['ask'\].*external_tool_handler"):
        await run(None, agent=asking_agent())


async def test_external_tool_rounds_are_limited():
    agent = asking_agent(lambda request: call("ask", question="why"))
    protocol = {"external_tool_handler": answer_all(), "max_external_rounds": 2}
    rollout = await run(None, agent=agent, max_steps=1, protocol=protocol)
    assert len(rollout.steps) == 3 and rollout.stop is StopReason.MAX_STEPS
    assert rollout.steps[-1].truncated


async def test_handler_errors_and_timeouts_are_reported_to_the_model():
    async def hang(calls):
        await asyncio.sleep(60)

    def explode(calls):
        raise ConnectionError("gone")

    for handler, words in ((hang, "0.01 s"), (explode, "gone")):
        protocol = {"external_tool_handler": handler, "external_tool_timeout_s": 0.01}
        rollout = await run(None, agent=asking_agent(), protocol=protocol)
        answer = rollout.agent_steps[1].prompt_messages[-1]["content"]
        assert answer.startswith("Error") and words in answer and rollout.stop is StopReason.TERMINATED


async def test_answers_are_shown_in_the_order_of_the_calls():
    def backwards(calls):
        return [{"tool_call_id": c["id"], "tool_name": "ask", "content": c["id"]} for c in reversed(calls)]

    replies = [call("ask", question="1") + call("ask", question="2"), "<a>inc</a>", "<a>inc</a>"]
    rollout = await run(None, agent=asking_agent(replies), protocol={"external_tool_handler": backwards})
    assert [m["content"] for m in rollout.agent_steps[1].prompt_messages[-2:]] == ["call00000", "call00001"]


# --- bad input ---


async def test_an_agent_cannot_be_in_two_episodes_at_once():
    class GivesWay(ScriptedClient):
        async def complete_tokens(self, request):
            await asyncio.sleep(0)
            return await super().complete_tokens(request)

    class OnTheLoop(CountingEnv):  # so that the second episode begins in the middle of the first
        blocking = False

    protocol = SingleAgentProtocol(make_agent(GivesWay(lambda request: "<a>inc</a>")))
    runs = [protocol.run(env=OnTheLoop(2), max_steps=5) for _ in range(2)]
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert isinstance(results[1], ValueError) and "one agent" in str(results[1])
    assert results[0][0].stop is StopReason.TERMINATED
    await protocol.run(env=CountingEnv(2), max_steps=5)  # one after the other is fine


async def test_an_agent_is_free_again_after_a_failure():
    agent = make_agent(["<a>inc</a>"])
    with pytest.raises(ValueError, match="no replies left"):
        await run(None, agent=agent)
    agent.client = ScriptedClient(["<a>inc</a>"] * 2)
    assert (await run(None, agent=agent)).stop is StopReason.TERMINATED


@pytest.mark.parametrize("bad", [{"max_steps": 0}, {"env": CountingEnv}])
async def test_wrong_arguments_of_run_are_refused(bad):
    with pytest.raises(ValueError, match="max_steps=0|environment object"):
        await SingleAgentProtocol(make_agent([])).run(**{"env": CountingEnv(), "max_steps": 1, **bad})


async def test_an_env_without_active_agents_on_the_last_step_is_not_truncated():
    class Silent(CountingEnv):
        @property
        def active_agents(self):
            return [] if self.count >= 2 else super().active_agents

        def env_step(self, action):
            self.count += 1
            return StepOutcome("x", 0.0)

    for limit in (2, 3):
        rollout = await run(["<a>inc</a>"] * 3, env=Silent(), max_steps=limit)
        assert rollout.stop is StopReason.NOBODY_ACTIVE and not rollout.steps[-1].truncated


async def test_an_env_with_two_agents_is_refused_with_advice():
    class Two(CountingEnv):
        agent_ids = ["a", "b"]

    with pytest.raises(ValueError, match="MultiAgentProtocol"):
        await run(["x"], env=Two())


async def test_error_names_an_env_whose_reset_returns_the_wrong_type():
    class Wrong(CountingEnv):
        def env_reset(self, *, seed=None):
            return "obs"

    with pytest.raises(EnvContractError, match=r"Wrong\.env_reset"):
        await run(["<a>inc</a>"], env=Wrong())


async def test_an_async_env_is_awaited_and_wrong_method_names_are_an_error():
    class Remote(SingleAgentEnv):
        def env_reset(self, *, seed=None):
            raise AssertionError("the awaitable one is used")

        env_step = env_reset

        async def async_env_reset(self, *, seed=None):
            await asyncio.sleep(0)
            return "hello", {}

        async def async_env_step(self, action):
            await asyncio.sleep(0)
            return StepOutcome("bye", 2.0, truncated=False, terminated=True)

    assert (await run(["<a>x</a>"], env=Remote())).total_reward == pytest.approx(2.1)
    with pytest.raises(ValueError, match="async_env_step"):

        class Misnamed(CountingEnv):
            async def env_step(self, action): ...


async def test_a_blocking_env_leaves_the_event_loop_free():
    import threading

    class Blocking(CountingEnv):
        blocking = True

        def env_step(self, action):
            self.thread = threading.current_thread()
            return super().env_step(action)

    env = Blocking(1)
    await run(["<a>inc</a>"], env=env)
    assert env.thread is not threading.main_thread()


async def test_a_first_prompt_that_does_not_fit_is_an_error():
    with pytest.raises(PromptTooLong):
        await run(["<a>inc</a>"], max_prompt_tokens=3)


async def test_a_later_prompt_that_does_not_fit_ends_the_episode_and_keeps_the_samples():
    rollout = await run(["<a>inc</a>"] * 9, env=CountingEnv(9), max_prompt_tokens=60)
    assert rollout.stop is StopReason.CONTEXT_FULL and rollout.meta["truncation_reason"] == "context_full"
    last = rollout.steps[-1]
    assert last.kind == "env" and last.truncated and last.next_obs is None and len(rollout.env_steps) >= 2


async def test_a_tool_loop_that_fills_the_context_keeps_its_steps():
    replies = [call("add", a=1, b=2)] * 5
    agent = make_agent(replies, cls=ReActAgent, tools=[add], max_prompt_tokens=420)
    rollout = await run(None, agent=agent)
    assert rollout.stop is StopReason.CONTEXT_FULL and rollout.agent_steps
    assert all(step.action_target == "internal" for step in rollout.agent_steps)


async def test_a_token_budget_cuts_the_reply_that_reaches_it_and_ends_the_episode():
    rollout = await run(["<a>inc</a>"] * 9, env=CountingEnv(9), protocol={"max_tokens": 25})
    assert rollout.stop is StopReason.TOKEN_BUDGET and len(rollout.env_steps) == 2
    assert sum(len(s.trace.completion_token_ids) for s in rollout.agent_steps) == 25
    assert rollout.steps[-1].info["incomplete_completion"] and rollout.steps[-1].truncated


# --- memory ---


async def test_memory_of_a_rollout_is_linear_in_its_turns():
    """Prompts and messages are stored once for any number of turns."""

    async def stored(num_turns: int) -> int:
        rollout = await run(["<a>inc</a>"] * num_turns, env=CountingEnv(10**9), max_steps=num_turns)
        bases = {id(b): b.nbytes for s in rollout.agent_steps if (b := s.trace.prompt_token_ids.base) is not None}
        logs = {id(s.prompt_messages._log): len(s.prompt_messages._log) for s in rollout.agent_steps}
        assert len(logs) == 1
        return sum(bases.values()) + len(rollout.to_json())

    assert await stored(200) < 12 * await stored(20)
