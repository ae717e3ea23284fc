"""Flat buffers of weights: layout, sampling, checksums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic_vllm.publish.transfer import (
    CHECKSUM_BYTES,
    Bucket,
    checksum,
    describe,
    pack,
    sampled,
    split_into_buckets,
    unpack,
)

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


@given(shapes=SHAPES, max_bytes=st.integers(1, 400), first=st.integers(0, 3))
def test_unpack_returns_the_packed_weights(shapes, max_bytes, first):
    weights = {
        f"w{i}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(DTYPES[(first + i) % 4])
        for i, shape in enumerate(shapes)
    }
    buckets = split_into_buckets(describe(weights), max_bytes)
    found = {}
    for bucket in buckets:
        assert len(bucket.weights) == 1 or bucket.num_bytes <= max_bytes
        flat = torch.full((bucket.num_bytes,), 255, dtype=torch.uint8)
        pack(bucket, weights, flat)
        found |= dict(unpack(Bucket.from_json(bucket.to_json()), flat))
    assert list(found) == sorted(weights)
    for name, weight in weights.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight)


def test_sample_has_the_first_and_last_weight_and_no_duplicates():
    for count in (1, 2, 5, 100):
        (bucket,) = split_into_buckets(describe({f"{i:03}": torch.zeros(1) for i in range(count)}), 1 << 20)
        names = [part.name for part in sampled(bucket)]
        assert names[0] == "000" and names[-1] == f"{count - 1:03}"
        assert len(names) == len(set(names)) == min(count, 8)


@pytest.mark.parametrize("position", [0, -1])
def test_a_checksum_sees_a_change_at_either_end_of_a_large_weight(position):
    weight = torch.zeros(CHECKSUM_BYTES, dtype=torch.bfloat16)
    before = checksum(weight)
    weight[position] = 1
    assert checksum(weight) != before


def test_a_checksum_does_not_depend_on_the_layout_in_memory():
    weight = torch.arange(12.0).reshape(3, 4)
    assert checksum(weight.T.contiguous().T) == checksum(weight)
