"""The official SDK, unchanged, against the server: training, custom losses, sampling, saving and loading."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

import tinker
from tinker import types

from ludic_tinker.server import app
from plugins.tinker.tests.server.running import KEY, NAME, RunningServer, datum, prompt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        with RunningServer() as running:
            yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    with server.client() as made:
        yield made


@pytest.fixture(scope="module")
def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run whose adapter is no longer zero; tests do not change it."""
    training = client.create_lora_training_client(NAME, rank=4, seed=3).result()
    training.forward_backward([datum(weights=1.0)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return training


@pytest.fixture(scope="module")
def sampler(trained: tinker.TrainingClient) -> tinker.SamplingClient:
    return trained.save_weights_and_get_sampling_client().result()


def logps_of(training: tinker.TrainingClient, *data: types.Datum) -> list[torch.Tensor]:
    output = training.forward(list(data), "cross_entropy").result()
    return [own["logprobs"].to_torch() for own in output.loss_fn_outputs]


# --- training ---


def test_training_lowers_the_loss_and_sampler_agrees_with_trainer(client):
    training = client.create_lora_training_client(NAME, rank=4, seed=1).result()
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
    scored = (
        training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt(1, 2, 3, 4, 5, 6, 7)).result()
    )
    assert scored[0] is None
    torch.testing.assert_close(
        torch.tensor(scored[1:]), now.loss_fn_outputs[0]["logprobs"].to_torch(), rtol=1e-5, atol=1e-5
    )


def test_several_targets_per_token_dense_and_sparse(trained):
    targets = torch.tensor([[2, 5, 7, 9], [3, 0, 0, 0], [4, 0, 0, 0]])
    weights = torch.tensor([[0.5, 0.25, 0.125, 1.0], [1.0, 0, 0, 0], [2.0, 0, 0, 0]])
    both = [
        types.Datum(
            model_input=prompt(1, 2, 3),
            loss_fn_inputs={"target_tokens": make(targets), "weights": make(weights)},
        )
        for make in (types.TensorData.from_torch, types.TensorData.from_torch_sparse)
    ]
    dense, sparse = trained.forward(both, "cross_entropy").result().loss_fn_outputs
    assert dense["logprobs"].shape == [3, 4]
    torch.testing.assert_close(dense["logprobs"].to_torch(), sparse["logprobs"].to_torch())
    [single] = logps_of(trained, datum(length=3, weights=1.0))
    torch.testing.assert_close(dense["logprobs"].to_torch()[:, 0], single)


def test_large_request_arrives_in_parts_and_is_one_gradient(server):
    """The SDK sends the parts at once, the first one last; here each has two rows."""
    data = [datum(start=n, length=2 + n % 3, weights=1.0) for n in range(1, 8)]
    with server.client(fwdbwd_max_chunk_len=2) as parts, server.client() as whole:
        runs = [made.create_lora_training_client(NAME, rank=4, seed=5).result() for made in (parts, whole)]
        losses = [run.forward_backward(data, "cross_entropy").result() for run in runs]
        assert losses[0].metrics["loss:sum"] == pytest.approx(losses[1].metrics["loss:sum"], rel=1e-5)
        norms = [run.optim_step(types.AdamParams()).result().metrics["unclipped_grad_l2:mean"] for run in runs]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda run: run.forward_backward([datum()], "cross_entropy"),
            "target_tokens, weights; it was given target_tokens",
        ),
        (lambda run: run.forward([datum(weights=1.0, length=300)], "cross_entropy"), "300 tokens"),
        (lambda run: run.forward([datum(start=262, weights=1.0)], "cross_entropy"), "the model has 264 tokens"),
        (lambda run: run.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate=-1.0"),
        (lambda run: run.optim_step(types.DimuonParams(learning_rate=1.0)), "this server has AdamW"),
        (lambda run: run.save_state("../up"), "cannot name a checkpoint"),
        (lambda run: run._load_state_impl("tinker://no/weights/no", False, None), "no checkpoint"),
    ],
)
def test_wrong_request_fails_and_the_run_continues(trained, call, said):
    with pytest.raises(tinker.RequestFailedError, match=said):
        call(trained).result()
    assert trained.forward([datum(weights=1.0)], "cross_entropy").result().metrics["loss:sum"] > 0


def test_unknown_base_model_is_refused_by_name(client):
    with pytest.raises(tinker.BadRequestError, match="This server has tiny"):
        client.create_lora_training_client("Qwen/Qwen3-8B").result()


def test_info_names_model_and_rank(client, trained):
    info = trained.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (NAME, 4, True)
    [offered] = client.get_server_capabilities().supported_models
    assert (offered.model_name, offered.max_context_length) == (NAME, 64)


# --- sampling ---


def test_seed_decides_the_samples_and_greedy_needs_none(sampler):
    def tokens(**params: Any) -> list[list[int]]:
        settings = types.SamplingParams(max_tokens=6, **params)
        return [list(own.tokens) for own in sampler.sample(prompt(1, 2), 2, settings).result().sequences]

    assert tokens(seed=4) == tokens(seed=4) != tokens(seed=5)
    assert tokens(seed=4)[0] != tokens(seed=4)[1]
    both = sampler.sample(prompt(1, 2), 2, types.SamplingParams(max_tokens=1)).result().sequences
    assert len({own.sequence_id for own in both}) == 2
    greedy = tokens(temperature=0.0)
    assert greedy[0] == greedy[1] == tokens(top_k=1)[0]


def test_stop_tokens_end_a_completion_and_are_part_of_it(sampler):
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0)
    [free] = sampler.sample(prompt(1, 2), 1, greedy).result().sequences
    assert (free.stop_reason, len(free.tokens)) == ("length", 6)
    stop = free.tokens[2]
    first = list(free.tokens).index(stop)
    [stopped] = (
        sampler.sample(prompt(1, 2), 1, types.SamplingParams(max_tokens=6, temperature=0.0, stop=[stop]))
        .result()
        .sequences
    )
    assert (stopped.stop_reason, list(stopped.tokens)) == ("stop", list(free.tokens)[: first + 1])


def test_prompt_log_probs_top_tokens_and_targets(sampler):
    tokens = [5, 6, 7, 8, 9]
    ids = torch.full((4, 3), -1, dtype=torch.int64)
    ids[3, 0], ids[1, 2] = 9, 44
    answers = [
        sampler.sample(
            prompt(*tokens), 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=3,
            topk_sample_logprobs=2, target_prompt_logprobs=targets,
        ).result()
        for targets in (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1))
    ]  # fmt: skip
    for answer in answers:
        logprobs, top = answer.prompt_logprobs, answer.topk_prompt_logprobs
        assert logprobs[0] is None and top[0] is None and len(logprobs) == len(top) == 5
        for place, own in enumerate(top[1:], start=1):
            assert [value for _, value in own] == sorted((value for _, value in own), reverse=True) and len(own) == 3
            assert logprobs[place] <= own[0][1] + 1e-6
        found = answer.target_prompt_logprobs.to_torch()
        assert found.shape == (4, 3) and found[3, 0] == pytest.approx(logprobs[4], abs=1e-5)
        assert found[1, 2] < 0 and found[0].tolist() == [0, 0, 0]
        [sampled] = answer.sequences
        assert len(sampled.topk_logprobs) == 1 and len(sampled.topk_logprobs[0]) == 2
    assert answers[1].target_prompt_logprobs.sparse_crow_indices is not None


def test_last_n_log_probs_leave_the_others_out(sampler):
    whole, end = (
        sampler.compute_logprobs(prompt(5, 6, 7, 8), **last).result() for last in ({}, {"prompt_logprobs_last_n": 2})
    )
    assert end[:2] == [None, None] and end[2:] == pytest.approx(whole[2:], abs=1e-6)


def test_too_long_prompt_is_refused(sampler):
    with pytest.raises(tinker.BadRequestError, match="together they may be 64"):
        sampler.sample(prompt(*range(60)), 1, types.SamplingParams(max_tokens=10)).result()


def test_copies_of_a_sampling_client_do_not_collide(sampler):
    settings = types.SamplingParams(max_tokens=2, temperature=0.0)
    copies = [tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY) for _ in range(2)]
    prompts = [prompt(3, 4), prompt(5, 6)]
    expected = [sampler.compute_logprobs(own).result()[1:] for own in prompts]
    assert [copy.compute_logprobs(own).result()[1:] for copy, own in zip(copies, prompts, strict=True)] == expected
    assert all(len(copy.sample(prompts[0], 1, settings).result().sequences) == 1 for copy in copies)


def test_abandoned_sample_leaves_the_engine(server, sampler):
    engine, sampling = server.service.sampling.engine, server.service.sampling.running
    engine.pause()
    try:
        abandoned = sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=63, stop=[]))
        server.until(lambda: any(future._done._waiters for future in server.service.futures._by_id.values()))
        assert abandoned.cancel()
        server.until(lambda: not sampling)
    finally:
        engine.resume()
    server.until(lambda: engine.stats["running"] + engine.stats["waiting"] == 0)
    [after] = sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=2, stop=[])).result().sequences
    assert len(after.tokens) == 2


def test_client_asks_again_until_the_result_is_there(server, sampler, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(app, "POLL_S", 0.01)
    monkeypatch.setattr(server.service, "why_waiting", asked.append)
    engine = server.service.sampling.engine
    engine.pause()
    try:
        answer = sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=1))
        server.until(lambda: len(asked) >= 3)
    finally:
        engine.resume()
    assert len(answer.result().sequences) == 1


# --- saving and loading ---


@pytest.mark.parametrize("is_one_request", [True, False])
def test_state_continues_with_and_without_its_optimizer(server, is_one_request):
    data, adam = [datum(weights=1.0)], types.AdamParams(learning_rate=1e-2)

    def train(run: tinker.TrainingClient) -> list[torch.Tensor]:
        run.forward_backward(data, "cross_entropy")
        run.optim_step(adam).result()
        return logps_of(run, *data)

    with server.client(create_model_via_load_weights=is_one_request) as made:
        first = made.create_lora_training_client(NAME, rank=4, seed=1, train_mlp=False).result()
        train(first)
        train(first)
        path = first.save_state("two").result().path
        at_save = logps_of(first, *data)
        went_on = train(first)

        same = made.create_training_client_from_state_with_optimizer(path).result()
        torch.testing.assert_close(logps_of(same, *data), at_save, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(train(same), went_on, rtol=1e-5, atol=1e-5)

        weights_only = made.create_training_client_from_state(path).result()
        torch.testing.assert_close(logps_of(weights_only, *data), at_save, rtol=1e-6, atol=1e-6)
        assert (train(weights_only)[0] - went_on[0]).abs().max() > 1e-4

        with pytest.raises(tinker.RequestFailedError, match="overwrite"):
            first.save_state("two").result()
        assert first.save_state("two", overwrite=True).result().path == path
        torch.testing.assert_close(
            logps_of(made.create_training_client_from_state(path).result(), *data), went_on, rtol=1e-6, atol=1e-6
        )


def test_named_sampler_weights_stay_as_they_were_saved(client):
    run = client.create_lora_training_client(NAME, rank=4, seed=1).result()
    path = run.save_weights_for_sampler("zero").result().path
    assert path == f"tinker://{run.model_id}/sampler_weights/zero"
    run.forward_backward([datum(weights=1.0)], "cross_entropy")
    run.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    state = run.save_state("one").result().path
    base, zero, one = (
        client.create_sampling_client(**where).result().compute_logprobs(prompt(1, 2, 3, 4)).result()[1:]
        for where in ({"base_model": NAME}, {"model_path": path}, {"model_path": state})
    )
    assert zero == pytest.approx(base, abs=1e-6)
    assert one == pytest.approx(logps_of(run, datum(length=3, weights=1.0))[0].tolist(), abs=1e-4)
