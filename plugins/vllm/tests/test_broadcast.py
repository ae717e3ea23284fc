"""The order of a weight push, its retry after a failure, and that it leaves the trainer's weights unchanged."""

import pytest
import torch

from ludic.distributed import BroadcastPolicyPublisher, ClientPublisher, Rank0OnlyPublisher, WeightPushError
from ludic.models.lora import dense_parameters
from ludic.types import ConfigError
from plugins.vllm.tests.in_memory import MemoryCommunicator, MemoryControl, MemoryServer
from tests.unit.inference.local.tiny_models import ask, copy_of, greedy, make_engine, new_model, some_prompt, tokens
from tests.unit.training.bandit import tiny_llama

PUSH = ["stage", "announce", "broadcast", "barrier", "finalize"]


def some_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"b": torch.randn(3, 5), "a": torch.randn(7), "c": torch.randn(2, 2, 2).to(torch.bfloat16)}


def make(weights=None, **settings):
    server = MemoryServer({name: tuple(w.shape) for name, w in (weights or some_weights()).items()})
    comm = MemoryCommunicator(server)
    return server, comm, BroadcastPolicyPublisher(MemoryControl(server), comm, **settings)


def test_weights_arrive_exactly_and_the_version_changes_last():
    server, _, publisher = make()
    publisher.publish(some_weights(), version=7)
    assert server.log == ["require_fits", *PUSH, "release"]
    assert server.version == 7
    assert list(server.weights) == ["a", "b", "c"]
    for name, weight in some_weights().items():
        assert torch.equal(server.weights[name], weight) and server.weights[name].dtype == weight.dtype


def test_small_buckets_send_the_same_weights():
    server, _, publisher = make(bucket_bytes=1)
    publisher.publish(some_weights(), version=1)
    assert server.log.count("broadcast") == 3
    assert all(torch.equal(server.weights[name], weight) for name, weight in some_weights().items())


def test_dtype_casts_before_sending_and_before_the_checksums():
    server, _, publisher = make(dtype=torch.bfloat16)
    publisher.publish(some_weights(), version=1)
    assert torch.equal(server.weights["b"], some_weights()["b"].to(torch.bfloat16))
    assert server.version == 1


def test_default_version_is_the_servers_version_plus_one():
    server, _, publisher = make()
    server.version = 4
    publisher.publish(some_weights())
    assert server.version == 5


def test_weights_of_another_model_are_refused_before_the_pause():
    server, _, publisher = make()
    with pytest.raises(ConfigError, match="other weights"):
        publisher.publish({"a": torch.zeros(8)}, version=1)
    assert server.log == ["require_fits"]


@pytest.mark.parametrize("step", PUSH)
def test_a_failed_step_is_retried_with_a_complete_second_push(step):
    server, _, publisher = make()
    server.failing = [step]
    publisher.publish(some_weights(), version=3)
    begun = PUSH[: PUSH.index(step) + 1]
    assert server.log == ["require_fits", *begun, "release", "require_fits", *PUSH, "release"]
    assert server.version == 3


def test_a_push_that_fails_twice_raises_with_advice():
    server, _, publisher = make()
    server.failing = ["broadcast", "broadcast"]
    with pytest.raises(WeightPushError, match=r"Version 3 .* 2 attempts\. broadcast failed Restart it\."):
        publisher.publish(some_weights(), version=3)
    assert server.log[-2:] == ["abandon", "release"]
    assert server.version == 0


def test_one_wrong_bit_fails_the_checksum():
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


class KeepingCommunicator(MemoryCommunicator):
    """Keeps the bytes of the last push, as shared memory does."""

    keeps_weights = True

    def stage(self, buckets, weights) -> None:
        super().stage(buckets, weights)
        self.kept = {name: weight.clone() for name, weight in weights.items()}

    def broadcast(self, bucket, weights, src_rank) -> None:
        super().broadcast(bucket, self.kept, src_rank)


def test_a_restarted_server_gets_the_last_version_again_though_the_trainer_has_changed_its_weights():
    server, _, _ = make()
    publisher = BroadcastPolicyPublisher(MemoryControl(server), KeepingCommunicator(server), bucket_bytes=1)
    assert not publisher.publish_again(), "nothing was sent yet"
    weights = some_weights()
    publisher.publish(weights, version=3)
    server.log.clear()
    assert publisher.publish_again() and server.log == [], "the server has it"
    for weight in weights.values():
        weight += 1
    server.version, server.weights, server.checksums = 0, {}, {}
    assert publisher.publish_again() and server.version == 3
    assert server.log == ["require_fits", "announce", *["broadcast"] * 3, "barrier", "finalize"]
    assert all(torch.equal(server.weights[name], weight) for name, weight in some_weights().items())


def test_after_a_failed_push_the_version_before_it_is_not_sent_again():
    server, _, _ = make()
    publisher = BroadcastPolicyPublisher(MemoryControl(server), KeepingCommunicator(server))
    publisher.publish(some_weights(), version=3)
    server.failing = ["broadcast", "broadcast"]
    with pytest.raises(WeightPushError):
        publisher.publish(some_weights(), version=4)
    assert not publisher.publish_again(), "its bytes are gone"
    publisher.publish(some_weights(), version=5)
    assert publisher.publish_again() and server.version == 5


def test_a_communicator_that_keeps_nothing_cannot_send_again():
    _, _, publisher = make()
    publisher.publish(some_weights(), version=3)
    with pytest.raises(ConfigError, match="MemoryCommunicator keeps no weights"):
        publisher.publish_again()


def test_a_push_is_tried_as_often_as_attempts_says():
    server, _, publisher = make(attempts=4)
    server.failing = ["broadcast", "broadcast", "announce"]
    publisher.publish(some_weights(), version=3)
    assert server.version == 3 and server.log.count("stage") == 4


def test_another_source_rank_is_refused():
    server, comm, _ = make()
    with pytest.raises(ConfigError, match="Rank0OnlyPublisher"):
        BroadcastPolicyPublisher(MemoryControl(server), comm, src_rank=1)


@pytest.mark.parametrize(("rank", "enabled", "num_made"), [("0", True, 1), ("1", True, 0), ("0", False, 0)])
def test_rank_0_creates_one_publisher_and_other_ranks_none(monkeypatch, rank, enabled, num_made):
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


def test_50_publishes_of_an_adapter_do_not_change_the_frozen_weights():
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    model = peft.get_peft_model(
        tiny_llama().to(torch.bfloat16), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    server, _, publisher = make(dict(dense_parameters(model)))
    torch.manual_seed(1)
    for version in range(1, 51):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.01)
        publisher.publish(dict(dense_parameters(model)), version)
    assert server.version == 50
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    merged = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(server.weights[merged], frozen[f"base_model.model.{merged[:-6]}base_layer.weight"])


async def test_client_samples_from_the_published_weights_and_reports_their_version():
    served, trained, prompt = new_model("llama-mha-tied"), new_model("llama-mha-tied", seed=9), some_prompt(13)
    async with make_engine(served) as engine:
        before = await ask(engine, prompt, max_tokens=6)
        ClientPublisher(engine).publish(dict(trained.named_parameters()), version=7)
        after = await ask(engine, prompt, max_tokens=6)
    assert tokens(after) == greedy(copy_of(trained), prompt, 6) != tokens(before)
    assert before.version_runs == ((0, 6),) and after.version_runs == ((7, 6),)
