"""Room in the engine: given to tenants by turns, never more than there is, and given back by requests that are cancelled."""

import asyncio
import contextlib
import random

import pytest

from ludic.http.turns import Turns
from ludic_tinker.server.scheduler import FairShares


class Visitors:
    """Requests that stay in the engine until they are let go."""

    def __init__(self, room: int) -> None:
        shares = FairShares()
        self.turns = Turns(room, choose=shares.choose, charge=shares.charge)
        self.entered: list[str] = []
        self.num_inside = self.most_inside = 0
        self.leave = asyncio.Event()

    async def visit(self, tenant: str, num_sequences: int = 1, num_tokens: int = 10) -> None:
        async with self.turns.turn(tenant, size=num_sequences, cost=num_tokens):
            self.entered.append(tenant)
            self.num_inside += num_sequences
            self.most_inside = max(self.most_inside, self.num_inside)
            try:
                await self.leave.wait()
                await asyncio.sleep(0)
            finally:
                self.num_inside -= num_sequences


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_second_tenant_is_next_though_the_first_has_many_waiting():
    inside = Visitors(room=4)
    first = [asyncio.create_task(inside.visit("many")) for _ in range(40)]
    await settled()
    second = [asyncio.create_task(inside.visit("few")) for _ in range(2)]
    await settled()
    assert inside.entered == ["many"] * 4
    inside.leave.set()
    await asyncio.gather(*first, *second)
    assert inside.entered[4:8].count("few") == 2 and inside.most_inside <= 4


async def test_request_larger_than_the_engine_has_it_alone():
    inside = Visitors(room=4)
    inside.leave.set()
    await asyncio.gather(inside.visit("a"), inside.visit("a", num_sequences=9), inside.visit("a"))
    assert inside.most_inside == 9 and inside.num_inside == 0


@pytest.mark.parametrize("seed", range(10))
async def test_cancelled_requests_leave_no_hole(seed: int):
    """Whenever requests are cancelled, all others have their turn and the room stays whole."""
    rng = random.Random(seed)
    inside = Visitors(room=3)
    tasks = [asyncio.create_task(inside.visit(rng.choice("abc"), rng.randint(1, 3))) for _ in range(30)]
    for task in rng.sample(tasks, 12):
        task.cancel()
        for _ in range(rng.randint(0, 2)):
            await asyncio.sleep(0)
    inside.leave.set()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert inside.num_inside == 0 == inside.turns.num_running and not inside.turns.num_waiting
    assert inside.most_inside <= 3
