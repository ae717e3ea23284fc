"""Online learning: finished sessions of agents outside become batches, and the served model learns from them."""

import asyncio
import socket

import aiohttp
import pytest

from ludic.training.credit_assignment import EpisodeCredit, GroupNormalizedReturn, MonteCarloReturn
from ludic.types import ConfigError
from ludic.types.errors import RunComplete
from ludic.util.metrics_file import read_metrics
from ludic_serve.gateway.command import GatewayArgs, prepared, serve_sessions, training_run
from ludic_serve.gateway.online import SessionBatchSource
from ludic_serve.gateway.session import Session
from tests.unit.training.bandit import unexplained
from tests.unit.training.hand_made import session as recorded

pytestmark = pytest.mark.slow


def closed(source, reward, *threads, group=None, is_rewarded=True):
    made = Session(policies={}, default=None, group=group, is_rewarded=is_rewarded)
    source.add(made, recorded(reward, *threads, group=group))


async def test_rewarded_sessions_become_batches_in_order():
    source = SessionBatchSource(credit_assigner=EpisodeCredit(MonteCarloReturn(1.0)), sessions_per_batch=2)
    waiting = asyncio.create_task(source.next_batch())
    closed(source, 1.0)
    closed(source, 5.0, is_rewarded=False)
    await asyncio.sleep(0)
    assert not waiting.done() and source.num_skipped == 1
    closed(source, 0.5, (0, 1), (2,))  # a session with two threads
    batch = await asyncio.wait_for(waiting, 60)
    assert [item.weight for item in batch.items][:1] == [1.0] and {i.weight for i in batch.items[1:]} == {0.5}
    assert batch.meta["num_rollouts"] == 2 and batch.meta["rollout_metrics"]["avg_total_reward"] == 0.75
    assert source.num_waiting == 0 and source.num_taken == 2


async def test_a_group_is_given_out_once_it_is_complete():
    source = SessionBatchSource(credit_assigner=EpisodeCredit(GroupNormalizedReturn(2)), sessions_per_batch=2)
    for reward, group in ((1.0, "a"), (0.0, "b"), (0.0, None), (3.0, "a")):
        closed(source, reward, group=group)
    batch = await asyncio.wait_for(source.next_batch(), 5)
    assert [item.weight for item in batch.items] == [-1.0, 1.0]
    assert source.num_skipped == 1 and source.num_waiting == 1  # without a group; b waits for its second


async def test_the_oldest_incomplete_group_is_dropped_when_too_many_wait():
    source = SessionBatchSource(credit_assigner=GroupNormalizedReturn(2), sessions_per_batch=2, max_waiting=2)
    for group in ("a", "b", "c"):
        closed(source, 1.0, group=group)
    assert source.num_waiting == 2 and source.num_skipped == 1
    closed(source, 1.0, group="b")
    assert len((await asyncio.wait_for(source.next_batch(), 5)).items) == 2


def test_a_batch_holds_whole_groups():
    with pytest.raises(ConfigError, match="multiple of the group size, 4"):
        SessionBatchSource(credit_assigner=GroupNormalizedReturn(4), sessions_per_batch=6)


# --- ludic gateway --train ---


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def agents(url, token, num_at_once, group_size, done):
    """Programs outside: each asks once, is graded by how many digits it got, and closes its session."""
    control = {"X-Ludic-Control-Token": token}
    async with aiohttp.ClientSession() as http:

        async def post(path, body, headers):
            async with http.post(f"{url}{path}", json=body, headers=headers) as answer:
                return await answer.json()

        async def one(number):
            opened = await post("/sessions", {"group": f"task {number // group_size}"}, control)
            key = {"Authorization": f"Bearer {opened['api_key']}"}
            asked = {"model": "policy", "messages": [{"role": "user", "content": "Count."}]}
            reply = await post("/v1/chat/completions", asked, key)
            text = reply["choices"][0]["message"]["content"] or ""
            await post(f"/sessions/{opened['id']}/reward", {"value": sum(map(str.isdigit, text)) / 4}, control)
            await post(f"/sessions/{opened['id']}/close", {}, control)

        number = 0
        while not done.is_set():
            try:
                await asyncio.gather(*(one(number + n) for n in range(num_at_once)))
                number += num_at_once
            except (aiohttp.ClientError, KeyError):
                await asyncio.sleep(0.05)  # not up yet, or closed


async def trained(folder, steps, **settings):
    given = GatewayArgs(
        model="tiny", port=free_port(), max_tokens=4, train=True, steps=steps, lr=3e-3, max_seq_len=64, out=folder, **settings
    )  # fmt: skip
    done = asyncio.Event()
    with training_run(given) as run:
        policy, sessions = await asyncio.to_thread(prepared, run, given)
        group_size = given.algo_set.get("group_size", 1)
        outside = asyncio.create_task(
            agents(f"http://127.0.0.1:{given.port}", "secret", given.sessions_per_update, group_size, done)
        )
        serving = serve_sessions(given, policy, "secret", "$TOKEN", run=run, sessions=sessions)
        await asyncio.wait_for(serving, 300)
        done.set()
        outside.cancel()
        await asyncio.wait({outside})
    rows = list(read_metrics(folder / "metrics.jsonl"))
    assert set().union(*map(unexplained, rows)) == {"time", "step"}
    return [row["train/avg_total_reward"] for row in rows]


@pytest.mark.parametrize("wrote_config", [True, False], ids=["a run", "a folder of 0.2.0"])
async def test_a_checkpoint_is_written_and_training_goes_on_from_it(tmp_path, wrote_config):
    groups = {"sessions_per_update": 4, "algo": "grpo", "algo_set": {"group_size": 4}}
    assert len(await trained(tmp_path / "out", 1, **groups)) == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.toml", "metrics.jsonl", "checkpoints"}
    with pytest.raises(RunComplete, match="ludic gateway --model tiny --train"):
        await trained(tmp_path / "out", 1, **groups, resume=True)
    with pytest.raises(ConfigError, match="Go on with --resume"):
        await trained(tmp_path / "out", 2, **groups)
    if not wrote_config:
        (tmp_path / "out/config.toml").unlink()
    assert len(await trained(tmp_path / "out", 2, **groups, resume=True)) == 2


@pytest.mark.slow
async def test_a_served_model_learns_from_sessions_outside(tmp_path):
    rewards = await trained(tmp_path, 25, sessions_per_update=32)
    assert rewards[0] < 0.3 and max(rewards[-3:]) > 0.7, rewards


def test_training_needs_the_model_in_this_process():
    with pytest.raises(ConfigError, match="leave --server out"):
        GatewayArgs(model="tiny", train=True, server="http://127.0.0.1:8000")
    with pytest.raises(ConfigError, match="above 0"):
        GatewayArgs(model="tiny", train=True, temperature=0.0)
    for length in (-5, 0):
        with pytest.raises(ConfigError, match=f"max_seq_len = {length}; it must be at least 2"):
            GatewayArgs(model="tiny", train=True, max_seq_len=length)
