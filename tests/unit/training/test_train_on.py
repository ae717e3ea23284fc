"""Training on chosen roles: spans from the episode to the sample, and the algorithms that use them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludic.agents import ReActAgent
from ludic.batch_gen import OfflineBatchSource, make_chat_template_step_to_item, stitch_rollout
from ludic.batch_gen.sources.offline import with_message_spans
from ludic.inference import ByteTemplate, HermesToolParser
from ludic.interaction import SingleAgentProtocol
from ludic.run import build
from ludic.training import ConstantCredit
from ludic.training.algorithms import make_echo, make_rft, make_sft
from ludic.training.filters import observe_roles, train_on_messages, train_on_roles
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError, MessageSpan, Rollout, SAWBatch, SAWItem, TokenTrace, save_rollouts
from ludic_pipeline.queue.wire import UnreadableGroup, decode_group, encode_group
from tests.fakes import CountingEnv, ScriptedClient, make_agent
from tests.unit.batch_gen.parts import RL
from tests.unit.run.test_run import SMALL, Letter

TEMPLATE = ByteTemplate(tool_parser=HermesToolParser())
WITH_SPANS = replace(RL, message_spans=True)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def play(**settings: Any) -> Rollout:
    """A call of a tool and two actions."""
    call = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 40, 'b': 2}})}</tool_call>"
    replies = [call, "<a>inc</a>", "<a>inc</a>"]
    agent = make_agent(ScriptedClient(replies), cls=ReActAgent, tools=[add]) if settings.pop("tools", True) else None
    protocol = SingleAgentProtocol(agent or make_agent(ScriptedClient(replies[1:])))
    (rollout,) = await protocol.run(env=CountingEnv(2), max_steps=6, env_seed=1, sampling_seed=2, **settings)
    return rollout


def stitched(rollout: Rollout) -> SAWItem:
    (item,) = stitch_rollout(rollout, ConstantCredit(1.0).compute([rollout]))
    return item


def texts(item: SAWItem, mask: Any) -> list[str]:
    """The texts of consecutive tokens under a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [TEMPLATE.decode(item.input_ids[a:b]) for a, b in edges.reshape(-1, 2)]


async def test_every_token_of_a_sample_knows_its_message_and_the_rollout_keeps_it():
    rollout = await play(inference=WITH_SPANS)
    item = stitched(Rollout.from_json(rollout.to_json()))
    spans = item.attachments.message_spans
    assert [span.role for span in spans] == [
        "template",
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(item.input_ids)
    assert texts(item, item.text_mask(["tool"])) == ["42"]
    assert texts(item, item.text_mask(["assistant"])) == texts(item, item.action_mask)
    assert stitched(await play(inference=RL)).attachments.message_spans == (), "only if it is asked for"


async def test_imitation_of_chosen_roles_has_other_action_tokens():
    item = stitched(await play(inference=WITH_SPANS))
    batch = SAWBatch(items=[item])
    (both,) = train_on_roles(batch, roles=("assistant", "tool")).items
    assert texts(both, both.action_mask & ~item.action_mask) == ["42"]
    assert (both.action_mask & item.action_mask).sum() == item.action_mask.sum()
    assert both.actor_logps is None and both.weight == item.weight
    (last,) = train_on_messages(batch, choose=lambda span: span == item.attachments.message_spans[-1]).items
    assert texts(last, last.action_mask)[0].startswith("<a>inc</a>")
    assert not train_on_messages(batch, choose=lambda span: False).items
    (observed,) = observe_roles(batch, roles=("tool",)).items
    assert texts(observed, observed.observation_mask) == ["42"]
    assert observed.observation_mask.sum() < item.observation_mask.sum()


async def test_algorithms_take_roles_and_refuse_what_they_cannot_train_on():
    item = stitched(await play(inference=WITH_SPANS))
    for algorithm in (make_sft(train_on=("assistant", "tool")), make_rft(train_on="tool", min_reward=-9.0)):
        assert algorithm.needs_message_spans and algorithm.preprocess is not None
        (chosen,) = algorithm.preprocess(SAWBatch(items=[item])).items
        assert "42" in texts(chosen, chosen.action_mask)
    assert make_echo(train_on=("assistant", "tool")).needs_message_spans
    assert not make_sft().needs_message_spans
    with pytest.raises(ConfigError, match="no role 'tools'"):
        make_sft(train_on=("tools",))
    with pytest.raises(ConfigError, match="name assistant"):
        make_echo(train_on=("tool",))
    unknown = stitched(await play(inference=RL))
    with pytest.raises(ConfigError, match="message_spans=True"):
        train_on_roles(SAWBatch(items=[unknown]), roles=("tool",))


async def test_spans_of_stored_rollouts_are_found_by_the_template(tmp_path: Path):
    recorded = await play(inference=WITH_SPANS, tools=False)
    plain = await play(inference=RL, tools=False)
    found = with_message_spans(plain, TEMPLATE)
    assert [s.trace.message_spans for s in found.agent_steps] == [s.trace.message_spans for s in recorded.agent_steps]
    assert with_message_spans(recorded, TEMPLATE) is recorded
    save_rollouts([plain], tmp_path / "plain.jsonl")
    source = OfflineBatchSource(tmp_path / "plain.jsonl", credit_assigner=ConstantCredit(1.0), spans_by=TEMPLATE)
    (item,) = (await source.next_batch()).items
    assert item.attachments.message_spans == stitched(recorded).attachments.message_spans
    with pytest.raises(ConfigError, match="was shown tools"):
        with_message_spans(await play(inference=RL), TEMPLATE)


async def test_rendered_items_know_their_messages():
    rollout = await play(inference=RL, tools=False)
    to_item = make_chat_template_step_to_item(chat_template=TEMPLATE, with_spans=True)
    item = to_item(rollout, rollout.agent_steps[-1], 1.0)
    (chosen,) = train_on_roles(SAWBatch(items=[item]), roles=("assistant",)).items
    # Both replies, the earlier of which is a message of the prompt; both with their closing.
    assert texts(chosen, chosen.action_mask) == ["<a>inc</a>\n"] * 2


async def test_spans_travel_through_the_queue():
    item = stitched(await play(inference=WITH_SPANS))
    plain = stitched(await play(inference=RL))
    back = decode_group(encode_group([item, plain]))
    assert [i.attachments.message_spans for i in back] == [item.attachments.message_spans, ()]
    spans = item.attachments.message_spans
    gap = replace(item, attachments=replace(item.attachments, message_spans=spans[1:]))
    with pytest.raises(UnreadableGroup, match="cover"):
        decode_group(encode_group([gap]))
    with pytest.raises(ValueError, match="cover 2 tokens"):
        TokenTrace([1, 2], [3], message_spans=[MessageSpan(0, "user", 0, 1, 0, 1)])


def test_a_run_trains_on_the_texts_of_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The prompts of stored episodes are learned, which sft alone leaves out."""
    monkeypatch.chdir(tmp_path)
    small = {**SMALL, "env": Letter, "rollouts_per_update": 16}
    with build(**{**small, "name": "played"}) as run:
        run.train(steps=1)
    (file,) = Path("runs/played/rollouts").iterdir()
    lengths = {}
    for name, roles in {"replies": (), "prompts": ("assistant,user",)}.items():
        with build(**{**small, "algo": "sft", "rollouts": (file,), "train_on": roles, "name": name}) as run:
            run.train(steps=1)
        (row,) = [row for row in read_metrics(Path(f"runs/{name}/metrics.jsonl")) if "train/loss" in row]
        lengths[name] = row["train/num_action_tokens"]
    assert lengths == {"replies": 16, "prompts": 32}, "a letter each"
    with (
        pytest.raises(ConfigError, match="grpo learns from sampled tokens alone"),
        build(**{**small, "train_on": ("tool",)}) as run,
    ):
        run.train(steps=1)
