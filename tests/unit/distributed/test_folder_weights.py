"""Weights through a folder: files are complete or absent, the newest is loaded, and only weights that fit change the model."""

import asyncio
import logging
import os
import shutil
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="the local extra is not installed")

from ludic.distributed import ClientPublisher, FolderFollower, FolderPublisher  # noqa: E402
from ludic.distributed.folder import published_files  # noqa: E402
from ludic.types import ChecksServers, ConfigError  # noqa: E402
from tests.unit.inference.local.tiny_models import (  # noqa: E402
    Gate,
    ask,
    copy_of,
    eventually,
    greedy,
    in_time,
    make_engine,
    new_model,
    some_prompt,
    tokens,
)

pytestmark = pytest.mark.slow


class StillServer:
    """As much of an inference engine as following needs; it records the versions."""

    def __init__(self, model):
        self.model = model
        self.updates = []

    @contextmanager
    def updating(self, version=None):
        yield
        self.updates.append(version)


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def are_same(model, weights):
    own = dict(model.named_parameters(remove_duplicate=False))
    return all(torch.equal(own[name], weight.to(own[name].dtype)) for name, weight in weights.items())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


def versions(folder):
    return [file.version for file in published_files(folder)]


# --- publishing ---


def test_only_the_newest_versions_are_kept(folder):
    publisher = FolderPublisher(folder, keep=2)
    assert isinstance(publisher, ChecksServers)
    for version in (8, 9, 10, 11):
        publisher.publish({"w": torch.full((2,), float(version))}, version)
    assert sorted(os.listdir(folder)) == ["weights_10.safetensors", "weights_11.safetensors"]
    assert publisher.is_current(11) and not publisher.is_current(10) and not publisher.is_current(12)
    shutil.rmtree(folder)
    assert not publisher.is_current(11), "a version deleted from the folder is gone for followers too"


def test_a_resumed_learner_removes_newer_and_unfinished_versions(folder):
    FolderPublisher(folder).publish({"w": torch.zeros(1)}, 57)
    (folder / ".unfinished-weights_58.safetensors").write_bytes(b"half")
    publisher = FolderPublisher(folder)
    assert not publisher.is_current(40)
    publisher.publish({"w": torch.zeros(1)}, 40)
    assert os.listdir(folder) == ["weights_40.safetensors"] and publisher.is_current(40)


def test_a_failed_write_keeps_the_version_before(folder):
    publisher = FolderPublisher(folder)
    publisher.publish({"w": torch.ones(1)}, 1)
    (folder / ".unfinished-weights_2.safetensors").mkdir()  # stands in for a disk that is full
    with pytest.raises(Exception, match="directory"):
        publisher.publish({"w": torch.zeros(1)}, 2)
    assert versions(folder) == [1] and publisher.is_current(1)


# --- what arrives is what was sent ---


@pytest.mark.parametrize("family", ["llama", "llama-mha-tied"])
@pytest.mark.parametrize("all_names", [True, False], ids=["every-name", "tied-once"])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
def test_weights_arrive_exactly_or_rounded_to_the_actors_dtype(folder, family, all_names, sent, held):
    trained = new_model(family, seed=9).to(sent)
    server = StillServer(new_model(family).to(held))
    FolderPublisher(folder).publish(dict(trained.named_parameters(remove_duplicate=not all_names)), 3)
    assert FolderFollower(folder, server).update() == 3
    assert server.updates == [3]
    expected = {name: weight.to(held) for name, weight in trained.named_parameters(remove_duplicate=False)}
    assert are_same(server.model, expected)
    assert {p.dtype for p in server.model.parameters()} == {held}


def test_an_adapter_arrives_merged(folder):
    peft = pytest.importorskip("peft")
    from ludic.models.lora import dense_parameters

    model = peft.get_peft_model(new_model(seed=9), peft.LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    server = StillServer(new_model())
    FolderPublisher(folder).publish(dict(dense_parameters(model)), 1)
    FolderFollower(folder, server).update()
    merged = copy_of(model).merge_and_unload()
    for name, parameter in server.model.named_parameters():
        torch.testing.assert_close(parameter, merged.get_parameter(name), msg=name)


# --- which version is taken ---


def test_follower_loads_the_newest_version_once(folder):
    server = StillServer(new_model())
    follower = FolderFollower(folder, server)
    publisher = FolderPublisher(folder)
    assert follower.update() is None and follower.version is None
    for version in (1, 2):
        publisher.publish(weights_of(new_model(seed=version)), version)
    assert [follower.update(), follower.update()] == [2, None]
    assert server.updates == [2] and follower.version == 2
    assert are_same(server.model, weights_of(new_model(seed=2)))


def test_a_version_that_is_published_again_is_loaded_again(folder):
    """A learner that resumed and went a step further has another version 2 than the one that died."""
    server = StillServer(new_model())
    follower, publisher = FolderFollower(folder, server), FolderPublisher(folder)
    publisher.publish(weights_of(new_model(seed=1)), 2)
    follower.update()
    publisher.publish(weights_of(new_model(seed=5)), 2)
    assert follower.update() == 2
    assert are_same(server.model, weights_of(new_model(seed=5)))


def test_follower_goes_back_with_a_learner_that_resumed_earlier(folder):
    server = StillServer(new_model())
    follower = FolderFollower(folder, server)
    FolderPublisher(folder).publish(weights_of(new_model(seed=1)), 57)
    follower.update()
    FolderPublisher(folder).publish(weights_of(new_model(seed=2)), 40)
    assert follower.update() == 40 and server.updates == [57, 40]


def test_an_incomplete_file_is_ignored_until_it_is_complete(folder, caplog):
    server = StillServer(new_model())
    follower = FolderFollower(folder, server)
    publisher = FolderPublisher(folder, keep=3)
    publisher.publish(weights_of(new_model(seed=1)), 1)
    publisher.publish(weights_of(new_model(seed=2)), 2)
    path = folder / "weights_2.safetensors"
    whole = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        for size in (0, 4, 100, len(whole) - 1):
            path.write_bytes(whole[:size])
            assert follower.update() == (1 if size == 0 else None), "the last one that is whole, once"
    assert "cannot be read yet" in caplog.text and follower.version == 1
    assert are_same(server.model, weights_of(new_model(seed=1)))
    path.write_bytes(whole)
    assert follower.update() == 2
    (folder / ".unfinished-weights_3.safetensors").write_bytes(whole)
    assert follower.update() is None


def test_an_unreadable_newest_version_does_not_bring_back_an_old_one(folder):
    server = StillServer(new_model())
    follower, publisher = FolderFollower(folder, server), FolderPublisher(folder, keep=9)
    for version in (1, 2):
        publisher.publish(weights_of(new_model(seed=version)), version)
    follower.update()
    (folder / "weights_2.safetensors").unlink()
    (folder / "weights_3.safetensors").write_bytes(b"not yet")
    assert follower.update() is None and server.updates == [2]


def test_a_version_deleted_after_listing_is_skipped(folder, monkeypatch):
    import ludic.distributed.folder as module

    server = StillServer(new_model())
    publisher = FolderPublisher(folder, keep=1)
    publisher.publish(weights_of(new_model(seed=1)), 1)
    seen_before = published_files(folder)
    publisher.publish(weights_of(new_model(seed=2)), 2)
    follower = FolderFollower(folder, server)
    with monkeypatch.context() as patched:  # the listing was made before the clean-up
        patched.setattr(module, "published_files", lambda _: seen_before)
        assert follower.update() is None and server.updates == []
    assert follower.update() == 2


# --- what does not fit ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"model.extra.weight": torch.zeros(3)}, "it has no model.extra.weight (1 unknown names)"),
        (lambda w: {n: t for n, t in w.items() if "norm" not in n}, "model.layers.0.input_layernorm.weight is missing"),
        (lambda w: w | {"lm_head.weight": torch.zeros(64, 32)}, "lm_head.weight has shape [64, 32], the model's has"),
    ],
    ids=["unknown", "missing", "shape"],
)
def test_weights_of_another_model_are_refused_before_any_change(folder, change, message):
    server = StillServer(new_model())
    before = weights_of(server.model)
    FolderPublisher(folder).publish(change(weights_of(new_model(seed=3))), 1)
    with pytest.raises(ConfigError) as refused:
        FolderFollower(folder, server).update()
    assert message in str(refused.value) and "Nothing was changed" in str(refused.value)
    assert server.updates == [] and are_same(server.model, before)


async def test_first_version_waits_and_times_out_with_advice(folder):
    server = StillServer(new_model())
    follower = FolderFollower(folder, server)
    with pytest.raises(ConfigError, match="No weights appeared in .*weights within 0.05 s"):
        await follower.first_version(timeout_s=0.05, poll_s=0.01)
    waiting = asyncio.create_task(follower.first_version(poll_s=0.01))
    await asyncio.sleep(0.03)
    FolderPublisher(folder).publish(weights_of(new_model(seed=1)), 7)
    assert await in_time(waiting) == 7 == await follower.first_version()
    assert server.updates == [7]


# --- with a real inference engine ---


async def test_inference_engine_generates_through_an_update_and_reports_versions(folder):
    model, new = new_model(), new_model(seed=9)
    prompt = some_prompt(9)
    FolderPublisher(folder).publish(dict(new.named_parameters()), 4)
    async with make_engine(model) as engine:
        follower = FolderFollower(folder, engine)
        gate = Gate(model, at_call=5)
        running = asyncio.create_task(ask(engine, prompt, max_tokens=24))
        await gate.reached()
        following = asyncio.create_task(follower.run(poll_s=0.01))
        await eventually(lambda: engine._worker.num_pauses == 1)  # so the change comes right after this step
        gate.open()
        answer = await in_time(running)
        await eventually(lambda: follower.version == 4)
        following.cancel()
        assert answer.version_runs == ((0, 5), (4, 19))
        assert tokens(await ask(engine, prompt, max_tokens=6)) == greedy(copy_of(new), prompt, 6)


async def test_client_samples_from_the_published_weights_and_reports_their_version():
    served, trained, prompt = new_model("llama-mha-tied"), new_model("llama-mha-tied", seed=9), some_prompt(13)
    async with make_engine(served) as engine:
        before = await ask(engine, prompt, max_tokens=6)
        ClientPublisher(engine).publish(dict(trained.named_parameters()), version=7)
        after = await ask(engine, prompt, max_tokens=6)
    assert tokens(after) == greedy(copy_of(trained), prompt, 6) != tokens(before)
    assert before.version_runs == ((0, 6),) and after.version_runs == ((7, 6),)


def test_publisher_casts_to_its_dtype(folder):
    trained, server = new_model(seed=9), StillServer(new_model())
    FolderPublisher(folder, dtype=torch.bfloat16).publish(dict(trained.named_parameters()), 1)
    FolderFollower(folder, server).update()
    assert are_same(server.model, {name: p.to(torch.bfloat16).float() for name, p in trained.named_parameters()})
