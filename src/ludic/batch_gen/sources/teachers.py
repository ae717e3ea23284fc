"""Teachers for distillation: one for all samples, one per domain, or one with a privileged prompt.

`TeacherAnnotatedBatchSource` attaches a teacher's log-probs to every sample of another source. The algorithm decides how to use
them (`ludic.training.make_opd`). Inside an AsyncRolloutBatchSource, scoring overlaps with training.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ludic.inference import ChatTemplate
from ludic.tasks import all_or_none
from ludic.types import (
    AccountsForItems,
    BatchSource,
    ConfigError,
    LogprobArray,
    SAWBatch,
    SAWItem,
    TeacherScorer,
    TokenArray,
    TokenIds,
    UnknownName,
    token_array,
)
from ludic.types.interfaces import load_into, state_of, tell_version
from ludic.types.rollout import request_meta_in


@runtime_checkable
class Teachers(Protocol):
    """Chooses a teacher for each sample."""

    def teacher_for(self, item: SAWItem) -> TeacherScorer: ...

    def require_tokenizer(self, fingerprint: str) -> None:
        """Raise ConfigError if a teacher's tokenizer differs from the student's."""
        ...


@dataclass(frozen=True, slots=True)
class _OneTeacher:
    """The same for every sample."""

    teacher: TeacherScorer

    def teacher_for(self, item: SAWItem) -> TeacherScorer:
        return self.teacher

    def require_tokenizer(self, fingerprint: str) -> None:
        _require_same_tokenizer("teacher", self.teacher, fingerprint)


def _require_same_tokenizer(name: str, teacher: TeacherScorer, fingerprint: str) -> None:
    """Raise ConfigError if the teacher `name` has another tokenizer."""
    if teacher.tokenizer_fingerprint != fingerprint:
        raise ConfigError(
            f"The teacher {name!r} has another tokenizer ({teacher.tokenizer_fingerprint:.12}…) than the student "
            f"({fingerprint:.12}…): the same ids mean other texts. Take a teacher of the student's family."
        )


class TeacherAnnotatedBatchSource:
    """Attaches `teacher_logps` to every sample of `inner`; keeps all samples and everything else unchanged."""

    def __init__(
        self,
        inner: BatchSource,
        teacher_scorer: TeacherScorer | Teachers,
        teacher_chunk_size: int | None = None,
        *,
        tokenizer_fingerprint: str,
    ) -> None:
        """`tokenizer_fingerprint` is the student's (`ludic.inference.teachers`); the teacher's must be equal.

        `teacher_chunk_size` is how many samples are scored at a time; None: the whole batch.
        """
        if teacher_chunk_size is not None and teacher_chunk_size < 1:
            raise ConfigError(f"teacher_chunk_size={teacher_chunk_size}; it must be at least 1, or None for all.")
        self._inner = inner
        self._teachers = teacher_scorer if isinstance(teacher_scorer, Teachers) else _OneTeacher(teacher_scorer)
        self._teachers.require_tokenizer(tokenizer_fingerprint)
        self._chunk_size = teacher_chunk_size
        if isinstance(inner, AccountsForItems):
            # Set only here: with methods of the class, every annotated source would be an AccountsForItems, which a
            # mixture refuses.
            self.notify_trained = inner.notify_trained
            self.notify_saved = inner.notify_saved

    async def next_batch(self) -> SAWBatch:
        batch = await self._inner.next_batch()
        started = time.perf_counter()
        at_once = asyncio.Semaphore(self._chunk_size or max(len(batch), 1))

        async def annotated(item: SAWItem) -> SAWItem:
            async with at_once:
                logps = await _teacher_logps(item, self._teachers.teacher_for(item))
                return replace(item, attachments=replace(item.attachments, teacher_logps=logps))

        items = await all_or_none(annotated(item) for item in batch.items)
        return SAWBatch(items=items, meta={**batch.meta, "teacher_s": time.perf_counter() - started})

    get_next_batch = next_batch

    def notify_version(self, version: int) -> None:
        tell_version(self._inner, version)

    def state_dict(self) -> dict[str, Any]:
        """State of the inner source; teachers have none."""
        return {"inner": state_of(self._inner)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_into(self._inner, state["inner"])


async def _teacher_logps(item: SAWItem, teacher: TeacherScorer) -> LogprobArray:
    """The teacher's log-prob of every action token."""
    counts = item.attention_mask  # a padded sample is scored without the padding
    ids, where = item.input_ids[counts], np.flatnonzero(item.action_mask[counts])
    if not len(where):
        return np.zeros(0, dtype=np.float32)
    first, end = int(where[0]), int(where[-1]) + 1
    # Score from the first action token to the last; drop the tokens between actions afterwards.
    scores = await teacher.score_tokens(ids[:first], ids[first:end], temperature=item.attachments.temperature or 1.0)
    return np.asarray(scores, dtype=np.float32)[where - first]


# --- one teacher per domain ---

DomainOf: TypeAlias = Callable[[SAWItem], str]


def domain_of(item: SAWItem) -> str:
    """The domain of the request (`RolloutRequest.meta["domain"]`), else the name of the environment."""
    domain = item.origin.domain or item.origin.env_name
    if domain is None:
        raise ConfigError(
            f"A sample (rollout {item.origin.rollout_id}) names neither a domain nor an env, so no teacher can be chosen. "
            'Put meta={"domain": …} on its request.'
        )
    return domain


class DomainTeachers:
    """A teacher for each domain, all with the same tokenizer."""

    def __init__(self, teachers: Mapping[str, TeacherScorer], *, domain_of: DomainOf = domain_of) -> None:
        if not teachers:
            raise ConfigError("DomainTeachers needs at least one teacher.")
        self._teachers = dict(teachers)
        self._domain_of = domain_of

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self._teachers)

    def teacher_for(self, item: SAWItem) -> TeacherScorer:
        domain = self._domain_of(item)
        if domain not in self._teachers:
            raise UnknownName.among("teacher for the domain", domain, self._teachers)
        return self._teachers[domain]

    def require_tokenizer(self, fingerprint: str) -> None:
        for domain, teacher in self._teachers.items():
            _require_same_tokenizer(domain, teacher, fingerprint)


# --- self-distillation from a privileged prompt ---
#
# The teacher scores the student's own tokens after another prompt, which holds for example the right answer or a long
# instruction. It may be the same model, frozen or current: the student learns to behave without the prompt as with it.

PromptOf: TypeAlias = Callable[[SAWItem], TokenIds]
"""The teacher's prompt for a sample; it replaces all tokens before the sample's first action token."""


class PrivilegedTeacher:
    """Lets `teacher` score each sample after the prompt that `prompt_of` returns for it."""

    def __init__(self, teacher: TeacherScorer, prompt_of: PromptOf) -> None:
        self._teacher, self._prompt_of = teacher, prompt_of

    def teacher_for(self, item: SAWItem) -> TeacherScorer:
        prompt = token_array(self._prompt_of(item))
        if not len(prompt):
            raise ConfigError(
                f"prompt_of gave an empty prompt for a sample (rollout {item.origin.rollout_id}); a teacher needs at least "
                "one prompt token."
            )
        return _HintedTeacher(self._teacher, prompt)

    def require_tokenizer(self, fingerprint: str) -> None:
        _require_same_tokenizer("privileged", self._teacher, fingerprint)


@dataclass(frozen=True, slots=True)
class _HintedTeacher:
    """The teacher of one sample, with a fixed prompt."""

    teacher: TeacherScorer
    prompt: TokenArray

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.teacher.tokenizer_fingerprint

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> LogprobArray:
        return await self.teacher.score_tokens(self.prompt, completion_token_ids, temperature=temperature)


def hint_first(template: ChatTemplate, hint_of: Callable[[SAWItem], str] | None = None) -> PromptOf:
    """Prompts that put a system message with the sample's hint before the student's prompt.

    For templates that render a conversation as the concatenation of its messages. The hint is the request's `meta["hint"]`,
    unless `hint_of` is given.
    """
    hint_of = hint_of if hint_of is not None else _hint_in_request

    def prompt_of(item: SAWItem) -> TokenArray:
        hint = template.apply([{"role": "system", "content": hint_of(item)}], add_generation_prompt=False)
        return np.concatenate([hint.prompt_token_ids, _prompt_of_student(item)])

    return prompt_of


def _hint_in_request(item: SAWItem) -> str:
    hint = request_meta_in(item.meta).get("hint")
    if hint is None:
        raise ConfigError(
            f"A sample (rollout {item.origin.rollout_id}) has no hint, so its teacher would know no more than the student. "
            'Put meta={"hint": …} on its request.'
        )
    return str(hint)


def _prompt_of_student(item: SAWItem) -> TokenArray:
    """The tokens before the first action token."""
    ids, where = item.input_ids[item.attention_mask], np.flatnonzero(item.action_mask[item.attention_mask])
    return ids[: where[0] if len(where) else len(ids)]
