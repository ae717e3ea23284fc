"""The same as library.py with the minimal loop of `rolo`."""

import asyncio

from rolo import GRPOConfig, GRPOTrainer, Message, Reward, RolloutGenerator, State
from rolo.tinker_backend import TinkerModel, TinkerModelConfig


class Ask:
    def __init__(self, example):
        self.example = example

    def start(self):
        return State((Message("user", f"Write about {self.example['topic']}."),))

    def step(self, action):
        return None


class Builder:
    def build(self, example):
        return Ask(example)


class Vowels:
    def score(self, example, trajectory):
        text = trajectory.last_action.text or "?"
        share = sum(c in "aeiou" for c in text) / len(text)
        return Reward(share, share > 0.5)


class Topics:
    def batches(self):
        while True:
            yield [{"topic": "rain"}, {"topic": "chess"}]


model = TinkerModel(
    TinkerModelConfig(
        model_name="Qwen/Qwen3-4B-Instruct-2507",
        learning_rate=8e-5,
        max_tokens=8,
    )
)
loop = GRPOTrainer(
    model=model,
    generator=RolloutGenerator(env_builder=Builder(), renderer=model.renderer()),
    reward_model=Vowels(),
    data_loader=Topics(),
    config=GRPOConfig(samples_per_prompt=4, max_steps=2),
)
asyncio.run(loop.train())
model.close()
