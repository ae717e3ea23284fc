"""Experts in the answers of a vLLM server that was started with --enable-return-routed-experts."""

import base64
import io
import json

import numpy as np
import pytest
import torch

from ludic.http.client import EndpointError
from ludic.types import TokenCompletionRequest
from ludic_gpu.experts import Routers, recording
from ludic_vllm.wire import read_completion
from tests.tiny_families import family_model


def answer(experts: np.ndarray | None) -> bytes:
    choice = {"token_ids": [7, 8], "finish_reason": "length", "text": ""}
    if experts is not None:
        file = io.BytesIO()
        np.save(file, experts)
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    return json.dumps({"choices": [choice]}).encode()


def read(experts: np.ndarray | None):
    request = TokenCompletionRequest("m", np.array([4, 5, 6], dtype=np.int32))
    return read_completion("http://server", answer(experts), request, 0).experts


def test_experts_are_read_and_the_last_token_is_not_known():
    given = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
    found = read(given)
    assert found.dtype == np.int16 and np.array_equal(found[:4], given) and (found[4] == -1).all()
    assert read(None) is None


@pytest.mark.parametrize("shape", [(2, 2, 3), (4, 6)], ids=["too few tokens", "no layers"])
def test_experts_of_another_shape_are_refused(shape):
    with pytest.raises(EndpointError, match="experts of the shape"):
        read(np.zeros(shape, dtype=np.uint8))


def test_columns_of_layers_without_experts_are_left_out():
    """vLLM has one for every layer; of this model only the second layer is a mixture."""
    model = family_model("qwen3_moe", mlp_only_layers=[0])
    routers, ids = Routers(model), torch.arange(3, 13)[None]
    assert routers.num_layers == 1
    with recording(model) as own, torch.no_grad():
        model(ids, use_cache=False)
    experts = (own.experts_TLK() + 1) % 4
    of_all_layers = torch.cat([torch.zeros_like(experts), experts], dim=1)
    with routers.watched(of_all_layers) as routed, torch.no_grad():
        model(ids, use_cache=False)
    assert torch.equal(routed.experts_TLK(), experts)
