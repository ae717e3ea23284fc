"""The loop with plain classes at every stage: nothing is inherited, nothing registered, no torch.

That the types fit too is checked by mypy in the two examples, which put such classes where the protocols are asked for.
"""

import asyncio
import json
from pathlib import Path

import pytest

from ludic.inference import ByteTemplate
from ludic.types import ConfigError, PromptTooLong
from rolo import (
    Action,
    CompletionOutput,
    GRPOConfig,
    GRPOTrainer,
    HuggingFaceDataLoader,
    Message,
    RenderedPrompt,
    Reward,
    RolloutGenerator,
    State,
    TrainingBatch,
    UpdateResult,
    compute_advantages,
    run_logger,
)
from rolo.library import ChatRenderer, saw_batch

BYTES = ByteTemplate()


class Echo:
    """Asks for a number of words, one per turn."""

    def __init__(self, example):
        self.messages, self.left = (Message("user", str(example["say"])),), example.get("turns", 1)

    def start(self) -> State:
        return State(self.messages)

    def step(self, action: Action) -> State | None:
        self.left -= 1
        if self.left == 0:
            return None
        self.messages += (action.message, Message("user", "Go on."))
        return State(self.messages)


class EchoBuilder:
    def build(self, example):
        return Echo(example)


class SeedPolicy:
    """Says its seed's last digit, so that what was drawn can be told from the text."""

    def __init__(self, room: int = 10_000):
        self.room, self.num_open, self.most_open = room, 0, 0

    async def sample(self, prompt: RenderedPrompt, *, seed: int | None = None) -> CompletionOutput:
        if len(prompt.token_ids) > self.room:
            raise PromptTooLong(len(prompt.token_ids), self.room)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0)
        self.num_open -= 1
        ids = [*BYTES.encode(str((seed or 0) % 10)), BYTES.END]
        return CompletionOutput(prompt, ids, [-0.5] * len(ids))


class CountingModel:
    """Keeps what it is given to learn."""

    def __init__(self):
        self.batches: list[TrainingBatch] = []
        self.saved: list[int] = []

    def policy(self) -> SeedPolicy:
        return SeedPolicy()

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        self.batches.append(batch)
        return UpdateResult(loss=0.25, metrics={"train/num_samples": float(len(batch))})

    async def save(self, folder: Path) -> str:
        self.saved.append(len(self.batches))
        return f"somewhere://{len(self.batches)}"


class Parity:
    """An even digit is right."""

    def score(self, example, trajectory) -> Reward:
        is_even = int(trajectory.last_action.text) % 2 == 0
        return Reward(float(is_even), is_even, {"turns": len(trajectory.steps)})


class Always:
    """The given rewards, one after the other."""

    def __init__(self, *values):
        self.values = list(values)

    def score(self, example, trajectory) -> Reward:
        value = self.values.pop(0)
        return Reward(value, value > 0.5)


class Given:
    def __init__(self, *batches):
        self._batches = batches

    def batches(self):
        return iter(self._batches)


class Notebook:
    def __init__(self):
        self.rows = []

    def log(self, step, stats):
        self.rows.append((step, dict(stats)))


def generator(max_turns: int = 1) -> RolloutGenerator:
    return RolloutGenerator(
        env_builder=EchoBuilder(), renderer=ChatRenderer(BYTES, BYTES.decode_reply), max_turns=max_turns
    )


def trainer(reward_model, *batches, **more) -> GRPOTrainer:
    more.setdefault("config", GRPOConfig(samples_per_prompt=2, max_steps=len(batches), eval_every_steps=0))
    more.setdefault("model", CountingModel())
    return GRPOTrainer(generator=generator(), reward_model=reward_model, data_loader=Given(*batches), **more)


# --- advantages -----------------------------------------------------------------------------------------------


def test_an_advantage_is_the_reward_minus_the_mean_of_its_group_and_exactly_zero_for_equal_rewards():
    assert compute_advantages([[1.0, 0.0, 0.0, 0.0], [2.0, 6.0]]) == [[0.75, -0.25, -0.25, -0.25], [-2.0, 2.0]]
    assert compute_advantages([[0.0, 0.01], [0.0, 100.0]]) == [[-0.005, 0.005], [-50.0, 50.0]], "no division by spread"
    assert compute_advantages([[0.1] * 3, [1.0]]) == [[0.0] * 3, [0.0]]


# --- rollouts -------------------------------------------------------------------------------------------------


async def test_each_example_has_a_group_and_episodes_run_concurrently():
    policy = SeedPolicy()
    examples = [{"say": "a"}, {"say": "b"}, {"say": "c"}]
    groups = await generator().generate(examples, policy=policy, samples_per_prompt=4, seed=7)
    said = [[t.steps[0].state.messages[0].content for t in group] for group in groups]
    assert said == [["a"] * 4, ["b"] * 4, ["c"] * 4]
    assert policy.most_open == 12


async def test_trajectories_depend_on_the_seed_only():
    async def texts(seed):
        groups = await generator(3).generate(
            [{"say": "a", "turns": 3}] * 4, policy=SeedPolicy(), samples_per_prompt=4, seed=seed
        )
        return [[step.action.text for step in t.steps] for group in groups for t in group]

    first = await texts(1)
    assert first == await texts(1) != await texts(2)
    assert len({tuple(turns) for turns in first}) > 10, "samples of one example, and turns of one sample, differ"


async def test_an_episode_ends_when_the_env_says_so_or_the_turns_run_out():
    [[short, _], [long, _]] = await generator(2).generate(
        [{"say": "a", "turns": 2}, {"say": "b", "turns": 9}], policy=SeedPolicy(), samples_per_prompt=2
    )
    assert len(short.steps) == len(long.steps) == 2
    assert short.is_finished and not long.is_finished


async def test_an_episode_without_room_for_another_turn_keeps_its_steps():
    [[one]] = await generator(9).generate([{"say": "a", "turns": 9}], policy=SeedPolicy(room=20), samples_per_prompt=1)
    assert len(one.steps) == 2 and not one.is_finished
    with pytest.raises(PromptTooLong):
        await generator().generate([{"say": "a" * 30}], policy=SeedPolicy(room=20), samples_per_prompt=1)


def test_max_turns_of_zero_is_refused():
    with pytest.raises(ConfigError, match="max_turns=0.*at least 1"):
        generator(0)


# --- the trainer ----------------------------------------------------------------------------------------------


async def test_a_step_updates_with_groups_that_have_spread_and_logs_metrics():
    loop = trainer(Always(1.0, 1.0, 0.0, 1.0, 0.0, 0.0), [{"say": word} for word in "abc"], logger=Notebook())
    await loop.train()
    (batch,) = loop.model.batches
    assert list(batch.advantages) == [-0.5, 0.5]
    assert {t.steps[0].state.messages[0].content for t in batch.trajectories} == {"b"}
    [(step, stats)] = loop.logger.rows
    assert step == 1 and stats["train/reward"] == 0.5 and stats["train/loss"] == 0.25
    assert stats["train/groups_without_spread"] == pytest.approx(2 / 3) and stats["train/num_samples"] == 2


async def test_a_step_without_spread_updates_nothing_and_is_counted():
    loop = trainer(Always(1.0, 1.0), [{"say": "a"}], logger=Notebook())
    await loop.train()
    assert loop.model.batches == [] and loop.step == 1
    assert loop.logger.rows[0][1]["train/groups_without_spread"] == 1.0


async def test_tiny_advantages_count_as_zero():
    loop = trainer(Always(0.0, 1e-4, 0.0, 1e-2), [{"say": "a"}, {"say": "b"}])
    found = await loop.train_step([{"say": "a"}, {"say": "b"}])
    assert found["train/groups_without_spread"] == 0.5
    assert list(loop.model.batches[0].advantages) == [-5e-3, 5e-3]


async def test_train_continues_to_max_steps_and_stops():
    loop = trainer(Parity(), *[[{"say": "a"}]] * 9, config=GRPOConfig(samples_per_prompt=2, max_steps=3))
    await loop.train_step([{"say": "a"}])
    await loop.train()
    assert loop.step == 3
    await loop.train()
    assert loop.step == 3


async def test_a_batch_holds_prompts_completions_and_log_probs():
    loop = trainer(Always(1.0, 0.0), [{"say": "a"}])
    await loop.train()
    completion = loop.model.batches[0].trajectories[0].steps[0].completion
    assert (
        list(completion.prompt.token_ids) == BYTES.apply([{"role": "user", "content": "a"}]).prompt_token_ids.tolist()
    )
    assert list(completion.token_ids)[1:] == [BYTES.END] and list(completion.logprobs) == [-0.5, -0.5]
    (item, _) = saw_batch(loop.model.batches[0], temperature=1.0).items
    assert item.input_ids.tolist() == [*completion.prompt.token_ids, *completion.token_ids]
    assert item.action_mask.tolist() == [False] * len(completion.prompt.token_ids) + [True, True]
    assert item.actor_logps.tolist() == [-0.5, -0.5] and item.attachments.temperature == 1.0


async def test_evaluation_counts_correct_samples_and_solved_problems():
    rewards = Always(*[1.0, 0.0], *[0.0, 0.0], *[1.0, 1.0], *[0.0, 1.0])
    loop = trainer(rewards, eval_examples=[{"say": word} for word in "abcd"])
    found = await loop.evaluate()
    assert found["eval/accuracy"] == 0.5 and found["eval/pass@2"] == 0.75
    assert loop.model.batches == [], "evaluating does not train"


async def test_evaluations_run_every_n_steps_with_the_same_seeds():
    config = GRPOConfig(samples_per_prompt=4, max_steps=4, eval_on_start=True, eval_every_steps=2)
    loop = trainer(Parity(), *[[{"say": "a"}]] * 9, config=config, eval_examples=[{"say": "x"}, {"say": "y"}])
    rows = await loop.train()
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert len({row["eval/accuracy"] for row in rows}) == 1, "this policy never changes, so neither may its score"
    assert all(row["eval/turns"] == 1 for row in rows)


async def test_the_best_evaluation_saves_weights_and_best_json(tmp_path):
    config = GRPOConfig(
        samples_per_prompt=2, max_steps=3, eval_every_steps=1, save_best_checkpoint=True, run_dir=tmp_path
    )
    step_and_eval = [1.0, 0.0]
    rewards = Always(*step_and_eval, 0.0, 0.0, *step_and_eval, 1.0, 0.0, *step_and_eval, 1.0, 0.0)
    loop = trainer(rewards, *[[{"say": "a"}]] * 3, config=config, eval_examples=[{"say": "x"}])
    await loop.train()
    assert loop.model.saved == [1, 2], "an equal score does not replace it"
    note = json.loads((tmp_path / "best.json").read_text())
    assert (note["path"], note["step"], note["eval/accuracy"]) == ("somewhere://2", 2, 0.5)


def test_invalid_configurations_are_refused():
    with pytest.raises(ConfigError, match="at least 2 trajectories"):
        GRPOConfig(samples_per_prompt=1)
    config = GRPOConfig(save_best_checkpoint=True)
    with pytest.raises(ConfigError, match="give eval_examples"):
        trainer(Parity(), config=config)

    class CannotSave:
        policy, update = CountingModel.policy, CountingModel.update

    with pytest.raises(ConfigError, match="a model with save"):
        trainer(Parity(), config=config, eval_examples=[{"say": "x"}], model=CannotSave())
    never = GRPOConfig(save_best_checkpoint=True, max_steps=5, eval_every_steps=6)
    with pytest.raises(ConfigError, match="eval_every_steps <= max_steps"):
        trainer(Parity(), config=never, eval_examples=[{"say": "x"}])


# --- data and logs --------------------------------------------------------------------------------------------


@pytest.fixture
def numbers(tmp_path) -> Path:
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    return path


def drawn(loader: HuggingFaceDataLoader, num_batches: int) -> list[list[int]]:
    batches = loader.batches()
    return [[example["n"] for example in next(batches)] for _ in range(num_batches)]


def test_every_epoch_has_each_example_once_in_a_new_order(numbers):
    first, second, third, fourth = drawn(HuggingFaceDataLoader(numbers, batch_size=5, seed=3), 4)
    assert sorted(first + second) == sorted(third + fourth) == list(range(10))
    assert first + second != third + fourth != list(range(10))
    assert drawn(HuggingFaceDataLoader(numbers, batch_size=5, seed=3), 2) == [first, second]
    assert drawn(HuggingFaceDataLoader(numbers, batch_size=5, seed=4), 2) != [first, second]


def test_a_limit_takes_the_first_kept_examples(numbers):
    loader = HuggingFaceDataLoader(numbers, batch_size=2, limit=3, keep=lambda example: example["n"] % 2)
    assert [example["n"] for example in loader.examples] == [1, 3, 5]


def test_a_loader_resumes_from_a_saved_state(numbers):
    one, other = (HuggingFaceDataLoader(numbers, batch_size=3, seed=1) for _ in range(2))
    drawn(one, 4)
    other.passes.load_state_dict(one.passes.state_dict())
    assert drawn(one, 3) == drawn(other, 3)
    with pytest.raises(ConfigError, match="10 samples, this one has 4"):
        HuggingFaceDataLoader(numbers, batch_size=1, limit=4).passes.load_state_dict(one.passes.state_dict())


def test_a_missing_or_empty_data_set_is_refused(numbers, tmp_path):
    with pytest.raises(ConfigError, match="Cannot read .*numbrs"):
        HuggingFaceDataLoader(tmp_path / "numbrs.jsonl", batch_size=1)
    with pytest.raises(ConfigError, match="no samples"):
        HuggingFaceDataLoader(numbers, batch_size=1, keep=lambda example: False)
    with pytest.raises(ConfigError, match="batch_size=0"):
        HuggingFaceDataLoader(numbers, batch_size=0)


def test_a_run_folder_has_lines_and_tensorboard_events_and_is_used_once(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    logger = run_logger(tmp_path / "run", "train/reward")
    logger.log(1, {"train/reward": 0.5, "train/loss": 2.0})
    logger.close()
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (row["step"], row["train/reward"], row["train/loss"]) == (1, 0.5, 2.0)
    assert list((tmp_path / "run").glob("events.out.tfevents*"))
    assert "train/reward 0.5" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a run in .*run already"):
        run_logger(tmp_path / "run")


def test_an_empty_run_folder_can_be_used_again(tmp_path):
    """As one whose model had a mistyped name."""
    run_logger(tmp_path, tensorboard=False).close()
    run_logger(tmp_path, tensorboard=False).close()
