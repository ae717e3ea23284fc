"""A taskset in the manner of verifiers, small enough to read: sums of two numbers. The example of the env `verifiers`."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 100
    largest: int = 99


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.1)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 4)


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        rng = random.Random(0)
        for _ in range(self.config.num_tasks):
            a, b = rng.randint(0, self.config.largest), rng.randint(0, self.config.largest)
            data = SumData(prompt=f"{a} + {b} = ?", system_prompt="Answer with the number alone.", answer=str(a + b))
            yield SumTask(data, self.config.task)
