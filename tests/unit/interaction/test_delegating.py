import asyncio

from ludic.agents import ReActAgent
from ludic.inference import ScriptedClient
from ludic.interaction import Delegate, DelegatingProtocol
from ludic.types import Rollout, StopReason
from tests.fakes import CountingEnv, RecordingClient, make_agent
from tests.unit.agents.test_tool_agents import add, ask, call


def order(task="count", to="helper"):
    return call("delegate", to=to, task=task)


def boss(replies, delegates, **kwargs):
    external = [DelegatingProtocol.tool(delegates), *kwargs.pop("external_tools", [])]
    return make_agent(replies, cls=ReActAgent, external_tools=external, **kwargs)


def helpers(replies=("<a>four</a>",), **kwargs):
    return {"helper": Delegate(make_agent=lambda: make_agent(list(replies)), **kwargs)}


def then_breaks(*replies):
    """Says these, and then its server is gone."""
    script = iter(replies)

    def reply(request):
        try:
            return next(script)
        except StopIteration:
            raise ConnectionError("server gone") from None

    return ScriptedClient(reply)


async def run(replies, delegates, *, env=None, **kwargs) -> list[Rollout]:
    protocol = DelegatingProtocol(boss(replies, delegates), delegates=delegates, **kwargs)
    return await protocol.run(env=env or CountingEnv(1), max_steps=5, sampling_seed=1, env_seed=2)


async def test_parent_and_child_are_both_returned_and_linked():
    parent, child = await run([order(), "<a>inc</a>"], helpers())
    assert parent.meta["child_rollout_ids"] == [child.id] and parent.meta["depth"] == 0
    assert child.meta["parent_rollout_id"] == parent.id and child.meta["depth"] == 1
    assert child.meta["parent_step_id"] == parent.steps[0].id and child.meta["delegate"] == "helper"
    assert parent.steps[0].action_target == "external"
    assert child.agent_steps[0].prompt_messages[-1]["content"] == "count"


async def test_children_of_one_message_run_concurrently_and_are_returned_in_order():
    barrier = asyncio.Barrier(2)

    class Meets(ScriptedClient):
        async def complete_tokens(self, request):
            await asyncio.wait_for(barrier.wait(), 2)
            return await super().complete_tokens(request)

    delegates = {
        "slow": Delegate(make_agent=lambda: make_agent(Meets(["<a>slow</a>"]))),
        "fast": Delegate(make_agent=lambda: make_agent(Meets(["<a>fast</a>"]))),
    }
    rollouts = await run([order(to="slow") + order(to="fast"), "<a>inc</a>"], delegates)
    assert [r.meta["delegate"] for r in rollouts[1:]] == ["slow", "fast"]
    assert [m["content"] for m in rollouts[0].agent_steps[1].prompt_messages[-2:]] == ["slow", "fast"]


async def test_number_of_children_is_limited():
    rollouts = await run([order(), order(), order(), "<a>inc</a>"], helpers(), max_children=2)
    assert len(rollouts) == 3
    assert "all 2 delegations are used" in rollouts[0].agent_steps[3].prompt_messages[-1]["content"]


def nesting(delegates):
    def make():
        return boss(lambda request: order() if "tool" not in _roles(request) else "<a>done</a>", delegates)

    return make


def _roles(request):
    return [role for role, number in (("tool", 259),) if number in request.prompt_token_ids.tolist()]


async def test_depth_is_limited_and_grandchildren_are_linked_to_their_parent():
    delegates: dict[str, Delegate] = {}
    delegates["helper"] = Delegate(make_agent=nesting(delegates))
    # The tool lists the delegates when the agent is made, so the table is complete by then.
    root, child, grandchild = await run([order(), "<a>inc</a>"], delegates, max_depth=2)
    assert [r.meta["depth"] for r in (root, child, grandchild)] == [0, 1, 2]
    assert grandchild.meta["parent_rollout_id"] == child.id and child.meta["parent_rollout_id"] == root.id
    refused = grandchild.agent_steps[1].prompt_messages[-1]["content"]
    assert "depth 2 cannot delegate further" in refused


async def test_a_childs_tokens_are_limited():
    delegates = helpers(["<a>inc</a>"] * 9, make_env=lambda task: CountingEnv(9), max_steps=9)
    _, child = await run([order(), "<a>inc</a>"], delegates, max_child_tokens=15)
    assert child.stop is StopReason.TOKEN_BUDGET and child.meta["episode_truncated"] is True
    assert sum(len(s.trace.completion_token_ids) for s in child.agent_steps) == 15


async def test_a_childs_tokens_are_limited_inside_one_turn_too():
    def looping():
        return make_agent(lambda request: call("add", a=1, b=2), cls=ReActAgent, tools=[add], max_react_steps=99)

    _, child = await run([order(), "<a>inc</a>"], {"helper": Delegate(make_agent=looping)}, max_child_tokens=200)
    assert child.stop.is_truncation  # its only turn ends on a reply that was cut off
    assert sum(len(s.trace.completion_token_ids) for s in child.agent_steps) == 200


async def test_a_failing_child_keeps_its_steps_and_its_own_children():
    delegates: dict[str, Delegate] = {}
    delegates["leaf"] = Delegate(make_agent=lambda: make_agent(["<a>leaf</a>"]))
    delegates["mid"] = Delegate(make_agent=lambda: boss(then_breaks(order(to="leaf")), delegates))
    root, mid, leaf = await run([order(to="mid"), "<a>inc</a>"], delegates, max_depth=2)
    assert mid.stop is StopReason.FAILED and mid.failure.error == "ConnectionError" and len(mid.steps) == 1
    assert leaf.stop is StopReason.TERMINATED and leaf.meta["parent_rollout_id"] == mid.id
    assert root.stop is StopReason.TERMINATED and root.meta["child_rollout_ids"] == [mid.id]


async def test_tool_results_are_in_the_order_of_the_calls():
    def handler(calls):
        return [{"tool_call_id": c["id"], "tool_name": "ask", "content": "asked"} for c in calls]

    delegates = helpers()
    replies = [order() + call("ask", question="why") + call("add", a=1, b=2), "<a>inc</a>"]
    agent = boss(replies, delegates, external_tools=[ask], tools=[add])
    protocol = DelegatingProtocol(agent, delegates=delegates, external_tool_handler=handler)
    rollouts = await protocol.run(env=CountingEnv(1), max_steps=2)
    assert [m["content"] for m in rollouts[0].agent_steps[1].prompt_messages[-3:]] == ["four", "asked", "3"]


async def test_a_failing_child_is_recorded_and_reported_to_the_parent():
    delegates = {"helper": Delegate(make_agent=lambda: make_agent(then_breaks()))}
    parent, child = await run([order(), "<a>inc</a>"], delegates)
    assert (
        child.failure is not None and child.stop is StopReason.FAILED and child.meta["parent_rollout_id"] == parent.id
    )
    assert "sub-agent failed" in parent.agent_steps[1].prompt_messages[-1]["content"]
    assert parent.stop is StopReason.TERMINATED


async def test_other_external_tools_go_to_the_handler():
    def handler(calls):
        return [{"tool_call_id": c["id"], "tool_name": "ask", "content": "because"} for c in calls]

    delegates = helpers()
    agent = boss([call("ask", question="why") + order(), "<a>inc</a>"], delegates, external_tools=[ask])
    protocol = DelegatingProtocol(agent, delegates=delegates, external_tool_handler=handler)
    rollouts = await protocol.run(env=CountingEnv(1), max_steps=2)
    assert {m["content"] for m in rollouts[0].agent_steps[1].prompt_messages[-2:]} == {"because", "four"}


async def test_child_seeds_differ_and_are_reproducible():
    def seeds_of_a_run():
        clients = []

        def make():
            clients.append(RecordingClient(ScriptedClient(["<a>x</a>"])))
            return make_agent(clients[-1])

        return clients, {"helper": Delegate(make_agent=make)}

    results = []
    for _ in range(2):
        clients, delegates = seeds_of_a_run()
        await run([order(), order(), "<a>inc</a>"], delegates)
        results.append([client.requests[0].seed for client in clients])
    assert results[0] == results[1] and len(set(results[0])) == 2


def test_tool_description_lists_the_sub_agents():
    from ludic.tools import tool_schema

    schema = tool_schema(
        DelegatingProtocol.tool(
            {"a": Delegate(make_agent=make_agent, description="adds"), "b": Delegate(make_agent=make_agent)}
        )
    )
    assert schema["function"]["name"] == "delegate" and "a: adds; b" in schema["function"]["description"]
    assert schema["function"]["parameters"]["properties"]["to"]["enum"] == ["a", "b"]
