"""The embedded engine with pictures: what it samples has the log-probs of the trainer, turn by turn, from env to sample."""

import asyncio

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="the vision extra is not installed")

from ludic.agents import Agent
from ludic.batch_gen import stitch_rollout
from ludic.context import FullDialog, SlidingWindow
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.models.kinds import image_processor_of
from ludic.parsers import ParseResult
from ludic.run.model import make_template
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import (
    ConfigError,
    InferenceSpec,
    ReturnSpec,
    Rollout,
    SamplingParams,
    TokenCompletionRequest,
    content_of,
    load_rollouts,
    save_rollouts,
)
from ludic_envs.picture_grid import PictureGridEnv, draw_grid
from ludic_gpu.tiny_vision import tiny_vision
from tests.unit.inference.local.tiny_models import new_model

SAMPLING = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=5), return_=ReturnSpec.for_rl())


def prompt_of(made, size: int, cell: int):
    return make_template(made.tokenizer).apply(
        [{"role": "user", "content": content_of("Which?", draw_grid(size, 8, cell))}]
    )


def request_of(prompt, seed: int, **sampling) -> TokenCompletionRequest:
    return TokenCompletionRequest(
        "policy",
        prompt.prompt_token_ids,
        sampling=SamplingParams(temperature=1.0, **{"max_tokens": 6, "ignore_eos": True, **sampling}),
        return_=ReturnSpec.for_rl(),
        seed=seed,
        images=prompt.images,
    )


def trainer_logps(made, items):
    policy = TrainedPolicy(made.model.eval(), images=image_processor_of(made.tokenizer))
    with torch.no_grad():
        return policy.logps(policy.batch(items))[0].numpy()


async def test_requests_with_equal_tokens_and_different_pictures_are_computed_apart_and_equal_ones_together():
    made = tiny_vision(width=32, seed=4)
    prompts = [prompt_of(made, 3, 0), prompt_of(made, 3, 8), prompt_of(made, 3, 0), prompt_of(made, 2, 1)]
    requests = [request_of(prompt, seed=7) for prompt in prompts]
    async with LocalEngine(made.model, made.tokenizer, max_model_len=512) as engine:
        answers = await asyncio.gather(*map(engine.complete_tokens, requests))
        alone = [await engine.complete_tokens(request) for request in requests]
    together = [response for response, _ in answers]
    for a, (b, _) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a.completion_token_ids, b.completion_token_ids)
        np.testing.assert_allclose(a.completion_logprobs, b.completion_logprobs, atol=1e-5)
    first, other, same, _ = together
    np.testing.assert_allclose(first.completion_logprobs, same.completion_logprobs, atol=1e-5)
    assert not np.allclose(first.completion_logprobs[:1], other.completion_logprobs[:1], atol=1e-6)


def play(made, context, *, rounds: int) -> Rollout:
    env = PictureGridEnv(size=2, rounds=rounds, cell_pixels=8)

    async def episode():
        async with LocalEngine(made.model, made.tokenizer, max_model_len=1024) as engine:
            agent = Agent(
                client=engine,
                model="policy",
                ctx=context,
                parser=lambda text: ParseResult(text or "?", 0.0, None),
                chat_template=make_template(made.tokenizer),
                reject_incomplete_completions=False,
            )
            protocol = SingleAgentProtocol(agent)
            (rollout,) = await protocol.run(env=env, max_steps=8, env_seed=1, sampling_seed=2, inference=SAMPLING)
            return rollout

    return asyncio.run(episode())


@pytest.mark.parametrize(
    "context, num_samples", [(FullDialog, 1), (lambda: SlidingWindow(max_turns=1), 3)], ids=["grows", "slides"]
)
def test_an_episode_with_a_picture_per_turn_trains_on_the_tokens_that_were_sampled(context, num_samples, tmp_path):
    made = tiny_vision(width=32, seed=5)
    rollout = play(made, context(), rounds=3)
    save_rollouts([rollout], tmp_path / "rollouts.jsonl")
    (loaded,) = load_rollouts(tmp_path / "rollouts.jsonl")
    assert [step.trace for step in loaded.steps] == [step.trace for step in rollout.steps]
    assert loaded.to_json() == rollout.to_json()
    hashes = {span.image.sha256 for step in rollout.agent_steps for span in step.trace.images}
    stored = (tmp_path / "rollouts.jsonl").read_text()
    assert stored.count("base64") == len(hashes), "each picture is stored once"
    credit = {(rollout.id, step.index): 1.0 for step in rollout.steps}
    items = stitch_rollout(loaded, credit)
    assert len(items) == num_samples
    assert [len(item.attachments.images) for item in items] == ([3] if num_samples == 1 else [1, 1, 1])
    sampled = np.concatenate([item.actor_logps for item in items])
    assert len(sampled) == sum(len(step.trace.completion_token_ids) for step in rollout.agent_steps)
    np.testing.assert_allclose(trainer_logps(made, items), sampled, atol=1e-4)


async def test_new_weights_recompute_prompts_with_their_pictures():
    made = tiny_vision(width=32, seed=6)
    async with LocalEngine(made.model, made.tokenizer, max_model_len=512) as engine:
        prompt = prompt_of(made, 3, 4)
        stream = engine.stream_tokens(request_of(prompt, seed=1, max_tokens=8))
        await anext(stream)
        with engine.updating(1), torch.no_grad():
            for parameter in made.model.parameters():
                parameter.mul_(1.05)
        response = [chunk async for chunk in stream][-1].response
    versions = [run.version for run in response.version_runs]
    assert versions[-1] == 1 and len(response.completion_token_ids) == 8
    num_new = response.version_runs[-1].length
    item = stitch_one(prompt, response)
    np.testing.assert_allclose(
        trainer_logps(made, [item])[-num_new:], response.completion_logprobs[-num_new:], atol=1e-4
    )


def stitch_one(prompt, response):
    from ludic.types import SampleAttachments, SAWItem

    ids = np.concatenate([prompt.prompt_token_ids, response.completion_token_ids])
    mask = np.arange(len(ids)) >= len(prompt.prompt_token_ids)
    return SAWItem(ids, None, mask, 1.0, attachments=SampleAttachments(images=prompt.images))


async def test_a_model_of_text_refuses_a_request_with_pictures():
    made = tiny_vision(width=32)
    prompt = prompt_of(made, 2, 0)
    async with LocalEngine(new_model("llama")) as engine:
        with pytest.raises(ConfigError, match="takes text only"):
            await engine.complete_tokens(request_of(prompt, seed=1))
