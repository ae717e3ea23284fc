"""Whether a model has the tokens of samples. A sample of another tokenizer would index past the end of its tables."""

from collections.abc import Iterable
from typing import Any

from ludic.models.head import plain_model
from ludic.types import LudicError, SAWItem


def vocabulary_of(model: Any) -> int | None:
    """The number of tokens that have an embedding and a logit; None if the model does not say."""
    inner = plain_model(model)
    if not hasattr(inner, "get_input_embeddings"):
        return None
    # A model that is not from transformers may have the first method only.
    tables = (inner.get_input_embeddings(), getattr(inner, "get_output_embeddings", lambda: None)())
    sizes = [getattr(table, name, None) for table, name in zip(tables, ("num_embeddings", "out_features"), strict=True)]
    return min((size for size in sizes if size is not None), default=None)


def require_known_ids(items: Iterable[SAWItem], num_tokens: int | None, error: type[LudicError], advice: str) -> None:
    """Raise `error` for a token, or a candidate of one, that a model of `num_tokens` tokens does not have."""
    for item in items:
        candidates = item.attachments.candidates
        arrays = [item.input_ids] if candidates is None else [item.input_ids, candidates.ids]
        largest = max(int(ids.max(initial=0)) for ids in arrays)
        if num_tokens is not None and largest >= num_tokens:
            what = "a token" if candidates is None else "a token, or a candidate of one,"
            raise error(f"A sample has {what} with the id {largest}; the model has {num_tokens} tokens. {advice}")
