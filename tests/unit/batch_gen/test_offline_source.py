import json

import pytest

from ludic.batch_gen import GRPORequestStrategy, OfflineBatchSource, make_chat_template_step_to_item, stitch_rollouts
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.types import ConfigError, Rollout, load_rollouts
from tests.unit.batch_gen.parts import TotalReward, make_engine, request
from tests.unit.batch_gen.test_stitching import call_step


class Ones:
    """Credit: one everywhere; notes which rollouts came together."""

    def __init__(self) -> None:
        self.chunks: list[list[Rollout]] = []

    def compute(self, rollouts):
        self.chunks.append(list(rollouts))
        return {(r.id, s.index): 1.0 for r in rollouts for s in r.steps}


@pytest.fixture
async def files(tmp_path):
    """Two files with 10 groups of 3 rollouts each, of which the groups lie across both files; and two failed rollouts."""
    requests = GRPORequestStrategy(3).expand([request() for _ in range(10)])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, half in zip(paths, (requests[::2], requests[1::2]), strict=True):
        broken = request(env={"fail_on": 1})
        await make_engine(jsonl_path=path, max_retries=0).generate_rollouts([*half, broken], max_steps=1)
    return paths


def ids(batch) -> list[str]:
    return [item.origin.rollout_id for item in batch.items]


async def passes(source, num_batches) -> list[list[str]]:
    return [ids(await source.next_batch()) for _ in range(num_batches)]


async def test_a_pass_holds_every_item_once_and_failed_rollouts_never(files):
    source = OfflineBatchSource(files, credit_assigner=Ones(), batch_size=8)
    stored = {r.id for path in files for r in load_rollouts(path) if r.failure is None}
    assert source.num_rollouts == len(stored) == 30
    batches = [batch async for batch in source.iter_epoch()]
    assert [len(batch) for batch in batches] == [8, 8, 8, 6]
    assert {rollout_id for batch in batches for rollout_id in ids(batch)} == stored
    assert batches[0].meta["source"] == "offline" and batches[0].meta["epoch"] == 0 and source.epoch == 1
    assert batches[0].meta["num_samples"] == 8 and batches[0].meta["avg_completion_length"] > 0


async def test_items_are_those_of_an_online_run(files):
    source = OfflineBatchSource(files[:1], credit_assigner=TotalReward(), batch_size=100, shuffle=False)
    rollouts = [r for r in load_rollouts(files[0]) if r.failure is None]
    groups = list(dict.fromkeys(r.meta["group_id"] for r in rollouts))
    rollouts.sort(key=lambda r: groups.index(r.meta["group_id"]))
    expected = stitch_rollouts(rollouts, TotalReward().compute(rollouts))
    batch = await source.next_batch()
    assert [(i.input_ids.tolist(), i.weight, i.actor_logps.tolist(), i.meta, i.origin) for i in batch.items] == [
        (i.input_ids.tolist(), i.weight, i.actor_logps.tolist(), i.meta, i.origin) for i in expected
    ]


async def test_credit_sees_whole_groups_and_only_a_chunk_at_a_time(files):
    credit = Ones()
    source = OfflineBatchSource(files, credit_assigner=credit, batch_size=5, chunk_rollouts=4)
    async for _ in source.iter_epoch():
        pass
    for chunk in credit.chunks:
        groups = [r.meta["group_id"] for r in chunk]
        assert len(chunk) <= 6 and all(groups.count(group) == 3 for group in groups)
    assert sum(map(len, credit.chunks)) == 30 and len(credit.chunks) == 5


async def test_each_pass_has_its_own_order_that_repeats_from_the_seed(files):
    def source(**settings):
        return OfflineBatchSource(files, credit_assigner=Ones(), batch_size=30, chunk_rollouts=6, **settings)

    first, second = await passes(source(seed=1), 2)
    assert first != second and sorted(first) == sorted(second)
    assert [first, second] == await passes(source(seed=1), 2)
    assert first != (await passes(source(seed=2), 1))[0]
    by_group = OfflineBatchSource(files, credit_assigner=Ones(), batch_size=3, chunk_rollouts=3)
    groups = [(await by_group.next_batch()).items[0].origin.group_id for _ in range(20)]
    assert groups[:10] != groups[10:] and sorted(groups[:10]) == sorted(groups[10:]), "groups change places too"
    plain = await passes(source(shuffle=False), 2)
    assert plain[0] == plain[1]


@pytest.mark.parametrize("num_before", [1, 2, 4, 7])
async def test_a_resumed_source_goes_on_exactly(files, num_before):
    def source():
        return OfflineBatchSource(files, credit_assigner=Ones(), batch_size=7, chunk_rollouts=5)

    whole = source()
    await passes(whole, num_before)
    resumed = source()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert await passes(whole, 9) == await passes(resumed, 9)


async def test_drop_last_gives_full_batches_only_and_counts_say_so(files):
    source = OfflineBatchSource(files, credit_assigner=Ones(), batch_size=8, drop_last=True)
    assert [len(batch) async for batch in source.iter_epoch()] == [8, 8, 8]
    assert len(source) == 30 and source.num_batches_per_epoch == 3
    assert OfflineBatchSource(files, credit_assigner=Ones(), batch_size=8).num_batches_per_epoch == 4


async def test_a_filter_drops_items_and_dropping_all_is_an_error(files):
    source = OfflineBatchSource(
        files, credit_assigner=TotalReward(), batch_size=99, sample_filter=lambda item: item.weight > 1
    )
    batch = await source.next_batch()
    assert 0 < len(batch) < 30 and all(item.weight > 1 for item in batch.items)
    nothing = OfflineBatchSource(files, credit_assigner=Ones(), sample_filter=lambda item: False)
    with pytest.raises(ValueError, match="no item passed the sample_filter"):
        await nothing.next_batch()
    with pytest.raises(ValueError, match="drop_last"):
        await OfflineBatchSource(files, credit_assigner=Ones(), batch_size=31, drop_last=True).next_batch()


def test_files_without_usable_rollouts_raise_an_error_with_their_names(tmp_path):
    empty, torn = tmp_path / "empty.jsonl", tmp_path / "torn.jsonl"
    empty.touch()
    torn.write_text('{"id": 3}\n')
    for path, message in ((empty, "no usable rollouts"), (torn, "Line 1 of .*torn"), (tmp_path / "x", "no file")):
        with pytest.raises(ValueError, match=message):
            OfflineBatchSource(path, credit_assigner=Ones())


async def test_a_line_that_is_not_utf8_is_named(tmp_path, files):
    """Where the index meets it, in an id, and where the rollout is read."""
    first, _, rest = files[0].read_bytes().partition(b"\n")
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(first + b'\n{"id": "\xff"}\n')
    with pytest.raises(ConfigError, match="Line 2 of .*broken.jsonl is not a stored rollout"):
        OfflineBatchSource(broken, credit_assigner=Ones())
    broken.write_bytes(first + b"\n" + rest.replace(b'"content":"', b'"content":"\xff', 1))
    source = OfflineBatchSource(broken, credit_assigner=Ones())
    with pytest.raises(ConfigError, match="Line 2 of .*broken.jsonl is not a stored rollout: 'utf-8'"):
        await source.next_batch()


# --- rendering messages ---


async def test_steps_can_be_rendered_with_a_chat_template(tmp_path):
    path = tmp_path / "x.jsonl"
    client = ScriptedClient(["no tag", "<a>inc</a>", "<a>inc</a>"])
    await make_engine(client, jsonl_path=path).generate_rollouts([request("counting", {"target": 2})], max_steps=5)
    to_item = make_chat_template_step_to_item(chat_template=ByteTemplate())
    source = OfflineBatchSource(path, to_item, Ones(), shuffle=False)
    batch = await source.next_batch()
    assert [item.origin.step_kind for item in batch.items] == ["agent", "env", "env"]
    (rollout,) = load_rollouts(path)
    for item, call in zip(batch.items, rollout.agent_steps, strict=True):
        # ByteTemplate is exact, so rendering the messages gives the tokens that were sent and sampled
        assert item.input_ids[item.action_mask].tolist() == call.trace.completion_token_ids.tolist()
        assert item.input_ids[~item.action_mask].tolist() == call.trace.prompt_token_ids.tolist()
        assert item.weight == 1.0


async def test_steps_can_be_selected(tmp_path):
    path = tmp_path / "x.jsonl"
    client = ScriptedClient(["no tag", "<a>inc</a>"])
    await make_engine(client, jsonl_path=path).generate_rollouts([request("counting", {"target": 1})], max_steps=5)
    to_item = make_chat_template_step_to_item(chat_template=ByteTemplate())
    source = OfflineBatchSource(path, to_item, Ones(), step_selector=lambda step: step.kind == "env")
    assert len(await source.next_batch()) == 1
    with pytest.raises(ConfigError, match="step_selector"):
        OfflineBatchSource(path, credit_assigner=Ones(), step_selector=lambda step: True)


def test_what_cannot_be_rendered_is_an_error():
    class Rewrites(ByteTemplate):
        def apply(self, messages, *, tools=None, add_generation_prompt=True):
            return super().apply(messages[-1:], add_generation_prompt=add_generation_prompt)

    step = call_step(0, [1], [2], turn="t", info={"chat_prompt_messages": [{"role": "user", "content": "hi"}]})
    rollout = Rollout(steps=[step])
    with pytest.raises(ValueError, match="only appends"):
        make_chat_template_step_to_item(chat_template=Rewrites())(rollout, step, 1.0)
    bare = call_step(0, [1], [2], turn="t")
    with pytest.raises(ValueError, match="no prompt messages"):
        make_chat_template_step_to_item(chat_template=ByteTemplate())(Rollout(steps=[bare]), bare, 1.0)
    with pytest.raises(ConfigError, match="either a tokenizer or a chat_template"):
        make_chat_template_step_to_item()


async def test_a_position_in_other_files_is_refused(files):
    state = OfflineBatchSource(files, credit_assigner=Ones()).state_dict()
    with pytest.raises(ConfigError, match="30 rollouts"):
        OfflineBatchSource(files[:1], credit_assigner=Ones()).load_state_dict(state)
