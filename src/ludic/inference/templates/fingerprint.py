"""A hash of a tokenizer's vocabulary, to check that the token ids of two models mean the same."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ludic.types import ConfigError


@runtime_checkable
class HasVocabulary(Protocol):
    """A tokenizer with a vocabulary, such as those of transformers."""

    def get_vocab(self) -> Mapping[str, int]: ...


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash over id and text of all tokens.

    Tokenisation rules are not part of it: scoring takes ids and never tokenises text.
    """
    if not isinstance(tokenizer, HasVocabulary):
        raise ConfigError(
            f"A {type(tokenizer).__name__} has no vocabulary to compare; pass a tokenizer with get_vocab(), "
            "such as those of transformers."
        )
    by_id = sorted((number, text) for text, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()
