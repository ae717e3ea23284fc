"""A batch source that counts: its samples say which they are, and it can be resumed."""

from typing import Any

from ludic.types import (
    ActorTokenLogps,
    RequestsExhausted,
    SampleAttachments,
    SampleOrigin,
    SAWBatch,
    SAWItem,
    VersionRun,
)


class Numbered:
    """Batches of these sizes, over and over (or once); a sample's weight is its number, its version the newest known."""

    def __init__(self, *sizes: int, first: int = 0, endless: bool = True) -> None:
        self.sizes, self.endless = sizes, endless
        self.num_batches, self.next_number = 0, first
        self.version = 0

    async def next_batch(self) -> SAWBatch:
        if not self.endless and self.num_batches == len(self.sizes):
            raise RequestsExhausted("all given")
        size = self.sizes[self.num_batches % len(self.sizes)]
        numbers = range(self.next_number, self.next_number + size)
        self.num_batches, self.next_number = self.num_batches + 1, self.next_number + size
        return SAWBatch(items=[self._item(number) for number in numbers], meta={"avg_total_reward": 0.5})

    def _item(self, number: int) -> SAWItem:
        attached = SampleAttachments(
            actor_logps=ActorTokenLogps([-0.1 * (number + 1), -0.5]), version_runs=(VersionRun(self.version, 2),)
        )
        origin = SampleOrigin(rollout_id=f"r{number}", group_id=f"g{number // 2}", total_reward=1.0)
        return SAWItem([1, number, number + 1], None, [0, 1, 1], float(number), {}, attached, origin)

    def notify_version(self, version: int) -> None:
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches, "next_number": self.next_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_batches, self.next_number = state["num_batches"], state["next_number"]


def numbers(batch: SAWBatch) -> list[int]:
    return [int(item.weight) for item in batch.items]
