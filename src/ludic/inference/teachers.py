"""Teachers: models that score tokens which a student has sampled.

A teacher takes token ids unchanged and returns one log-prob per completion token (`ludic.types.TeacherScorer`). `LocalTeacher`
uses an embedded engine.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ludic.types import ConfigError, LogprobArray, TokenIds

if TYPE_CHECKING:  # it loads torch
    from ludic.inference.local.engine import LocalEngine


@runtime_checkable
class HasVocabulary(Protocol):
    """A tokenizer with a vocabulary, such as those of transformers."""

    def get_vocab(self) -> Mapping[str, int]: ...


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash over id and text of all tokens, to check that the token ids of two models mean the same.

    Tokenisation rules are not part of it: scoring takes ids and never tokenises text.
    """
    if not isinstance(tokenizer, HasVocabulary):
        raise ConfigError(
            f"A {type(tokenizer).__name__} has no vocabulary to compare; pass a tokenizer with get_vocab(), "
            "such as those of transformers."
        )
    by_id = sorted((number, text) for text, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()


class LocalTeacher:
    """The model of an embedded engine."""

    def __init__(self, engine: "LocalEngine") -> None:
        self._engine = engine
        self.tokenizer_fingerprint = tokenizer_fingerprint(engine.tokenizer)

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> LogprobArray:
        return await self._engine.score_tokens(prompt_token_ids, completion_token_ids, temperature=temperature)
