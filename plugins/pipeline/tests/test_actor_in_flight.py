"""Weights that change under a running episode: the actor plays on, and the learner reads which tokens are whose."""

import asyncio

import pytest

torch = pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("redis", reason="the pipeline extra is not installed")

from ludic.distributed import FolderFollower, FolderPublisher  # noqa: E402
from ludic.inference import ByteTemplate  # noqa: E402
from ludic.types import InferenceSpec, ReturnSpec, SamplingParams  # noqa: E402
from ludic_pipeline.queue import ActorSettings, run_pipeline_actor  # noqa: E402
from ludic_pipeline.queue.lease import LearnerStatus, Lease  # noqa: E402
from ludic_pipeline.queue.queue import ExperienceQueue  # noqa: E402
from ludic_pipeline.queue.wire import decode_group  # noqa: E402
from tests.unit.batch_gen.parts import TotalReward, make_engine, request  # noqa: E402
from tests.unit.inference.local import tiny_models  # noqa: E402
from tests.unit.inference.local.tiny_models import Gate, copy_of, eventually, new_model, plain_logprobs  # noqa: E402

pytestmark = pytest.mark.slow
NUM_NEW = 24
LONG = InferenceSpec(
    sampling=SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True), return_=ReturnSpec.for_rl()
)


async def test_an_item_that_crosses_an_update_carries_both_versions_through_redis(shared_redis, tmp_path):
    old = new_model(vocab_size=ByteTemplate.VOCAB_SIZE)
    new = new_model(vocab_size=ByteTemplate.VOCAB_SIZE, seed=9)
    before, after = copy_of(old), copy_of(new)
    publisher = FolderPublisher(tmp_path)
    publisher.publish(dict(old.named_parameters()), 6)
    async with (
        tiny_models.make_engine(old) as server,
        ExperienceQueue(shared_redis.url, "in-flight") as queue,
    ):
        follower = FolderFollower(tmp_path, server)
        assert await follower.first_version() == 6
        lease, status = Lease("learner-0"), LearnerStatus(version=6, items_per_update=1, max_lag=1, is_waiting=True)
        await queue.acquire(lease)
        await queue.announce(lease, status)
        gate = Gate(old, at_call=7)
        server.release_cache()  # its modules are built again, with the gate
        playing = asyncio.create_task(
            run_pipeline_actor(
                make_engine(server),
                lambda: [request(inference=LONG)],
                TotalReward(),
                shared_redis.url,
                "in-flight",
                max_steps=1,
                client=server,
                settings=ActorSettings(max_groups=1, follow=lambda: follower.run(poll_s=0.01)),
            )
        )
        await gate.reached()
        publisher.publish(dict(new.named_parameters()), 7)
        await eventually(lambda: server._worker.num_pauses == 1)  # the change comes right after this step
        gate.open()
        report = await asyncio.wait_for(playing, 30)
        taken = await queue.take(lease, status, max_items=1)
    assert (report.num_groups, report.num_abandoned) == (1, 0)
    [group] = taken.groups
    assert group.oldest_version == 6, "a group is as old as its oldest token"
    [item] = decode_group(group.payload)
    assert item.attachments.version_runs == ((6, 7), (7, NUM_NEW - 7))
    # Each token's log-probability is that of the weights that sampled it, which is what the corrections need.
    ids = item.input_ids.tolist()
    prompt, sampled = ids[:-NUM_NEW], ids[-NUM_NEW:]
    expected = [*plain_logprobs(before, prompt, sampled)[:7], *plain_logprobs(after, prompt, sampled)[7:]]
    torch.testing.assert_close(
        torch.tensor(item.actor_logps.tolist()), torch.tensor(expected).float(), atol=1e-3, rtol=1e-3
    )
