"""The local back end: the same update as the library's, and as a plain torch loop; and it learns."""

import copy
import json

import numpy as np
import pytest
import torch

from ludic.batch_gen import stitch_rollouts
from ludic.models.loading import LoadedModel, tiny_llama, word_tokenizer
from ludic.training import Trainer, TrainerConfig, make_dr_grpo
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    RequestsExhausted,
    Rollout,
    SAWBatch,
    StopReason,
)
from rolo import (
    Action,
    CompletionOutput,
    GRPOConfig,
    GRPOTrainer,
    Message,
    RenderedPrompt,
    Reward,
    RolloutGenerator,
    State,
    Step,
    TrainingBatch,
    Trajectory,
)
from rolo.library import as_trace
from rolo.local_backend import LocalModel, LocalModelConfig
from tests.unit.training.samples import assert_same_up_to_rounding, first_moments

pytestmark = pytest.mark.slow

WORDS = ["say", "yes", "no", "maybe", "again"]
LEARNING_RATE = 3e-3


def loaded(seed: int = 0) -> LoadedModel:
    tokenizer = word_tokenizer(WORDS)
    return LoadedModel(tiny_llama(len(tokenizer), width=32, layers=2, seed=seed), tokenizer, "words")


@pytest.fixture
def model():
    config = LocalModelConfig(learning_rate=LEARNING_RATE, max_tokens=3, max_seq_len=64)
    local = LocalModel(config, loaded())
    yield local
    local.close()


# --- the same update ------------------------------------------------------------------------------------------

REWARDS = [[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.5, 0.5]]
"""Of three groups: one as usual, one that tells nothing, one with two members just at its mean."""


class Turns:
    """As many turns as the example says, so that items have several stretches of action tokens."""

    def __init__(self, example):
        self.left, self.messages = example["turns"], (Message("user", "say yes"),)

    def start(self) -> State:
        return State(self.messages)

    def step(self, action: Action) -> State | None:
        self.left -= 1
        self.messages += (action.message, Message("user", "again"))
        return State(self.messages) if self.left else None


class TurnsBuilder:
    def build(self, example):
        return Turns(example)


class Replayed:
    """A generator that gives what was played before."""

    def __init__(self, groups):
        self.groups = groups

    async def generate(self, examples, *, policy, samples_per_prompt, seed=0):
        return self.groups


class Listed:
    """Rewards by position."""

    def __init__(self, rewards):
        self.values = [value for group in rewards for value in group]

    def score(self, example, trajectory):
        value = self.values.pop(0)
        return Reward(value, value == 1.0)


class NoData:
    def batches(self):
        return iter(())


def weights_of(network) -> dict[str, "torch.Tensor"]:
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def library_rollout(trajectory: Trajectory, reward: float, group: int) -> Rollout:
    """As a protocol of the library writes it down: a model call and an env step per turn."""
    steps = []
    for turn, step in enumerate(trajectory.steps):
        is_last = turn == len(trajectory.steps) - 1
        call = AgentStep(
            index=2 * turn, prompt_messages=[m.as_dict() for m in step.state.messages], action=step.action.text, trace=as_trace(step.completion, 1.0),
            turn_id=f"t{turn}",
        )  # fmt: skip
        moved = EnvironmentStep(
            index=2 * turn + 1, prev_obs="again", action=step.action.text, parsed_action=step.action.text, next_obs="again",
            source_agent_step_id=call.id, agent_step_ids=[call.id], reward=reward if is_last else 0.0, terminated=is_last,
            trace=as_trace(step.completion, 1.0), turn_id=f"t{turn}",
        )  # fmt: skip
        steps += [call, moved]
    return Rollout(steps=steps, stop=StopReason.TERMINATED, meta={"request_meta": {"group_id": str(group)}})


class Batches:
    def __init__(self, *batches):
        self.left = list(batches)

    async def next_batch(self):
        return self.left.pop(0)


async def update_by_the_library(network, groups, num_updates: int):
    rollouts = [
        library_rollout(t, reward, n)
        for n, (group, rewards) in enumerate(zip(groups, REWARDS, strict=True))
        for t, reward in zip(group, rewards, strict=True)
    ]
    algo = make_dr_grpo(group_size=4, drop_zero_weight=True)
    batch = SAWBatch(items=stitch_rollouts(rollouts, algo.credit_assigner.compute(rollouts), require_logprobs=True))
    trainer = Trainer(
        model=network, algo=algo, batch_source=Batches(*[batch] * num_updates),
        cfg=TrainerConfig(lr=LEARNING_RATE, max_seq_len=64, micro_token_budget=64),
    )  # fmt: skip
    for _ in range(num_updates):
        await trainer.train_step()
    return first_moments(network, trainer.optimizer)


def update_by_hand(network, groups, num_updates: int):
    """−1/N Σ A_i Σ_t min(ρ, clip ρ) over the N trajectories whose advantage is not 0; gradient norm 1; AdamW."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    weighed = [
        (t, reward - np.mean(rewards))
        for group, rewards in zip(groups, REWARDS, strict=True)
        for t, reward in zip(group, rewards, strict=True)
        if reward != np.mean(rewards)
    ]
    for _ in range(num_updates):
        loss = torch.zeros(())
        for trajectory, advantage in weighed:
            for step in trajectory.steps:
                prompt, sampled = step.completion.prompt.token_ids, step.completion.token_ids
                ids = torch.from_numpy(np.concatenate([prompt, sampled]).astype(np.int64))
                logits = network(ids[None]).logits[0, len(prompt) - 1 : -1]
                logps = torch.log_softmax(logits, -1).gather(-1, ids[len(prompt) :, None])[:, 0]
                ratio = (logps - torch.tensor(step.completion.logprobs)).exp()
                kept = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = loss - kept.sum() / len(weighed)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return first_moments(network, optimizer)


@pytest.mark.parametrize("num_updates", [1, 3])
async def test_minimal_library_and_plain_torch_make_the_same_update_of_the_same_trajectories(model, num_updates):
    before = weights_of(model.trainer.model)
    by_library, by_hand = copy.deepcopy(model.trainer.model), copy.deepcopy(model.trainer.model)
    generator = RolloutGenerator(env_builder=TurnsBuilder(), renderer=model.renderer(), max_turns=3)
    examples = [{"turns": 1}, {"turns": 2}, {"turns": 3}]
    groups = await generator.generate(examples, policy=model.policy(), samples_per_prompt=4, seed=11)
    assert [len(group[0].steps) for group in groups] == [1, 2, 3]
    loop = GRPOTrainer(
        model=model, generator=Replayed(groups), reward_model=Listed(REWARDS * num_updates), data_loader=NoData(),
        config=GRPOConfig(samples_per_prompt=4),
    )  # fmt: skip
    for _ in range(num_updates):
        found = await loop.train_step(examples)
    assert found["train/num_samples"] == 6, "all of the first group, none of the second, two of the third"
    moments = first_moments(model.trainer.model, model.trainer.optimizer)
    assert_same_up_to_rounding(await update_by_the_library(by_library, groups, num_updates), moments)
    assert_same_up_to_rounding(update_by_hand(by_hand, groups, num_updates), moments)
    updated, from_library, from_hand = map(weights_of, (model.trainer.model, by_library, by_hand))
    assert max(float((updated[name] - before[name]).abs().max()) for name in before) > LEARNING_RATE / 2
    for name, moment in moments.items():
        # Where gradients are 1/100 of the largest, the 1e-5 of rounding are 1e-3 of them, and so of a step of at most lr.
        is_clear = moment.abs() > moment.abs().max() / 100
        assert is_clear.any()
        for other in (from_library, from_hand):
            difference = (updated[name] - other[name])[is_clear].abs().max()
            assert float(difference) < num_updates * LEARNING_RATE * 1e-2, name


# --- sampling, updating, saving -------------------------------------------------------------------------------


class SayYes:
    def __init__(self, example):
        self.messages = (Message("user", "say yes"),)

    def start(self) -> State:
        return State(self.messages)

    def step(self, action: Action) -> None:
        return None


class SayYesBuilder:
    def build(self, example):
        return SayYes(example)


class YesReward:
    def score(self, example, trajectory) -> Reward:
        is_yes = trajectory.last_action.text.startswith("yes")
        return Reward(float(is_yes), is_yes)


class OneProblem:
    def batches(self):
        while True:
            yield [{}] * 4


@pytest.mark.extended(covered_by="plugins/rolo/tests/test_rolo_page.py::test_the_program_learns_as_the_page_says")
@pytest.mark.slow
async def test_training_learns_to_say_yes_and_sampling_uses_the_new_weights(model, tmp_path):
    config = GRPOConfig(
        samples_per_prompt=8, max_steps=30, eval_on_start=True, eval_every_steps=30, save_best_checkpoint=True,
        run_dir=tmp_path,
    )  # fmt: skip
    loop = GRPOTrainer(
        model=model, generator=RolloutGenerator(env_builder=SayYesBuilder(), renderer=model.renderer()),
        reward_model=YesReward(), data_loader=OneProblem(), config=config, eval_examples=[{}] * 8,
    )  # fmt: skip
    start, end = await loop.train()
    assert start["eval/accuracy"] < 0.3 and end["eval/accuracy"] > 0.9
    assert model.engine.version == model.trainer.step <= 30

    from transformers import AutoModelForCausalLM

    place = json.loads((tmp_path / "best.json").read_text())["path"]
    kept = weights_of(AutoModelForCausalLM.from_pretrained(place))
    assert all(torch.equal(kept[name], value) for name, value in weights_of(model.trainer.model).items())


def trajectory_of(prompt, sampled) -> Trajectory:
    trace = CompletionOutput(RenderedPrompt(prompt), sampled, [-1.0] * len(sampled))
    action = Action(Message("assistant", "yes"))
    return Trajectory((Step(State((Message("user", "say yes"),)), action, trace),), is_finished=True)


async def test_a_batch_without_any_weight_is_an_error_that_says_so(model):
    trajectory = trajectory_of([3, 5, 4], [6, 1])
    with pytest.raises(RequestsExhausted, match="nothing to train on"):
        await model.update(TrainingBatch([trajectory], [0.0]))
    result = await model.update(TrainingBatch([trajectory], [1.0]))  # and the next one is not affected
    assert result.loss == result.metrics["train/loss"] and result.metrics["train/num_samples"] == 1


async def test_the_sign_of_an_advantage_moves_the_probability_of_its_sample(model):
    prompt, sampled = [3, 5, 6, 1, 4], [6, 1]
    before = (await model.engine.score_tokens(prompt, sampled)).sum()
    trajectory = trajectory_of(prompt, sampled)
    await model.update(TrainingBatch([trajectory], [1.0]))
    raised = (await model.engine.score_tokens(prompt, sampled)).sum()
    assert raised > before + 0.01


async def test_a_base_model_gets_a_plain_chat_and_stops_before_the_users_turn():
    from ludic.models.loading import character_tokenizer

    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    network = tiny_llama(len(tokenizer), width=32, layers=2, max_length=512)
    local = LocalModel(
        LocalModelConfig(max_tokens=64),
        LoadedModel(network, tokenizer, "base"),
    )
    try:
        renderer = local.renderer()
        prompt = renderer.render([Message("user", "abc"), Message("assistant", "b"), Message("user", "a")])
        assert tokenizer.decode(prompt.token_ids) == "User: abc\n\nAssistant: b\n\nUser: a\n\nAssistant:"
        assert local.policy().sampling.stop == ["\n\nUser:"]
        said = tokenizer("ab\n\nUser:", add_special_tokens=False)["input_ids"]
        reply = renderer.parse(CompletionOutput(prompt, said, [-1.0] * len(said)))
        assert reply == Message("assistant", "ab")
        completion = await local.policy().sample(prompt, seed=0)
        assert 0 < len(completion.token_ids) <= 64
    finally:
        local.close()


def base_model(tokenizer) -> LocalModel:
    network = tiny_llama(len(tokenizer), width=32, layers=2, max_length=512)
    return LocalModel(LocalModelConfig(max_tokens=64), LoadedModel(network, tokenizer, "base"))


def test_a_saved_base_model_still_stops_before_the_users_turn(tmp_path):
    """Its tokenizer was saved with the plain template, and is no chat model's for that."""
    from transformers import AutoTokenizer

    from ludic.models.loading import character_tokenizer

    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    first = base_model(tokenizer)
    first.close()
    tokenizer.save_pretrained(tmp_path)
    again = base_model(AutoTokenizer.from_pretrained(tmp_path))
    again.close()
    assert again.policy().sampling.stop == first.policy().sampling.stop == ["\n\nUser:"]
