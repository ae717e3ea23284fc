"""Self-distillation from a privileged prompt: a teacher that is told more than the student was.

The teacher scores the student's very tokens, but after another prompt: with the right answer in it, or a long instruction. It may
be the same model, frozen or as it is now: what the prompt does to it is what the student learns to do without the prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ludic.batch_gen.teachers import require_same_tokenizer
from ludic.inference import ChatTemplate
from ludic.types import ConfigError, LogprobArray, SAWItem, TeacherScorer, TokenArray, TokenIds, token_array

PromptOf: TypeAlias = Callable[[SAWItem], TokenIds]
"""The prompt that the teacher sees of a sample, instead of all that stands before the sample's first action token."""


class PrivilegedTeacher:
    """`teacher`, asked about every sample after the prompt that `prompt_of` makes for it."""

    def __init__(self, teacher: TeacherScorer, prompt_of: PromptOf) -> None:
        self._teacher, self._prompt_of = teacher, prompt_of

    def teacher_for(self, item: SAWItem) -> TeacherScorer:
        prompt = token_array(self._prompt_of(item))
        if not len(prompt):
            raise ConfigError(
                f"prompt_of gave an empty prompt for a sample (rollout {item.meta.get('rollout_id')}); a teacher needs at least "
                "one token to go on from."
            )
        return _ToldMore(self._teacher, prompt)

    def require_tokenizer(self, fingerprint: str) -> None:
        require_same_tokenizer("privileged", self._teacher, fingerprint)


@dataclass(frozen=True, slots=True)
class _ToldMore:
    """A teacher of one sample."""

    teacher: TeacherScorer
    prompt: TokenArray

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.teacher.tokenizer_fingerprint

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> LogprobArray:
        return await self.teacher.score_tokens(self.prompt, completion_token_ids, temperature=temperature)


# --- prompts with more in them ---


def told_first(template: ChatTemplate, hint_of: Callable[[SAWItem], str] | None = None) -> PromptOf:
    """A system message with the sample's hint, and then the tokens that the student saw.

    For templates whose conversations are their messages one after the other. The hint is what the request said
    (`RolloutRequest.meta["hint"]`), unless `hint_of` knows another.
    """
    hint_of = hint_of if hint_of is not None else hint_in_request

    def prompt_of(item: SAWItem) -> TokenArray:
        told = template.apply([{"role": "system", "content": hint_of(item)}], add_generation_prompt=False)
        return np.concatenate([told.prompt_token_ids, prompt_of_student(item)])

    return prompt_of


def hint_in_request(item: SAWItem) -> str:
    hint = item.meta.get("request_meta", {}).get("hint")
    if hint is None:
        raise ConfigError(
            f"A sample (rollout {item.meta.get('rollout_id')}) has no hint, so its teacher would know no more than the student. "
            'Put meta={"hint": …} on its request.'
        )
    return str(hint)


def prompt_of_student(item: SAWItem) -> TokenArray:
    """All that stands before the first action token."""
    ids, where = item.input_ids[item.attention_mask], np.flatnonzero(item.action_mask[item.attention_mask])
    return ids[: where[0] if len(where) else len(ids)]
