"""Groups that are well-formed and make no sense, before a real Trainer: each is set aside with its reason, and training goes on.

The form of messages is tested in test_wire_fuzz.py. Here a valid group is written in the wire format, one or more of its values are
replaced by extreme ones, and the group goes through a real queue between good groups. What has to hold: the learner lives, every
good group is trained on exactly once, and the account is balanced.
"""

import asyncio
import logging
import math
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
import torch

from ludic.models.loading import tiny_llama
from ludic.training import Trainer, TrainerConfig
from ludic.training.algorithms import RLAlgorithm, make_grpo, make_ppo, make_rft
from ludic.training.losses import CorrectedLoss, SequenceMask, TokenMask
from ludic.training.sample_check import TrainableSamples, positions_of, vocabulary_of
from ludic.types import ActorTokenLogps, CandidateSets, SampleAttachments, SampleOrigin, SAWItem, VersionRun
from ludic_pipeline.queue import PipelineBatchSource
from ludic_pipeline.queue.queue import ExperienceQueue
from ludic_pipeline.queue.reader import DeadLetters, _in_one_line
from ludic_pipeline.queue.wire import encode_group, group_facts
from plugins.pipeline.tests.queue_parts import SHORT, Packed, crash, let_lease_run_out, push_many, raw_client
from tests.fuzz import Fuzz

pytestmark = pytest.mark.slow

VOCAB, MAX_LENGTH = 32, 48
HEADER = 7
ROUND = 24
"""Poison groups in one queue, with as many good ones between them."""
_numbers = count()


def corrected_grpo() -> RLAlgorithm:
    """As `ludic train --engine pipeline` has it."""
    grpo = make_grpo(group_size=2)
    loss = CorrectedLoss(grpo.loss, [TokenMask(0.125, 8.0), SequenceMask(0.5, 2.0)])
    return RLAlgorithm(name="grpo", credit_assigner=grpo.credit_assigner, loss=loss, preprocess=grpo.preprocess)


ALGORITHMS: dict[str, Callable[[], RLAlgorithm]] = {
    "grpo": lambda: make_grpo(group_size=2),
    "corrected_grpo": corrected_grpo,
    "rft": make_rft,
    "ppo": make_ppo,
}


# --- groups ---


def good_item(name: str, rng: Random, *, length: int = 10, version: int = 0) -> SAWItem:
    mask = np.zeros(length, dtype=np.bool_)
    mask[3:] = True
    num_actions = int(mask.sum())
    ids = np.array([rng.randrange(VOCAB) for _ in range(length)], dtype=np.int32)
    rewards = np.zeros(num_actions, dtype=np.float32)
    rewards[-1:] = 1.0
    return SAWItem(
        ids,
        None,
        mask,
        rng.choice([-1.0, 1.0]),
        {},
        SampleAttachments(
            actor_logps=ActorTokenLogps(np.full(num_actions, -math.log(VOCAB), dtype=np.float32)),
            token_rewards=rewards,
            temperature=1.0,
            version_runs=(VersionRun(version, num_actions),),
        ),
        SampleOrigin(rollout_id=name, group_id=name[:-1], total_reward=1.0, num_parse_errors=0),
    )


def good_group(name: str, rng: Random) -> list[SAWItem]:
    return [good_item(f"{name}{index}", rng) for index in range(2)]


def odd_group(name: str, rng: Random) -> list[SAWItem]:
    """Valid for the constructors, with masks, lengths and attachments that rollouts seldom or never have."""
    items = []
    for index in range(rng.choice([1, 2, 2, 5])):
        item = good_item(f"{name}{index}", rng, length=rng.choice([0, 1, 4, 10, 10, 10, MAX_LENGTH, 200]))
        length = len(item.input_ids)
        action = rng.choice([item.action_mask] * 6 + [np.ones(length, bool), np.zeros(length, bool)])
        attention = rng.choice([None] * 6 + [np.array([rng.random() < 0.7 for _ in range(length)], dtype=np.bool_)])
        num_actions = int(action.sum())
        arrays = {
            what: np.full(num_actions, rng.choice([0.5, 1.0, 1e9, 3e38]), dtype=np.float32)
            for what in FLOAT_COLUMNS[1:]
            if rng.random() < 0.2
        }
        has_supports = rng.random() < 0.1
        attached = SampleAttachments(
            actor_logps=ActorTokenLogps(np.full(num_actions, -3.0, np.float32)) if rng.random() < 0.8 else None,
            temperature=rng.choice([None, 0.0, 0.7, 1.0]),
            untrainable_sampling=rng.choice([None] * 8 + ["top_p=0.9"]),
            candidates=CandidateSets.of([[int(own), 3] for own in item.input_ids[action]]) if has_supports else None,
            version_runs=(VersionRun(0, num_actions),) if rng.random() < 0.8 else (),
            **arrays,
        )
        items.append(SAWItem(item.input_ids, attention, action, item.weight, item.meta, attached, item.origin))
    return items


# --- extreme values, in the wire format ---

FLOATS = [
    math.nan, math.inf, -math.inf, 1e300, -1e300, 3e38, -3e38, 1e10, 1e9, 1e-300, 5e-324, 0.0, -0.0, 1.0, 20.0, -1e5,
]  # fmt: skip
INTS = [-1, -(2**31), VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1]
VERSIONS = [-1, -(2**63), 2**63 - 1, 10**14, 10**15, 1, 5, 6, 100]
META_KEYS = ["result", "request_meta", "total_reward", "objective", "finish_reason"]
ORIGIN_FIELDS = [each.name for each in dataclass_fields(SampleOrigin)]
META_VALUES = [
    None, "text", "", math.nan, math.inf, -math.inf, -1, 0, 2**63, 1e308, -1e300, True, [], [1, 2], {}, {"a": [1]}, "nan",
    "train/parse_error", "x" * 5000, {"objective": []}, "\ud7ff\n\x00",
]  # fmt: skip
FLOAT_COLUMNS = (
    "actor_logps", "token_weights", "token_rewards", "token_values", "token_returns", "teacher_logps", "token_turns",
)  # fmt: skip


@dataclass
class Poison:
    """A group with something wrong, or at least odd, in it."""

    payload: bytes
    num_items: int
    version: int | None
    what: list[str] = field(default_factory=list)


def poison(name: str, rng: Random) -> Poison:
    items = odd_group(name, rng) if rng.random() < 0.4 else good_group(name, rng)
    message, facts = encode_group(items), group_facts(items)
    fields = msgspec.msgpack.decode(message[HEADER:])
    what = [change(fields, rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    version = facts.oldest_version
    versions = fields["columns"].get("version_runs", {}).get("versions", b"")
    if versions and rng.random() < 0.9:  # mostly the entry agrees with the payload
        oldest = min(struct.unpack(f"<{len(versions) // 8}q", versions))
        version = oldest if 0 <= oldest < 10**15 else None
    return Poison(message[:HEADER] + msgspec.msgpack.encode(fields), facts.num_items, version, what)


def change(fields: dict[str, Any], rng: Random) -> str:
    """Replace one value, and say which."""
    own = fields["columns"]
    match rng.randrange(9):
        case 0:
            return overwritten(fields, "weights", "d", rng.choice(FLOATS), rng)
        case 1:
            fields["ids"] = (
                np.frombuffer(fields["ids"], dtype="<u2" if fields["id_bytes"] == 2 else "<i4").astype("<i4").tobytes()
            )
            fields["id_bytes"] = 4
            return overwritten(fields, "ids", "i", rng.choice(INTS), rng)
        case 2 if own.get("temperature"):
            own["temperature"] = list(own["temperature"])
            own["temperature"][rng.randrange(len(own["temperature"]))] = value = rng.choice(FLOATS)
            return f"temperature={value}"
        case 3 if own.get("version_runs"):
            return "version " + overwritten(own["version_runs"], "versions", "q", rng.choice(VERSIONS), rng)
        case 4:
            gone = rng.choice(["actor_logps", "token_rewards", "temperature", "version_runs"])
            own.pop(gone, None)
            return f"no {gone}"
        case 5 | 6:
            columns = [column for column in FLOAT_COLUMNS if column in own]
            if not columns:
                return "nothing"
            name = rng.choice(columns)
            value = rng.choice(FLOATS)
            narrow = (
                float(np.float32(value))
                if abs(value) < 3.4e38 or not math.isfinite(value)
                else math.copysign(math.inf, value)
            )
            return f"{name}: " + overwritten(own[name], "values", "f", narrow, rng)
        case 7:
            origins = msgspec.msgpack.decode(fields["origins"])
            name, value = rng.choice(ORIGIN_FIELDS), rng.choice(META_VALUES)
            num_items = len(fields["lengths"]) // 4
            origins[name] = [value] * num_items if rng.random() < 0.8 else value
            fields["origins"] = msgspec.msgpack.encode(origins)
            return f"origin {name}={value!r:.40}"
        case _:
            metas = msgspec.msgpack.decode(fields["metas"])
            key, value = rng.choice(META_KEYS), rng.choice(META_VALUES)
            for meta in metas if rng.random() < 0.5 else metas[:1]:
                meta[key] = value
            fields["metas"] = msgspec.msgpack.encode(metas)
            return f"meta {key}={value!r:.40}"


def overwritten(fields: dict[str, Any], name: str, code: str, value: float, rng: Random) -> str:
    data, size = bytearray(fields[name]), struct.calcsize(f"<{code}")
    if len(data) < size:
        return f"{name} is empty"
    struct.pack_into(f"<{code}", data, size * rng.randrange(len(data) // size), value)
    fields[name] = bytes(data)
    return f"{name}={value}"


# --- the learner ---


class RecordingSource(PipelineBatchSource):
    """Remembers the rollouts that it handed out."""

    handed_out: list[str]

    async def next_batch(self):
        batch = await super().next_batch()
        names = [item.origin.rollout_id for item in batch.items]
        self.handed_out = [*getattr(self, "handed_out", []), *(name for name in names if name is not None)]
        return batch


def make_trainer(source: PipelineBatchSource, algorithm: str = "grpo") -> Trainer:
    return Trainer(
        model=tiny_llama(VOCAB, width=16, layers=1, max_length=64, seed=0),
        algo=ALGORITHMS[algorithm](),
        batch_source=source,
        cfg=TrainerConfig(lr=1e-4, max_seq_len=MAX_LENGTH, micro_token_budget=256, max_empty_batches=1000),
    )


async def push(queue: ExperienceQueue, poisons: list[Poison]) -> None:
    start = next(_numbers) * 100_000 + 1
    groups = [Packed(start + i, p.num_items, p.version, p.payload) for i, p in enumerate(poisons)]
    assert await push_many(queue, groups) == len(groups)


def as_good(name: str, rng: Random) -> Poison:
    items = good_group(name, rng)
    return Poison(encode_group(items), *group_facts(items))


async def train_through(
    url: str, key: str, bad: list[Poison], rng: Random, algorithm: str, where: str = ""
) -> dict[str, int]:
    """Train until all good groups between the bad ones are trained on; reason → how many groups were set aside for it."""
    good = [as_good(f"good-{index}-", rng) for index in range(max(len(bad), 2))]
    mixed = [group for pair in zip(bad, good, strict=False) for group in pair] + good[len(bad) :]
    rng.shuffle(mixed)
    wanted = {f"good-{index}-{number}" for index in range(len(good)) for number in range(2)}
    async with ExperienceQueue(url, key) as queue:
        await push(queue, [*mixed, *(as_good(f"last-{index}-", rng) for index in range(4))])
        source = RecordingSource(url, key, batch_size=4, max_lag=1000, acknowledge="trained")
        async with source:
            trainer = make_trainer(source, algorithm)
            while not any(name.startswith("last-") for name in getattr(source, "handed_out", [])):
                try:
                    async with asyncio.timeout(60):
                        await trainer.train_step()
                except Exception as error:
                    since = getattr(source, "handed_out", [])[-20:]
                    held = [poison.what for poison in bad]
                    raise AssertionError(f"{where}: the learner died of {error!r} after {since}; {held}") from error
        trained = [name for name in source.handed_out if name in wanted]
        assert sorted(trained) == sorted(wanted), f"{where}: each good sample once"
        counts = await queue.counts()
        assert counts.balance == 0, f"{where}: {source.stats().identity()}"
        assert counts.num_foreign == 0, where
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters()), where
    with raw_client_of(url) as client:
        letters = [fields for _, fields in client.xrange(f"{{{key}}}:dead")]
    assert sum(int(letter[b"items"]) for letter in letters) == counts.dead, where
    reasons = [letter[b"reason"].decode() for letter in letters]
    assert all(reasons), where
    return {reason: reasons.count(reason) for reason in reasons}


def raw_client_of(url: str):
    return redis.Redis.from_url(url)


# --- by name ---


def with_items(change_item: Callable[[SAWItem], SAWItem]) -> Poison:
    items = [change_item(item) for item in good_group("bad-", Random(0))]
    return Poison(encode_group(items), *group_facts(items))


def attached(**changes: Any) -> Poison:
    return with_items(lambda item: replace(item, attachments=replace(item.attachments, **changes)))


def replaced(**changes: Any) -> Poison:
    return with_items(lambda item: replace(item, **changes))


def meta(**changes: Any) -> Poison:
    return with_items(lambda item: replace(item, meta={**item.meta, **changes}))


def origin(**columns: Any) -> Poison:
    """The same in both items, whatever its type."""
    fields = msgspec.msgpack.decode((message := as_good("bad-", Random(0)).payload)[HEADER:])
    told = msgspec.msgpack.decode(fields["origins"]) | {name: [value] * 2 for name, value in columns.items()}
    return Poison(message[:HEADER] + msgspec.msgpack.encode({**fields, "origins": msgspec.msgpack.encode(told)}), 2, 0)


def logps(value: float) -> ActorTokenLogps:
    return ActorTokenLogps(np.full(7, value, dtype=np.float32))


def on_the_wire(name: str, code: str, value: float, *, column: str | None = None) -> Poison:
    fields = msgspec.msgpack.decode((message := as_good("bad-", Random(0)).payload)[HEADER:])
    overwritten(fields if column is None else fields["columns"][column], name, code, value, Random(0))
    return Poison(message[:HEADER] + msgspec.msgpack.encode(fields), 2, 0)


POISONS: dict[str, tuple[Callable[[], Poison], str]] = {
    "a log-prob that is no number": (lambda: attached(actor_logps=logps(math.nan)), "log-probs that are not finite"),
    "a log-prob of minus infinity": (lambda: attached(actor_logps=logps(-math.inf)), "log-probs that are not finite"),
    "log-probs above zero": (lambda: attached(actor_logps=logps(3.0)), "at most 0"),
    "no log-probs": (lambda: attached(actor_logps=None), "no actor log-probs"),
    "a weight of 1e300": (lambda: replaced(weight=1e300), "as large as 1e\\+300"),
    "a weight that is no number": (lambda: on_the_wire("weights", "d", math.nan), "not finite"),
    "an infinite advantage": (lambda: on_the_wire("weights", "d", math.inf), "not finite"),
    "token weights of 3e38": (lambda: attached(token_weights=np.full(7, 3e38, np.float32)), "token_weights"),
    "a temperature of 1e-300": (lambda: attached(temperature=1e-300), "temperature 1e-300"),
    "a temperature of 1e300": (lambda: attached(temperature=1e300), "temperature 1e\\+300"),
    "an id outside the vocabulary": (lambda: replaced(input_ids=np.full(10, VOCAB, np.int32)), f"the model has {VOCAB} tokens"),
    "a negative id": (lambda: on_the_wire("ids", "h", -1), "the model has 32 tokens"),
    "a sample that is too long": (lambda: with_items(lambda item: good_item("long", Random(0), length=60)), "max_seq_len=48"),
    "an action without a prompt": (lambda: replaced(action_mask=[1, 0, 0] + [1] * 6 + [0]), "no token before it"),
    "actions that attention masks out": (lambda: replaced(attention_mask=[1] * 9 + [0]), "masks out action tokens"),
    "text as a reward": (lambda: origin(total_reward="a lot"), "got `str` - at `\\$.total_reward"),
    "a reward that is no number": (lambda: origin(total_reward=math.nan), "a reward is a finite number"),
    "a reward of a turn without an end": (lambda: origin(reward=math.inf), "earned inf"),
    "a list as the rollout": (lambda: origin(rollout_id=[1]), "got `array` - at `\\$.rollout_id"),
    "a list as the objective": (lambda: origin(objective=[1]), "got `array` - at `\\$.objective"),
    "a group of too long a name": (lambda: origin(group_id="x" * 1025), "length <= 1024"),
    "an end that there is not": (lambda: origin(stop="bored"), "Invalid enum value 'bored'"),
    "text as a number of errors": (lambda: origin(num_parse_errors="two"), "got `str` - at `\\$.num_parse_errors"),
    "a result that looks like a metric": (lambda: meta(result="train/parse_error"), "taken for a metric"),
    "settings that cannot be repeated": (lambda: attached(untrainable_sampling="top_p=0.9"), "top_p=0.9"),
    "a candidate outside the vocabulary": (
        lambda: with_items(
            lambda item: SAWItem(
                item.input_ids, None, item.action_mask, 1.0, item.meta,
                SampleAttachments(
                    actor_logps=logps(-3.0),
                    candidates=CandidateSets.of([[int(own), 900] for own in item.input_ids[item.action_mask]]),
                    version_runs=item.attachments.version_runs,
                ),
                item.origin,
            )
        ),
        "or a candidate of one",
    ),
    "another number of samples than it says": (lambda: Poison(as_good("bad-", Random(0)).payload, 7, 0), "says 7 items"),
    "another version than it says": (lambda: Poison(as_good("bad-", Random(0)).payload, 2, 3), "from version 3"),
    "a negative version": (lambda: on_the_wire("versions", "q", -5, column="version_runs"), "from -5"),
}  # fmt: skip


@pytest.fixture
def key() -> str:
    return f"poison-{next(_numbers)}"


async def test_each_kind_of_poison_is_set_aside_with_its_reason(shared_redis, key):
    """All kinds in one queue, before one Trainer; each reason names what is wrong."""
    bad = [make() for make, _ in POISONS.values()]
    reasons = await train_through(shared_redis.url, key, bad, Random(1), "grpo")
    assert sum(reasons.values()) == len(POISONS)
    unnamed = [name for name, (_, reason) in POISONS.items() if not any(re.search(reason, found) for found in reasons)]
    assert not unnamed, reasons


async def test_a_group_without_log_probs_is_trained_on_where_the_algorithm_needs_none(shared_redis, key):
    bad = attached(actor_logps=None)
    assert (
        await train_through(shared_redis.url, key, [bad, attached(actor_logps=logps(math.nan))], Random(0), "rft") == {}
    )


async def test_groups_that_cannot_be_trained_on_together_are_trained_on_one_after_the_other(shared_redis, key):
    """Two groups that say they are the same part of the same rollout: a critic would count its rewards twice."""
    twins = [with_items(lambda item: item.with_origin(segment=int(item.origin.rollout_id[-1])))] * 6
    assert await train_through(shared_redis.url, key, twins, Random(0), "ppo") == {}


def test_a_reason_is_one_printable_line(caplog):
    error = ValueError("a name\n2026-01-01 INFO forged \x1b[31m" + "x" * 5000)
    assert (
        _in_one_line(error).startswith("ValueError: a name 2026-01-01 INFO forged  [31mxxx")
        and len(_in_one_line(error)) == 500
    )


def test_the_check_knows_a_models_vocabulary_and_its_learned_positions():
    from transformers import GPT2Config, GPT2LMHeadModel

    learned = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=17, n_embd=8, n_layer=1, n_head=1))
    assert (vocabulary_of(learned), positions_of(learned)) == (40, 17)
    rotary = tiny_llama(VOCAB, width=16, layers=1, max_length=64, seed=0)
    assert (vocabulary_of(rotary), positions_of(rotary)) == (VOCAB, None)
    without_head = SimpleNamespace(get_input_embeddings=learned.get_input_embeddings)
    assert vocabulary_of(without_head) == 40
    check = TrainableSamples(make_grpo(group_size=2), TrainerConfig(max_seq_len=64), learned)
    check([good_item("a", Random(0), length=17)])
    with pytest.raises(ValueError, match="has 17 positions"):
        check([good_item("a", Random(0), length=18)])


def test_each_kind_is_warned_of_once_and_again_ten_times_as_many_later(caplog):
    caplog.set_level(logging.WARNING)
    letters = DeadLetters()
    for number in range(250):
        letters.add({f"temperature {number / 7}e-9": 1, "no log-probs": 2})
    said = [record.getMessage().split(" of this kind")[0] for record in caplog.records]
    assert said == ["1 group", "2 groups", "10 groups", "10 groups", "100 groups", "100 groups"]
    assert letters.summary().startswith("750 groups could not be trained on: 500 × no log-probs; 250 × temperature #")
    assert DeadLetters().summary() is None


# --- by chance ---


async def test_extreme_values_drop_only_their_own_group(shared_redis, fuzz: Fuzz):
    num_cases, reasons = fuzz.cases(4 * ROUND, least=4 * ROUND), 0
    for start in range(0, num_cases, ROUND):
        cases = range(start, min(start + ROUND, num_cases))
        bad = [poison(f"bad-{case}-", fuzz.rng(case)) for case in cases]
        algorithm = list(ALGORITHMS)[start // ROUND % len(ALGORITHMS)]
        where = f"{algorithm}, one of the {len(bad)} cases before {fuzz.at(cases[-1])}"
        found = await train_through(
            shared_redis.url, f"fuzz-{next(_numbers)}", bad, fuzz.rng(-1 - start), algorithm, where
        )
        reasons += sum(found.values())
    assert reasons >= num_cases / 8, "the cases are poison"


# --- the second line: what passes every check, and still ends a learner ---


class Killed(Exception):
    """In the place of a kill."""


async def fatal_life(url: str, key: str, *, how: str, **settings: Any) -> list[str]:
    """One life of a learner that dies in its update if the batch has the fatal sample; what it was given, in order."""
    source = RecordingSource(url, key, lease_times=SHORT, **{"batch_size": 2, **settings})
    try:
        async with source:
            for step in count(1):
                async with asyncio.timeout(20):
                    batch = await source.next_batch()
                if any(str(item.origin.rollout_id).startswith("fatal") for item in batch.items):
                    if how == "kill":
                        await crash(source)
                        source._is_closed = True
                    raise Killed
                source.notify_trained(step, len(batch.items))
                if "last-" in source.handed_out[-1]:
                    return source.handed_out
    except Killed:
        pass
    return source.handed_out


@pytest.mark.parametrize("how", ["raise", "kill"])
async def test_a_group_on_which_three_learners_died_becomes_a_dead_letter(shared_redis, key, how):
    """Whether the update raises or the process is killed. The good groups before and after it are trained on once."""
    rng = Random(0)
    async with ExperienceQueue(shared_redis.url, key) as queue:
        await push(
            queue, [as_good("first-", rng), as_good("fatal-", rng), as_good("second-", rng), as_good("last-", rng)]
        )
        lives = []
        for _ in range(4):
            lives.append(await fatal_life(shared_redis.url, key, how=how, acknowledge="trained"))
            let_lease_run_out(shared_redis, key)
        assert [life[-1] for life in lives] == ["fatal-1", "fatal-1", "fatal-1", "last-1"]
        assert lives[0] == ["first-0", "first-1", "fatal-0", "fatal-1"]
        assert lives[3] == ["second-0", "second-1", "last-0", "last-1"]
        counts = await queue.counts()
    assert (counts.balance, counts.dead, counts.trained) == (0, 2, 6)
    with raw_client(shared_redis) as client:
        [(_, letter)] = client.xrange(f"{{{key}}}:dead")
        assert b"was being trained on when a learner died, 3 times" in letter[b"reason"]
        assert not client.exists(f"{{{key}}}:tries"), "nothing is left of the count"


@pytest.mark.parametrize("place", range(3))
async def test_groups_beside_one_that_kills_its_learner_are_trained_on_once(shared_redis, key, place):
    """Two learners die of the whole batch; then each of its groups is tried alone."""
    names = ["good-", "fine-"]
    names.insert(place, "fatal-")
    settings = {"batch_size": 6, "acknowledge": "trained"}
    async with ExperienceQueue(shared_redis.url, key) as queue:
        await push(queue, [as_good(name, Random(0)) for name in [*names, "last-", "last-", "last-"]])
        trained: list[str] = []
        for _ in range(4):
            life = await fatal_life(shared_redis.url, key, how="kill", **settings)
            trained += [name for name in life if name[:5] in ("good-", "fine-")]
            let_lease_run_out(shared_redis, key)
        assert life[-1] == "last-1"
        counts = await queue.counts()
    assert (counts.balance, counts.dead, counts.trained) == (0, 2, 10)
    assert Counter(trained[-4:]) == {"good-0": 1, "good-1": 1, "fine-0": 1, "fine-1": 1}


async def test_the_count_of_deaths_goes_with_a_group_to_another_learner(shared_redis, key):
    """A run of two ranks of which rank 1 dies twice is resumed with one rank: its group has one try left."""
    async with ExperienceQueue(shared_redis.url, key) as queue:
        await push(queue, [as_good("fatal-", Random(0)), as_good("last-", Random(0))])
        for _ in range(2):
            two = {"rank": 1, "world_size": 2}
            assert (await fatal_life(shared_redis.url, key, how="kill", **two))[-1] == "fatal-1"
            let_lease_run_out(shared_redis, key, "learner-1")
        assert (await fatal_life(shared_redis.url, key, how="kill", acknowledge="trained"))[-1] == "fatal-1"
        let_lease_run_out(shared_redis, key)
        assert await fatal_life(shared_redis.url, key, how="kill", acknowledge="trained") == ["last-0", "last-1"]
        counts = await queue.counts()
    assert (counts.balance, counts.dead, counts.trained) == (0, 2, 2)


async def test_only_the_update_that_was_under_way_counts_against_a_group(shared_redis, key):
    """What was trained on since the last checkpoint comes again after every crash, and is not suspected."""
    async with ExperienceQueue(shared_redis.url, key) as queue:
        await push(queue, [as_good(f"good-{index}-", Random(0)) for index in range(3)])
        for _ in range(6):
            source = RecordingSource(
                shared_redis.url, key, batch_size=2, lease_times=SHORT
            )  # acknowledges what is saved
            for step in (1, 2):
                await source.next_batch()
                source.notify_trained(step, 2)
            await source.next_batch()
            source.notify_trained(3, 2)
            source._beat(sync_call(shared_redis, source))  # the heartbeat, which the crash would otherwise outrun
            assert len(source.handed_out) == 6
            await crash(source)
            let_lease_run_out(shared_redis, key)
        assert (await queue.counts()).dead == 0


def sync_call(server, source):
    client = raw_client(server)
    return lambda script, args: client.register_script(script)(keys=source._queue.keys.all, args=args)


@pytest.mark.parametrize("leave", ["close", "cancel"])
async def test_a_clean_stop_does_not_count_as_a_failed_try(shared_redis, key, leave):
    async with ExperienceQueue(shared_redis.url, key) as queue:
        await push(queue, [as_good("good-", Random(0))])
        for _ in range(5):
            async with RecordingSource(shared_redis.url, key, batch_size=2) as source:
                await source.next_batch()
                if leave == "cancel":
                    waiting = asyncio.create_task(source.next_batch())
                    await asyncio.sleep(0)
                    waiting.cancel()
        assert (await queue.counts()).dead == 0
