"""The official SDK, unchanged, against the server: training, custom losses, sampling, saving and loading."""

import math
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

import tinker
from tinker import types

from tests.unit.tinker.server.running import NAME, RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        with RunningServer(tmp_path_factory.mktemp("data")) as running:
            yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> "Iterator[tinker.ServiceClient]":
    with server.client() as made:
        yield made


def datum(*, start: int = 1, length: int = 6, **inputs: float) -> "types.Datum":
    tokens = list(range(start, start + length))
    tensors = {
        name: types.TensorData(data=[value] * length, dtype="float32", shape=[length]) for name, value in inputs.items()
    }
    targets = types.TensorData(data=[token + 1 for token in tokens], dtype="int64", shape=[length])
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def test_training_lowers_the_loss_and_sampler_agrees_with_trainer(client):
    training = client.create_lora_training_client(NAME, rank=4, seed=1)
    data = [datum(weights=1.0), datum(start=9, length=4, weights=1.0)]
    losses = []
    for _ in range(4):
        computed = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(
            types.AdamParams(learning_rate=1e-2, beta1=0.8, weight_decay=0.01, grad_clip_norm=1.0)
        )
        losses.append(computed.result().metrics["loss:sum"])
        assert math.isfinite(step.result().metrics["unclipped_grad_l2:mean"])
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1

    now = training.forward(data, "cross_entropy").result()
    assert now.metrics["loss:sum"] < losses[-1]
    sampler = training.save_weights_and_get_sampling_client()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, 4, 5, 6, 7])).result()
    assert scored[0] is None
    torch.testing.assert_close(
        torch.tensor(scored[1:]), now.loss_fn_outputs[0]["logprobs"].to_torch(), rtol=1e-5, atol=1e-5
    )


def test_forward_backward_custom_has_the_gradient_of_its_loss(client):
    plain, custom = (client.create_lora_training_client(NAME, rank=4, seed=2) for _ in range(2))
    data = [datum(weights=2.0), datum(start=20, length=3, weights=2.0)]

    def doubled(data, logprobs):
        loss = sum(-2.0 * own.sum() for own in logprobs)
        return loss, {"mine": loss.item()}

    computed = custom.forward_backward_custom(data, doubled).result()
    expected = plain.forward_backward(data, "cross_entropy").result()
    assert computed.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert computed.metrics["mine"] == computed.metrics["loss:sum"]
    for training in (plain, custom):
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    after = [t.forward(data, "cross_entropy").result().metrics["loss:sum"] for t in (plain, custom)]
    assert after[0] == pytest.approx(after[1], rel=1e-5)


def test_wrong_request_fails_and_the_run_continues(client):
    training = client.create_lora_training_client(NAME, rank=4)
    with pytest.raises(
        tinker.RequestFailedError, match="cross_entropy takes the loss_fn_inputs target_tokens, weights"
    ):
        training.forward_backward([datum()], "cross_entropy").result()
    assert training.forward([datum(weights=1.0)], "cross_entropy").result().metrics["loss:sum"] > 0
