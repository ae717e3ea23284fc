"""Samples get their teacher's log-probs, token by token, and everything else about a source stays as it was."""

import asyncio

import numpy as np
import pytest

from ludic.batch_gen import (
    DomainTeachers,
    MixedBatchSource,
    MixedPart,
    PrivilegedTeacher,
    TeacherAnnotatedBatchSource,
    hint_first,
)
from ludic.batch_gen.sources.teachers import domain_of
from ludic.inference import ByteTemplate
from ludic.types import (
    AccountsForItems,
    ConfigError,
    FollowsVersions,
    SampleAttachments,
    SAWBatch,
    SAWItem,
    Stateful,
    TeacherScorer,
    UnknownName,
)
from tests.origins import meta_and_origin
from tests.unit.batch_gen.numbered import Numbered


class CountingTeacher:
    """Says −(position of the token) − (its id)/100 of a token, over the temperature."""

    def __init__(self, fingerprint="bytes", shift=0.0):
        self.tokenizer_fingerprint = fingerprint
        self.shift = shift
        self.num_running = self.most_running = 0
        self.temperatures = []

    async def score_tokens(self, prompt_token_ids, completion_token_ids, *, temperature=1.0):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.temperatures.append(temperature)
        await asyncio.sleep(0)
        self.num_running -= 1
        positions = len(prompt_token_ids) + np.arange(len(completion_token_ids))
        return -(positions + np.asarray(completion_token_ids) / 100) / temperature + self.shift


class Given:
    """Hands out the same samples, and notes what it is told."""

    def __init__(self, *items):
        self.items, self.position, self.heard = list(items), 0, []

    async def next_batch(self):
        self.position += 1
        return SAWBatch(items=list(self.items), meta={"source": "given"})

    def notify_version(self, version):
        self.heard.append(("version", version))

    def notify_trained(self, step, num_items):
        self.heard.append(("trained", step, num_items))

    def notify_saved(self, step):
        self.heard.append(("saved", step))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Plain:
    """Nothing but batches."""

    async def next_batch(self):
        return SAWBatch(items=[])


def sample(ids, mask, temperature=None, **facts):
    attached = SampleAttachments(temperature=temperature)
    return SAWItem(ids, None, mask, 1.0, attachments=attached, **meta_and_origin(**facts))


def annotating(inner, teacher=None, chunk=None, fingerprint="bytes"):
    return TeacherAnnotatedBatchSource(inner, teacher or CountingTeacher(), chunk, tokenizer_fingerprint=fingerprint)


async def test_every_action_token_gets_the_log_prob_at_its_own_place():
    item = sample([10, 20, 30, 40, 50, 60], [0, 1, 1, 0, 1, 0])
    batch = await annotating(Given(item)).next_batch()
    (seen,) = batch.items
    assert seen.attachments.teacher_logps.tolist() == pytest.approx([-1.2, -2.3, -4.5])
    assert seen.input_ids is item.input_ids and seen.weight == 1.0
    assert batch.meta["source"] == "given" and batch.meta["teacher_s"] >= 0
    assert item.attachments.teacher_logps is None


async def test_padding_is_not_scored_and_shifts_nothing():
    padded = SAWItem([0, 0, 10, 20, 30, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0], 1.0)
    (seen,) = (await annotating(Given(padded)).next_batch()).items
    assert seen.attachments.teacher_logps.tolist() == pytest.approx([-1.2, -2.3])


async def test_tokens_are_scored_at_the_temperature_that_sampled_them():
    teacher = CountingTeacher()
    items = [sample([1, 2], [0, 1], temperature=t) for t in (None, 0.5, 1.0)]
    batch = await annotating(Given(*items), teacher).next_batch()
    assert teacher.temperatures == [1.0, 0.5, 1.0]
    logps = [item.attachments.teacher_logps.tolist() for item in batch.items]
    assert logps == [pytest.approx([-1.02]), pytest.approx([-2.04]), pytest.approx([-1.02])]


@pytest.mark.parametrize(("chunk", "most"), [(None, 5), (2, 2), (1, 1)])
async def test_no_more_samples_are_scored_at_once_than_asked(chunk, most):
    teacher = CountingTeacher()
    items = [sample([1, number], [0, 1]) for number in range(5)]
    batch = await annotating(Given(*items), teacher, chunk).next_batch()
    assert teacher.most_running == most
    ids = [item.input_ids[1] for item in batch.items]
    assert ids == [0, 1, 2, 3, 4], "the order stays"


# --- tokenizers and domains ---


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_is_played():
    with pytest.raises(ConfigError, match="another tokenizer"):
        annotating(Given(), CountingTeacher("others"))
    both = DomainTeachers({"math": CountingTeacher(), "code": CountingTeacher("others")})
    with pytest.raises(ConfigError, match="'code' has another tokenizer"):
        annotating(Given(), both)


async def test_each_domain_asks_its_own_teacher():
    teachers = DomainTeachers({"math": CountingTeacher(), "code": CountingTeacher(shift=-100.0)})
    items = [
        sample([1, 0], [0, 1], domain="code", env_name="math"),
        sample([1, 0], [0, 1], env_name="math"),
    ]
    batch = await annotating(Given(*items), teachers).next_batch()
    assert [item.attachments.teacher_logps[0] for item in batch.items] == [-101.0, -1.0]


async def test_a_domain_without_a_teacher_is_named():
    teachers = DomainTeachers({"math": CountingTeacher()})
    with pytest.raises(UnknownName, match="'maths'.*Did you mean 'math'"):
        await annotating(Given(sample([1, 0], [0, 1], env_name="maths")), teachers).next_batch()
    with pytest.raises(ConfigError, match="names neither a domain nor an env"):
        domain_of(sample([1, 0], [0, 1]))
    with pytest.raises(ConfigError, match="at least one"):
        DomainTeachers({})


# --- a teacher that is told more ---


async def test_a_privileged_teacher_scores_the_students_tokens_after_its_own_prompt():
    item = sample([10, 20, 30, 40, 50], [0, 0, 1, 0, 1], temperature=0.5)
    told = PrivilegedTeacher(CountingTeacher(), lambda item: [7, 7, 7, *item.input_ids[:2]])
    (seen,) = (await annotating(Given(item), told).next_batch()).items
    # The first action token is at position 5 for the teacher, and at 2 for the student.
    assert seen.attachments.teacher_logps.tolist() == pytest.approx([-5.3 / 0.5, -7.5 / 0.5])
    assert seen.input_ids.tolist() == [10, 20, 30, 40, 50], "what is trained on stays what the student saw"


def test_a_hint_is_a_system_message_before_what_the_student_saw():
    template = ByteTemplate()
    asked = template.apply([{"role": "user", "content": "q"}]).prompt_token_ids
    item = sample([*asked, 65], [0] * len(asked) + [1], request_meta={"hint": "It is A."})
    both = [{"role": "system", "content": "It is A."}, {"role": "user", "content": "q"}]
    expected = template.apply(both).prompt_token_ids.tolist()
    assert hint_first(template)(item).tolist() == expected
    own = hint_first(template, lambda item: "It is " + chr(item.input_ids[-1]) + ".")
    assert own(item).tolist() == expected


# --- what passes through ---


async def test_an_annotated_source_can_be_a_part_of_a_mixture_unless_the_source_inside_keeps_accounts():
    source = annotating(Numbered(2))
    assert not isinstance(source, AccountsForItems)
    batch = await MixedBatchSource([MixedPart(name="taught", source=source, share=1, objective="opd")]).next_batch()
    assert all(item.attachments.teacher_logps is not None for item in batch.items)
    with pytest.raises(ConfigError, match="must know which of its samples were trained on"):
        MixedPart(name="taught", source=annotating(Given()), share=1)


async def test_what_the_trainer_says_and_what_a_resume_needs_reach_the_inner_source():
    inner = Given()
    source = annotating(inner)
    assert all(isinstance(source, kind) for kind in (FollowsVersions, AccountsForItems, Stateful))
    await source.next_batch()
    source.notify_version(3)
    source.notify_trained(4, 2)
    source.notify_saved(4)
    assert inner.heard == [("version", 3), ("trained", 4, 2), ("saved", 4)]
    again = annotating(other := Given())
    again.load_state_dict(source.state_dict())
    assert other.position == 1


async def test_a_teacher_that_fails_fails_the_batch():
    class Broken(CountingTeacher):
        async def score_tokens(self, *tokens, temperature=1.0):
            raise ConnectionError("gone")

    assert isinstance(Broken(), TeacherScorer)
    with pytest.raises(ConnectionError, match="gone"):
        await annotating(Given(*[sample([1, 2], [0, 1])] * 3), Broken()).next_batch()
