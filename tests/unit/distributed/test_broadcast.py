"""The order of an update, what happens when a step fails, and that the trainer's own weights stay what they are."""

import pytest
import torch

from ludic.distributed import BroadcastPolicyPublisher, Rank0OnlyPublisher, WeightPushError
from ludic.models.lora import dense_parameters
from ludic.types import ConfigError
from tests.unit.distributed.in_memory import MemoryCommunicator, MemoryControl, MemoryServer
from tests.unit.training.bandit import tiny_llama

PUSH = ["stage", "announce", "broadcast", "barrier", "finalize"]


def some_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"b": torch.randn(3, 5), "a": torch.randn(7), "c": torch.randn(2, 2, 2).to(torch.bfloat16)}


def make(weights=None, **settings):
    server = MemoryServer({name: tuple(w.shape) for name, w in (weights or some_weights()).items()})
    comm = MemoryCommunicator(server)
    return server, comm, BroadcastPolicyPublisher(MemoryControl(server), comm, **settings)


def test_weights_arrive_bit_for_bit_in_order_and_the_version_begins_at_the_end():
    server, _, publisher = make()
    publisher.publish(some_weights(), version=7)
    assert server.log == ["require_fits", *PUSH, "release"]
    assert server.version == 7
    assert list(server.weights) == ["a", "b", "c"]
    for name, weight in some_weights().items():
        assert torch.equal(server.weights[name], weight) and server.weights[name].dtype == weight.dtype


def test_small_buckets_bring_the_same_weights():
    server, _, publisher = make(bucket_bytes=1)
    publisher.publish(some_weights(), version=1)
    assert server.log.count("broadcast") == 3
    assert all(torch.equal(server.weights[name], weight) for name, weight in some_weights().items())


def test_a_type_for_the_way_casts_what_is_sent_and_checks_what_was_cast():
    server, _, publisher = make(dtype=torch.bfloat16)
    publisher.publish(some_weights(), version=1)
    assert torch.equal(server.weights["b"], some_weights()["b"].to(torch.bfloat16))
    assert server.version == 1


def test_without_a_version_it_is_the_one_after_the_servers_own():
    server, _, publisher = make()
    server.version = 4
    publisher.publish(some_weights())
    assert server.version == 5


def test_weights_that_do_not_fit_are_refused_before_any_pause():
    server, _, publisher = make()
    with pytest.raises(ConfigError, match="other weights"):
        publisher.publish({"a": torch.zeros(8)}, version=1)
    assert server.log == ["require_fits"]


@pytest.mark.parametrize("step", PUSH)
def test_a_step_that_fails_once_costs_a_whole_second_push(step):
    server, _, publisher = make()
    server.failing = [step]
    publisher.publish(some_weights(), version=3)
    begun = PUSH[: PUSH.index(step) + 1]
    assert server.log == ["require_fits", *begun, "release", "require_fits", *PUSH, "release"]
    assert server.version == 3


def test_a_push_that_fails_twice_is_an_error_that_says_what_to_do():
    server, _, publisher = make()
    server.failing = ["broadcast", "broadcast"]
    with pytest.raises(WeightPushError, match=r"Version 3 .* two attempts\. broadcast failed Restart it\."):
        publisher.publish(some_weights(), version=3)
    assert server.log[-2:] == ["abandon", "release"]
    assert server.version == 0


def test_one_wrong_bit_on_the_way_is_noticed():
    server, comm, publisher = make()
    comm.flip_a_bit = True
    with pytest.raises(WeightPushError, match="other values arrived"):
        publisher.publish(some_weights(), version=3)
    assert server.version == 0


def test_a_server_that_was_restarted_or_is_down_is_not_current():
    server, _, publisher = make()
    publisher.publish(some_weights(), version=3)
    assert publisher.is_current(3) and not publisher.is_current(4)
    server.version = 0
    assert not publisher.is_current(3)
    server.failing = ["policy_version"]
    assert not publisher.is_current(0)


def test_another_rank_is_told_to_use_the_wrapper():
    server, comm, _ = make()
    with pytest.raises(ConfigError, match="Rank0OnlyPublisher"):
        BroadcastPolicyPublisher(MemoryControl(server), comm, src_rank=1)


@pytest.mark.parametrize(("rank", "enabled", "num_made"), [("0", True, 1), ("1", True, 0), ("0", False, 0)])
def test_only_rank_0_makes_a_publisher_and_only_one(monkeypatch, rank, enabled, num_made):
    monkeypatch.setenv("RANK", rank)
    server, _, inner = make()
    made = []
    publisher = Rank0OnlyPublisher(lambda: made.append(inner) or inner, enabled=enabled)
    assert not made
    for version in (1, 2):
        publisher.publish(some_weights(), version)
    assert len(made) == num_made
    assert publisher.is_current(2)
    server.version -= 1  # as if it had been restarted
    assert publisher.is_current(2) is not bool(num_made)
    server.version += 1
    assert server.version == (2 if num_made else 0)


def test_200_publishes_of_an_adapter_leave_the_frozen_weights_as_they_were():
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    model = peft.get_peft_model(
        tiny_llama().to(torch.bfloat16), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    server, _, publisher = make(dict(dense_parameters(model)))
    torch.manual_seed(1)
    for version in range(1, 201):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.01)
        publisher.publish(dict(dense_parameters(model)), version)
    assert server.version == 200
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    merged = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(server.weights[merged], frozen[f"base_model.model.{merged[:-6]}base_layer.weight"])
