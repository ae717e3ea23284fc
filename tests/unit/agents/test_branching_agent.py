"""A branch of the context: what is in it is forgotten when it returns, and every token stays as it was sampled."""

import json
from dataclasses import replace

import pytest
import torch

from ludic.agents import BranchingAgent
from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, RolloutEngine
from ludic.batch_gen.stitching import stitch_rollout
from ludic.inference import ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.models.prefix_tree import TokenTree
from ludic.training import make_fold_grpo
from ludic.training.credit_assignment import EpisodicReturn, fold_penalties
from ludic.types import EnvSpec, InferenceSpec, ProtocolSpec, ReturnSpec, RolloutRequest, SamplingParams
from tests.fakes import CountingEnv, RecordingClient, make_agent
from tests.unit.training.bandit import hand_trainer, tiny_llama

FOR_RL = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=512), return_=ReturnSpec.for_rl())


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def branching(replies, **kwargs):
    agent = make_agent(replies, cls=BranchingAgent, tools=[add], **kwargs)
    agent.reset()
    agent.on_env_reset("obs", {})
    return agent


BRANCHED = [
    call("add", a=1, b=1),
    call("branch", task="add more"),
    call("add", a=2, b=2),
    "thinking " + call("return_result", result="it is 4"),
    "<a>6</a>",
]


async def test_the_branch_sees_everything_before_it():
    steps = (await branching(BRANCHED).act()).steps
    inside = [m["content"] for m in steps[2].prompt_messages]
    assert inside[-1].startswith("You are in a branch now") and "add more" in inside[-1] and "2" in inside
    assert ["branch" in step.info for step in steps] == [False, False, True, True, False]


async def test_prompts_go_back_to_the_sampled_tokens_of_the_call():
    client = RecordingClient(ScriptedClient(BRANCHED))
    await branching(client).act()
    prompts = [prompt for prompt, _ in client.calls]
    called = [*prompts[1], *client.calls[1][1]]  # the prompt and the sampled tokens of the call of `branch`
    for prompt in prompts[2:]:  # in the branch, and after it
        assert prompt[: len(called)] == called
    assert len(prompts[4]) < len(prompts[3])


async def test_samples_of_an_episode_are_paths_of_one_tree_and_train_each_token_once():
    agent = make_agent(BRANCHED, cls=BranchingAgent, tools=[add])
    (rollout,) = await SingleAgentProtocol(agent).run(env=CountingEnv(1), max_steps=1)
    weights = EpisodicReturn().compute([rollout])
    first, second = stitch_rollout(rollout, weights)
    sampled = sum(len(step.trace.completion_token_ids) for step in rollout.agent_steps)
    assert first.num_action_tokens + second.num_action_tokens == sampled
    tree = TokenTree.of([first.input_ids, second.input_ids])
    shared = len(first.input_ids) + len(second.input_ids) - tree.num_tokens
    branch_call = rollout.agent_steps[1].trace
    assert shared >= len(branch_call.prompt_token_ids) + len(branch_call.completion_token_ids)
    penalties = fold_penalties(max_main_tokens=1)(rollout)
    assert sorted(penalties) == [rollout.agent_steps[0].index, rollout.agent_steps[4].index]  # not the branch's calls


async def test_a_branch_lasts_over_turns_of_the_env():
    replies = [call("branch", task="t"), "<a>1</a>", call("return_result", result="done"), "<a>2</a>"]
    agent = branching(replies)
    first = (await agent.act()).steps
    agent.on_after_step("next", {})
    second = (await agent.act()).steps
    assert first[-1].parse_result.action == "1" and "branch" in first[-1].info
    assert [m["content"] for m in second[-1].prompt_messages][-1] == "done"
    assert "next" not in [m["content"] for m in second[-1].prompt_messages]


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ([call("return_result", result="x"), "<a>1</a>"], "there is no branch"),
        ([call("branch", task="a"), call("branch", task="b"), "<a>1</a>"], "in a branch already"),
        ([call("branch", task="a") + call("add", a=1, b=1), "<a>1</a>"], "call branch alone"),
        (
            [call("branch", task="a"), call("return_result", result="r"), call("branch", task="b"), "<a>1</a>"],
            "all 1 branches are used",
        ),
    ],
)
async def test_a_wrong_call_is_told(replies, said):
    *_, final = (await branching(replies, max_branches=1).act()).steps
    assert any(said in m["content"] for m in final.prompt_messages if m["role"] == "tool")


# --- training ---


class Six(CountingEnv):
    """6 is right."""

    def __init__(self):
        super().__init__(1)

    def env_step(self, action):
        return replace(super().env_step(action), reward=float(action == "6"))


class Sampled:
    """Replies by the script, with the log-probs that the model gives them."""

    def __init__(self, model, replies):
        self.inner, self.model = ScriptedClient(replies), model

    async def complete_tokens(self, request):
        response, info = await self.inner.complete_tokens(request)
        start, ids = len(request.prompt_token_ids), [*request.prompt_token_ids, *response.completion_token_ids]
        with torch.no_grad():
            logps = self.model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        own = logps[range(len(ids) - start), ids[start:]].numpy()
        return replace(response, completion_logprobs=own), info

    def sync_weights(self, params, *, timeout_s=600.0, version=None):
        raise RuntimeError("not served")


@pytest.mark.slow
async def test_fold_grpo_trains_parents_and_branches_of_real_episodes():
    model = tiny_llama(max_position_embeddings=8192)
    replies = iter([*BRANCHED, *BRANCHED[:-1], "<a>5</a>"])
    client = Sampled(model, lambda request: next(replies))
    algorithm = make_fold_grpo(group_size=2)
    source = RolloutBatchSource(
        RolloutEngine(
            env_registry={"six": Six},
            protocol_registry={"one": lambda: SingleAgentProtocol(make_agent(client, cls=BranchingAgent, tools=[add]))},
        ),
        requests_fn=lambda: [RolloutRequest(env=EnvSpec("six"), protocol=ProtocolSpec("one"), inference=FOR_RL)],
        algorithm=algorithm,
        strategy=GRPORequestStrategy(2),
        max_steps=1,
        concurrency=1,
    )
    batch = await source.next_batch()
    assert len(batch.items) == 4, "each episode is its branch and what is left after it"
    assert [item.origin.total_reward for item in batch.items] == [1.1, 1.1, 0.1, 0.1], "what is read earns 0.1"
    for item, weight in zip(batch.items, [1, 1, -1, -1], strict=True):
        assert item.token_weights == pytest.approx(weight)
    trainer = hand_trainer(
        batch.items, model=model, algo=algorithm, cfg={"max_seq_len": 8192, "micro_token_budget": 16_384}
    )
    stats = await trainer.train_step()
    assert stats["train/grad_norm"] > 0 and stats["train/ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert stats["train/num_rollouts"] == 2 and stats["train/num_samples"] == 4
