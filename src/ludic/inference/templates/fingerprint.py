"""What the token ids of a model mean, as one short text that two models can be compared by."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ludic.types import ConfigError


@runtime_checkable
class HasVocabulary(Protocol):
    """Knows the text of every id, as tokenizers of transformers do."""

    def get_vocab(self) -> Mapping[str, int]: ...


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash over id and text of all tokens.

    How text is cut into tokens does not count: scoring is given ids, and never cuts anything.
    """
    if not isinstance(tokenizer, HasVocabulary):
        raise ConfigError(
            f"A {type(tokenizer).__name__} does not say what its token ids mean; that takes a tokenizer with get_vocab(), "
            "such as those of transformers."
        )
    by_id = sorted((number, text) for text, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()
