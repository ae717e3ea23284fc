"""Ranks: one and three processes, what they exchange, and how they report a missing rank."""

import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from ludic.distributed.ranks import ProcessRanks, RankFailed, Ranks, join_ranks, launched, require_same
from ludic.training.learner.batches import (
    NothingToTrainOn,
    PreparedBatch,
    RankStop,
    StopKind,
    credit_over_ranks,
    scatter_batch,
)
from ludic.training.learner.metrics import MetricSums, merge
from ludic.training.learner.packing import balanced_shares
from ludic.types import ConfigError, RequestsExhausted
from ludic.util.stop import StopRequested
from tests import forked
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow

WORLD = 3


def test_a_single_process_gets_its_own_values_back():
    ranks = Ranks()
    assert (ranks.rank, ranks.world_size, ranks.is_first) == (0, 1, True)
    assert ranks.gather("a") == ["a"] and ranks.scatter(["a"]) == "a" and ranks.broadcast("a") == "a"
    assert ranks.sum(2.5) == ranks.max(2.5) == 2.5
    with ranks.watching():
        ranks.barrier()


def test_without_torchrun_there_is_one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    assert type(join_ranks()) is Ranks


def test_incomplete_torchrun_variables_are_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        join_ranks()


def test_process_ranks_need_a_process_group():
    with pytest.raises(ConfigError, match="torchrun"):
        ProcessRanks()


# --- in a group ---


def exchange(ranks: ProcessRanks) -> None:
    gathered = ranks.gather(f"from {ranks.rank}")
    assert gathered == (["from 0", "from 1", "from 2"] if ranks.is_first else None)
    assert ranks.scatter(["a", "b", "c"] if ranks.is_first else None) == "abc"[ranks.rank]
    assert ranks.broadcast({"step": 7} if ranks.is_first else None) == {"step": 7}
    assert ranks.sum(0.1 * (ranks.rank + 1)) == pytest.approx(0.6)
    assert ranks.max(float(ranks.rank)) == 2.0
    grads = [torch.full((2,), float(ranks.rank)), torch.ones(1)]
    ranks.sum_tensors(grads)
    assert grads[0].tolist() == [3.0, 3.0] and grads[1].tolist() == [3.0]
    require_same(ranks, {"lr": "0.1"})
    with pytest.raises(ConfigError, match="lr is 0 on rank 0 and 1 on rank 1"):
        require_same(ranks, {"lr": str(ranks.rank)})


def share_batches(ranks: ProcessRanks) -> None:
    items = random_items([9, 4, 7, 12, 3])
    own = PreparedBatch(items if ranks.is_first else [], {"made": 5.0}, {"num_stale": 1.0})
    share = scatter_batch(ranks, own, lambda whole: {"num": float(len(whole.items)), **whole.counts})
    assert share.facts.num_items == 5 and share.stats == {"num": 5.0, "num_stale": 3.0}
    assert ranks.sum(len(share.items)) == 5
    again, facts = credit_over_ranks(ranks, share.items, lambda all_items: all_items)
    assert [(item.meta, item.origin) for item in again] == [(item.meta, item.origin) for item in share.items]
    assert (facts.num_items, facts.num_tokens) == (share.facts.num_items, share.facts.num_tokens)
    assert facts.weight_std == pytest.approx(share.facts.weight_std)

    few = random_items([5])  # fewer samples than ranks: one rank gets nothing
    assert (
        ranks.sum(len(scatter_batch(ranks, PreparedBatch(few if ranks.is_first else []), lambda whole: {}).items)) == 1
    )

    third = ranks.rank == 2
    for ending, error in (
        (RankStop(StopKind.STOPPED, "SIGTERM"), StopRequested),
        (RankStop(StopKind.EXHAUSTED, "no more"), RequestsExhausted),
        (RankStop(StopKind.FAILED, "ValueError: x"), RankFailed),
    ):
        with pytest.raises(error, match="Rank 2"):
            scatter_batch(ranks, ending if third else PreparedBatch(items), lambda whole: {})
    with pytest.raises(NothingToTrainOn):
        scatter_batch(ranks, RankStop(StopKind.NOTHING, "all filtered"), lambda whole: {})
    with pytest.raises(RankFailed, match="KeyError"):
        scatter_batch(ranks, PreparedBatch(items), lambda whole: {"reward": whole.meta["reward"]})


def miss_a_rank(ranks: ProcessRanks) -> None:
    if ranks.rank == 2:
        time.sleep(6)  # comes too late
        return
    with pytest.raises(RankFailed, match=r"within 4 s: .*Ranks 2 failed" if ranks.is_first else "Rank"):
        ranks.barrier(timeout_s=4)


def _in_group(rank: int, port: int, log: Path) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        ranks = ProcessRanks(timeout_s=60)
        exchange(ranks)
        share_batches(ranks)
        miss_a_rank(ranks)
    except BaseException:
        with log.open("a") as file:
            file.write(f"rank {rank}:\n{traceback.format_exc()}")
        raise


@pytest.mark.slow
def test_three_processes_exchange_share_batches_and_notice_a_missing_rank(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
    log = tmp_path / "log"
    group = [forked.call(_in_group, rank, store.port, log) for rank in range(WORLD)]
    end = time.monotonic() + 120
    for process in group:
        process.join(end - time.monotonic())
        process.kill()
    assert [process.exitcode for process in group] == [0] * WORLD, log.read_text()


# --- shares and sums ---


def test_balanced_shares_are_disjoint_and_of_similar_length():
    items = random_items([50, 3, 20, 21, 22, 9, 9, 40, 12, 13])
    shares = balanced_shares(items, 3)
    assert sorted(id(item) for share in shares for item in share) == sorted(map(id, items))
    lengths = [sum(len(item.input_ids) for item in share) for share in shares]
    assert max(lengths) - min(lengths) <= 9


def test_merged_metrics_of_ranks_equal_those_of_one_process():
    whole, first, second = MetricSums(), MetricSums(), MetricSums()
    for sums in (whole, first):
        sums.add({"loss": (1.0, 0.5), "kl": (2.0, 4.0)})
        sums.add_max({"ratio": 3.0})
    for sums in (whole, second):
        sums.add({"loss": (3.0, 0.5)})
        sums.add_max({"ratio": 2.0})
    assert merge([first.totals(), second.totals(), MetricSums().totals()]).means() == whole.means()
