"""Reflectors: what reads rollouts and writes a better prompt, or one prompt with the lessons of two."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ludic.types import Rollout
from ludic_judges.model import Asking
from ludic_judges.verdicts import DATA_NOTE, Words, case_of, section


class Reflector(Protocol):
    """Reads what a prompt led to and writes a better one."""

    async def propose(self, prompt: str, rollouts: Sequence[Rollout]) -> str: ...


@runtime_checkable
class Merger(Protocol):
    """A reflector that can also write one prompt with the lessons of two."""

    async def merge(self, ancestor: str, first: str, second: str) -> str: ...


class ModelReflector:
    """A model that is shown the prompt, and of each rollout the task, the reply, its reward and what the env says about it."""

    def __init__(
        self, asking: Asking, *, goal: str = "earn a higher reward on tasks like these", feedback: str = "feedback"
    ) -> None:
        """`asking`: a `JudgeModel` or `JudgeAgent` of ludic_judges, which ask again until a reply can be read.
        `feedback`: key in the info of an episode's last env step."""
        self.asking, self.goal, self.feedback = asking, goal, feedback

    async def propose(self, prompt: str, rollouts: Sequence[Rollout]) -> str:
        head = (
            f"You improve the instruction of another model, so that it will {self.goal}. Say what its replies have in common that "
            f"costs reward, then write a new instruction: general rules, not answers to these tasks. {DATA_NOTE}"
        )
        parts = [head, section("instruction", self.asking.quote(prompt))]
        for rollout in rollouts:
            case, last = case_of(rollout), rollout.env_steps[-1:]
            told = last[0].info.get(self.feedback, "") if last else ""
            parts += [
                section("task", self.asking.quote(case.task)),
                section("reply", self.asking.quote(case.reply)),
                section("result", self.asking.quote(f"reward {rollout.total_reward:g}. {told}")),
            ]
        return await self._ask(parts)

    async def merge(self, ancestor: str, first: str, second: str) -> str:
        head = (
            f"Two people have improved the instruction of another model, so that it will {self.goal}; each version is better at "
            f"other tasks. Say what each of them has learned, then write one instruction with both. {DATA_NOTE}"
        )
        texts = {"instruction before": ancestor, "first version": first, "second version": second}
        return await self._ask([head, *(section(name, self.asking.quote(text)) for name, text in texts.items())])

    async def _ask(self, parts: Sequence[str]) -> str:
        form = {"diagnosis": Words(), "instruction": Words("the whole new instruction")}
        found = await self.asking.ask("\n\n".join(parts), form)
        return str(found["instruction"]).strip()
