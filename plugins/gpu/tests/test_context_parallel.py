"""How a packed row is cut over ranks: every token once, and every query sees its sample up to itself.

tests/integration/test_fsdp.py compares two processes that share rows with one.
"""

import numpy as np
import pytest
import torch

from ludic.distributed.ranks import Ranks
from ludic.models.head import CandidateMask
from ludic.training import TrainerConfig, make_grpo, make_ppo
from ludic.types import ConfigError
from ludic_gpu.context_parallel import ContextParallel
from tests.unit.training.samples import random_items
from tests.unit.training.test_trainer import hand_trainer

CPU = torch.device("cpu")


def context_of(size: int, rank: int) -> ContextParallel:
    """Without processes: enough to cut, not to communicate."""
    context = ContextParallel.__new__(ContextParallel)
    context.size, context.rank = size, rank
    return context


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_computed_once_and_sees_its_sample_up_to_itself(size, seed):
    lengths = np.random.default_rng(seed).integers(1, 40, size=1 + seed).tolist()
    first_T = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    row_T = torch.arange(1, sum(lengths) + 1)
    parts = [context_of(size, rank).cut(lengths, CPU) for rank in range(size)]
    assert sorted(token for part in parts for token in part.of(row_T).tolist() if token) == row_T.tolist()
    assert len({len(part.of(row_T)) for part in parts}) == 1, "ranks have equally many tokens"
    for part in parts:
        bounds = zip(part._cu_q.unfold(0, 2, 1).tolist(), part._cu_k.unfold(0, 2, 1).tolist(), strict=True)
        for (q0, q1), (k0, k1) in bounds:
            seen = part._seen_L[k0:k1].tolist()
            for number, token in enumerate(part.of(row_T)[q0:q1].tolist()):
                if token:  # the last tokens of a span ask: each sees all keys but those of later queries
                    assert seen[: len(seen) - (q1 - q0 - number - 1)] == list(range(first_T[token - 1], token))


def test_the_attention_of_one_long_sample_is_balanced():
    parts = [context_of(4, rank).cut([4096], CPU) for rank in range(4)]
    pairs = []
    for part in parts:
        sizes = zip(part._cu_q.diff().tolist(), part._cu_k.diff().tolist(), strict=True)
        pairs.append(sum(queries * keys - queries * (queries - 1) // 2 for queries, keys in sizes))
    assert sum(pairs) == 4096 * 4097 // 2
    assert max(pairs) < 1.001 * min(pairs)


def test_chosen_positions_are_dealt_out_and_return_to_their_order():
    lengths, where_A = [9, 30, 5], torch.tensor([3, 40, 11, 12, 25, 0])
    parts = [context_of(2, rank).cut(lengths, CPU) for rank in range(2)]
    rows = [part.rows(where_A) for part in parts]
    row_T = torch.arange(44) * 10
    computed = [part.of(row_T).index_select(0, own.local_M) for part, own in zip(parts, rows, strict=True)]
    assert torch.cat(computed)[rows[0].back_A].tolist() == (where_A * 10).tolist()
    assert sum(own.num_own for own in rows) == len(where_A)
    nothing = parts[1].rows(torch.tensor([0]))
    assert nothing.num_own == 0 and len(nothing.local_M) == 1, "a rank without any still computes one"


def test_candidates_of_chosen_positions():
    mask = CandidateMask(torch.tensor([5, 6, 1, 2, 3]), torch.tensor([0, 0, 2, 2, 2]), (0, 2, 2, 5))
    found = mask.select([2, None, 0, 1]).mask(slice(0, 4), 8)
    expected = mask.mask(slice(0, 3), 8)
    assert torch.equal(found[[0, 2, 3]], expected[[2, 0, 1]]) and bool(found[1].all())


def test_rows_that_cannot_be_cut_are_refused():
    with pytest.raises(ConfigError, match="packed=False"):
        TrainerConfig(context_parallel=2, packed=False)


@pytest.mark.parametrize("algo", [make_grpo(group_size=2), make_ppo()])
def test_one_process_is_told_to_use_torchrun(algo):
    with pytest.raises(ConfigError, match="torchrun with a multiple of 2 processes"):
        hand_trainer(random_items([12, 20]), algo=algo, cfg={"context_parallel": 2})
    with pytest.raises(ConfigError, match="context_parallel=2 with 1 ranks"):
        ContextParallel(2, Ranks())
